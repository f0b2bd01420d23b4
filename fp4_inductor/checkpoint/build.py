"""Build a model without spending memory on weights that a checkpoint is about to replace."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import ConfigError
from ..modules import SiblingWeight


def build_empty(factory: Callable[[], nn.Module]) -> nn.Module:
    """``factory()`` with its Parameters on the meta device and its buffers real.

    Buffers that are not in a checkpoint (rotary frequencies, masks) are computed by the constructor, so building on the
    meta device would lose them; only Parameters are dropped, one by one as they are made. If the constructor needs the
    values of Parameters, the factory is called a second time, as it is.

    Raises:
        ConfigError: the factory is no function, or what it makes is no module.
    """
    if not callable(factory):
        raise _not_a_module(factory)
    me = threading.get_ident()

    def drop(module: nn.Module, name: str, param: Tensor | None):
        if threading.get_ident() != me or type(param) is not nn.Parameter or param.device.type == "meta":
            return None
        # The same Parameter may be registered again elsewhere (tied): it gets the same stand-in.
        twin = getattr(param, "_fp4_stand_in", None)
        if twin is None:
            twin = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            param._fp4_stand_in = twin  # type: ignore[attr-defined]
        return twin

    handle = register_module_parameter_registration_hook(drop)
    try:
        model = factory()
    except Exception:  # the constructor computes with its weights
        model = None
    finally:
        handle.remove()
    if not isinstance(model, nn.Module) or values_lost(model):
        model = factory()
    if not isinstance(model, nn.Module):
        raise _not_a_module(model)
    return model


def _not_a_module(value: object) -> ConfigError:
    return ConfigError(
        "load() takes a module or a function without arguments that makes one",
        value=type(value).__name__,
        limit="torch.nn.Module",
        remedy="Pass the model, or lambda: Model(config).",
    )


def values_lost(model: nn.Module) -> list[str]:
    """Names of tensors on the meta device that no checkpoint can restore: non-persistent buffers, plain attributes."""
    lost = []
    for prefix, module in model.named_modules():
        if isinstance(module, SiblingWeight):  # its layers are replaced
            continue
        names = [n for n in module._non_persistent_buffers_set if (b := module._buffers.get(n)) is not None and b.device.type == "meta"]
        names += [n for n, v in vars(module).items() if isinstance(v, Tensor) and v.device.type == "meta"]
        lost += [f"{prefix}.{n}".lstrip(".") for n in names]
    return lost
