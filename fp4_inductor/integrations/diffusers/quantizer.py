"""The quantizer that diffusers calls while it loads a model whose ``quantization_config`` says ``fp4_inductor``."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from diffusers.quantizers.base import DiffusersQuantizer
from diffusers.quantizers.quantization_config import QuantizationConfigMixin
from torch import Tensor, nn

from ..._renamed import current, has_old_names
from ...checkpoint.directory import check_values
from ...errors import CheckpointError, ConfigError, DeviceError, bullet_names, list_names
from ...models import siblings
from ...models.convert import carry_over, replace_module
from ...models.coverage import record
from ...models.plan import inspect, linear_kind
from ...modules import BY_STORAGE, FP4Linear
from ...modules.bits import BitBuffers
from ...modules.marker import is_marker

VERSION = 1
_AGAIN = "Download the checkpoint again, or quantize the original model again."


class _Method(enum.StrEnum):  # diffusers reads .value
    FP4 = "fp4_inductor"


METHOD = _Method.FP4


@has_old_names
class FP4DiffusersConfig(QuantizationConfigMixin):
    """``quantization_config`` of a diffusers model that was quantized here.

    Args:
        layers: path of each packed layer -> the name of its format.
        prefill: as in :class:`fp4_inductor.NVFP4Config`.
    """

    def __init__(self, layers: Mapping[str, str] | None = None, prefill: str = "auto", version: int = VERSION, quant_method: str = METHOD, **unknown: Any):
        wrong = sorted(unknown) + ([f"version {version}"] if version != VERSION else [])
        wrong += [repr(layers)[:40]] if layers is not None and not isinstance(layers, Mapping) else []
        wrong += sorted(f"{name}: {kind!r}"[:80] for name, kind in (layers or {}).items() if kind not in BY_STORAGE) if isinstance(layers, Mapping) else []
        wrong += [f"prefill {prefill!r}"] if prefill not in FP4Linear.ACCEPTED else []
        if wrong:
            raise CheckpointError(
                "the quantization_config is not one that can be read", value=list_names(wrong), limit=f"version {VERSION}; {list(BY_STORAGE)}", remedy=_AGAIN
            )
        self.quant_method, self.version, self.prefill, self.layers = METHOD, version, prefill, dict(layers or {})

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        return super().from_dict(current(config_dict), return_unused_kwargs, **kwargs)

    def __repr__(self) -> str:  # that of the base class asks for a method that it has not
        return f"{type(self).__name__}({len(self.layers)} layers, prefill={self.prefill!r})"


class FP4DiffusersQuantizer(DiffusersQuantizer):
    """Puts empty packed layers in place of the dense ones, and gives them what diffusers reads from the files."""

    use_keep_in_fp32_modules = True
    is_serializable = True
    is_trainable = True
    is_compileable = True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise ConfigError(
                "diffusers models are not quantized while they load",
                value=type(self.quantization_config).__name__,
                limit="checkpoints that were quantized",
                remedy="Load the dense model, then call fp4_inductor.quantize_model(model).",
            )
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        if any(str(place) == "disk" for place in places):
            raise DeviceError(
                "packed weights cannot stay on disk", value=device_map, limit="devices with memory", remedy="Leave out the disk: FP4 weights are a quarter."
            )

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        modules = dict(model.named_modules())
        wrong = [
            f"{name}: {type(modules[name]).__name__ if name in modules else 'nothing'} in the model"
            for name in self.quantization_config.layers
            if name not in modules or linear_kind(modules[name]) != "linear"
        ]
        if wrong:
            raise CheckpointError(
                f"the checkpoint does not fit {type(model).__name__}:\n{bullet_names(wrong)}\n",
                value=f"{len(wrong)} layers",
                limit="linear layers",
                remedy=_AGAIN,
            )
        for name, storage in self.quantization_config.layers.items():
            old = modules[name]
            n, k = old.weight.shape
            kind = BY_STORAGE[storage]
            prefill = self.quantization_config.prefill if self.quantization_config.prefill in kind.ACCEPTED else "auto"
            new = kind(k, n, bias=old.bias is not None, dtype=old.weight.dtype, device="meta", prefill=prefill)
            carry_over(old, new)
            replace_module(model, (name,), new)

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        if missing_keys:
            raise CheckpointError(
                f"the checkpoint misses tensors of {type(model).__name__}:\n{bullet_names(sorted(missing_keys))}\n",
                value=f"{len(missing_keys)} tensors",
                limit="every tensor of the model",
                remedy=_AGAIN,
            )
        return missing_keys

    def check_if_quantized_param(self, model: nn.Module, param_value: Tensor, param_name: str, state_dict: Mapping[str, Tensor], **kwargs: Any) -> bool:
        owner, _, part = param_name.rpartition(".")
        module = model.get_submodule(owner)
        return isinstance(module, BitBuffers) and part != "bias"

    def check_quantized_param_shape(self, param_name: str, current_param: Tensor, loaded_param: Tensor) -> bool:
        if current_param.shape != loaded_param.shape:
            shapes = tuple(loaded_param.shape), tuple(current_param.shape)
            raise CheckpointError(f"{param_name} has the wrong shape", value=shapes[0], limit=shapes[1], remedy=_AGAIN)
        return True

    def create_quantized_param(
        self, model: nn.Module, param_value: Tensor, param_name: str, target_device: Any, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """Give the layer the tensor as it is stored: diffusers casts floating-point tensors to its own dtype before it asks."""
        owner, _, part = param_name.rpartition(".")
        module, t = model.get_submodule(owner), state_dict[param_name]
        if part == "weight" and is_marker(t.dtype, tuple(t.shape)):
            return
        want = module._buffers.get(part)
        if want is None or t.dtype != want.dtype or t.shape != want.shape:
            limit = "no such tensor" if want is None else f"{want.dtype} {tuple(want.shape)}"
            raise CheckpointError(f"{param_name} has the wrong shape or dtype", value=f"{t.dtype} {tuple(t.shape)}", limit=limit, remedy=_AGAIN)
        if part in ("scale", "global_scale", "meta"):
            check_values(param_name, t)
        setattr(module, part, t.to(target_device))

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        empty = [name for name, b in model.named_buffers() if b.is_meta]
        if empty:
            raise CheckpointError("tensors of packed layers are not in the checkpoint", value=list_names(empty), limit="all of them", remedy=_AGAIN)
        model.is_quantized = False  # type: ignore[assignment]  # diffusers would refuse .half() and .to(dtype), which leave packed weights alone
        if len(set((getattr(model, "hf_device_map", None) or {}).values())) < 2:
            siblings.pack_model(model)
        record(model, siblings.annotated(inspect(model, {}, {}), model))
        return model
