"""What one module is to a quantizer: a linear layer, something that only looks like one, or the owner of a stack of matrices."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import families

_EXPERT_SIDE = 16  # a 3-D Parameter whose matrices are smaller than one scale block is no expert weight
_SHAPES = ((3, 7), (2, 3, 7))  # inputs of the probe; 7 columns and 5 rows are no shape that a layer would treat specially
_ROWS, _COLUMNS = 5, 7
# Of the largest result: dtype -> what two orders of summation may differ by.
_EQUAL = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
# A value of these types cannot change while the probe runs, so a layer that holds only such values has no state.
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def linear_kind(module: nn.Module) -> str | None:
    """``"linear"``, ``"transposed"``, or why a linear layer cannot be replaced (``"forward"``, ``"attention"``); None: not linear.

    A class with a forward of its own is run once on a small random weight: it is ``"linear"`` if it computes what
    ``F.linear`` computes, and nothing else.
    """
    cls = type(module)
    if isinstance(module, (nn.modules.linear.NonDynamicallyQuantizableLinear, nn.MultiheadAttention)):
        return "attention"  # reads its weights itself, past any forward
    if isinstance(module, nn.Linear):
        return "linear" if cls.forward is nn.Linear.forward or computes_linear(module) else "forward"
    qualified = {(c.__module__, c.__name__) for c in cls.__mro__}
    if any(item in qualified for f in families() for item in f.linears):
        return "transposed"
    weight = getattr(module, "weight", None)
    if cls.__name__.endswith("Linear") and isinstance(weight, Tensor) and weight.dim() == 2:
        return "linear" if computes_linear(module) else "forward"
    return None


def computes_linear(module: nn.Module) -> bool:
    """Whether ``module.forward(x)`` is ``F.linear(x, weight, bias)`` in training and in evaluation, without side effects that can be seen.

    The layer itself is not run: a shallow copy with a random weight ``[5, 7]`` on the CPU is. A layer with other tensors, with
    submodules, with attributes that are not constants, or whose forward takes more than one argument is not probed.
    """
    bias = module._parameters.get("bias")
    if module._buffers or module._modules or set(module._parameters) - {"weight", "bias"} or module._parameters.get("weight") is None:
        return False
    if not _takes_one_argument(module) or not all(_constant(v) for k, v in vars(module).items() if k not in _MODULE_STATE):
        return False
    return all(_same(module, bias is not None, dtype, training) for dtype in _EQUAL for training in (False, True))


# What nn.Module keeps of a module without submodules and buffers: hooks do not belong to its forward.
_MODULE_STATE = frozenset(vars(nn.Module()))


def _takes_one_argument(module: nn.Module) -> bool:
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    return [p.kind for p in parameters] in ([inspect.Parameter.POSITIONAL_OR_KEYWORD], [inspect.Parameter.POSITIONAL_ONLY])


def _constant(value: Any) -> bool:
    return isinstance(value, _CONSTANT) or (isinstance(value, tuple) and all(map(_constant, value)))


def _same(module: nn.Module, has_bias: bool, dtype: torch.dtype, training: bool) -> bool:
    shell = copy.copy(module)
    state = shell.__dict__
    # Device and dtype said outright: a model that transformers is loading is planned under its default dtype and on the meta device.
    with torch.device("cpu"), torch.no_grad():
        random = torch.Generator().manual_seed(0)
        weight, bias = (torch.randn(shape, generator=random, dtype=torch.float32).to(dtype) for shape in ((_ROWS, _COLUMNS), (_ROWS,)))
        state["_parameters"] = dict.fromkeys(module._parameters) | {"weight": nn.Parameter(weight.clone(), requires_grad=False)}
        if has_bias:
            state["_parameters"]["bias"] = nn.Parameter(bias.clone(), requires_grad=False)
        sizes = {"in_features": _COLUMNS, "out_features": _ROWS}
        state |= {k: v for k, v in sizes.items() if k in state} | {"training": training}
        before = {k: v for k, v in state.items() if k not in _MODULE_STATE}
        try:
            for shape in _SHAPES:
                x = torch.randn(shape, generator=random, dtype=torch.float32).to(dtype)
                got, want = type(module).forward(shell, x.clone()), F.linear(x, weight, bias if has_bias else None)
                if type(got) is not Tensor or got.shape != want.shape or got.dtype != want.dtype:
                    return False
                if not bool(((got - want).abs() <= _EQUAL[dtype] * want.abs().amax()).all()):
                    return False
        except Exception:  # a forward that wants more than a tensor of any shape is not a plain linear layer
            return False
        after = {k: v for k, v in state.items() if k not in _MODULE_STATE}
        unchanged = all(p is None or torch.equal(p, old) for p, old in ((state["_parameters"]["weight"], weight), (state["_parameters"].get("bias"), bias)))
        return unchanged and after == before and set(state["_parameters"]) == set(module._parameters) and not state["_buffers"] and not state["_modules"]


def opaque_reason(kind: str, module: nn.Module) -> str:
    """Why the weight of a linear layer that cannot be replaced stays."""
    if kind == "attention":
        return "nn.MultiheadAttention reads this weight itself"
    return f"{type(module).__name__} is a linear layer with its own forward"


def stack_owner(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The module whose forward uses the Parameters of ``module``: for the parts of a parametrized tensor, the module that was parametrized."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return model.get_submodule(name.rpartition("parametrizations")[0].rstrip("."))
    return module


def kept_stack(owner: nn.Module, name: str) -> str | None:
    """Why the 3-D Parameter ``name`` of ``owner`` is no expert weight, if a family says so, or None."""
    for family in families():
        for kept in family.stacks:
            if kept.reason and re.fullmatch(kept.owner, type(owner).__name__) and re.fullmatch(kept.parameter, name):
                return kept.reason
    return None


def expert_family(module: nn.Module, name: str, p: Tensor) -> str | None:
    """Whose stack of matrices ``module.name`` is, in words for the report, or None if it is no stack of matrices that a product would use.

    Any 3-D floating-point Parameter ``[E > 1, >= 16, >= 16]`` outside a convolution counts, described or not: a linear-only
    quantizer that misses experts misses 95% of such a model. ``module``: from :func:`stack_owner`.
    """
    if p.dim() != 3 or not p.dtype.is_floating_point or isinstance(module, nn.modules.conv._ConvNd):
        return None
    if p.shape[0] < 2 or min(p.shape[1:]) < _EXPERT_SIDE or kept_stack(module, name):
        return None
    cls = type(module).__name__
    named = [f.name for f in families() for e in f.experts if re.fullmatch(e.owner, cls) and name in dict(e.layouts)]
    # The most specific description wins; "decoder" holds the layout most families share.
    named.sort(key=lambda n: n == "decoder")
    if named:
        return f"expert weights ({cls if named[0] == 'decoder' else named[0]})"
    if re.search(r"expert|moe", f"{cls} {name}", re.IGNORECASE):
        return "expert weights (unknown family)"
    return f"a stack of matrices; how {cls} uses it is not known"
