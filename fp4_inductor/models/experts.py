"""Which modules hold routed experts, how they store them, and what they compute between the two products.

The activation is proved, not assumed: the module's own gating function (its whole forward, where it does not use transformers'
experts interface) is run on a probe and compared with every activation that ``fp4.moe`` knows. What matches none is refused by
name (:class:`fp4_inductor.errors.GatingError`).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.activation import ACTIVATIONS, Activation
from . import families
from .family import Experts

_PROBE = (64, 64)
_EQUAL = 5e-6  # of the largest result in a row; gelu and its tanh form differ by 5e-4
CALL = ("hidden_states", "top_k_index", "top_k_weights")  # of an experts module
_INTERFACE = ("has_gate", "has_bias", "is_transposed", "_apply_gate")  # what transformers' @use_experts_implementation sets


@dataclass(frozen=True)
class ExpertsSpec:
    """How one module stores its experts.

    Args:
        first: Parameter of the first product, ``"gate_up_proj"`` or ``"up_proj"``; the second is ``down_proj``.
        transposed: the weights are ``[E, K, N]``.
        bias: there are ``<first>_bias [E, G]`` and ``down_proj_bias [E, H]``.
        activation: what lies between the two products.
        dense: the module is called with every expert's tokens one after the other, without routing (Llama 4).
        identity: ids from the number of experts on, as many as this, stand for experts that return their input (LongCat-Flash).
    """

    first: str
    transposed: bool
    bias: bool
    activation: Activation
    dense: bool = False
    identity: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        names = (self.first, "down_proj")
        return (*names, *(f"{n}_bias" for n in names)) if self.bias else names


def describe_experts(module: nn.Module) -> ExpertsSpec | str | None:
    """How ``module`` stores its experts; a sentence if it holds experts whose computation is unknown; None if it holds none."""
    first = next((n for n in ("gate_up_proj", "up_proj") if _is_stack(module, n)), None)
    if first is None or not _is_stack(module, "down_proj"):
        return None
    if all(hasattr(module, name) for name in _INTERFACE):
        return _by_interface(module, first)
    family = next((e for e in _described(module) if first in dict(e.layouts) and e.dense), None)
    if family is None:
        unknown = f"{type(module).__name__} does not use transformers' experts interface, and forward({', '.join(CALL)}) of it is nothing that fp4.moe computes"
        return by_forward(module, first) or unknown
    act = recognise(lambda z: _halves_product(module.act_fn, z), gated=True)  # type: ignore[arg-type]
    return ExpertsSpec(first, _transposed(family, first), False, act, True) if act else _unknown(module, "act_fn")


def interface_weights(module: nn.Module) -> tuple[str, str] | None:
    """The two weights of a module with transformers' experts interface, whatever it computes between and behind the products; else None."""
    first = next((n for n in ("gate_up_proj", "up_proj") if _is_stack(module, n)), None)
    if first is None or not _is_stack(module, "down_proj") or not all(hasattr(module, name) for name in _INTERFACE):
        return None
    biases = {f"{n}_bias" for n in (first, "down_proj")} if module.has_bias else set()
    own = {name for name, p in module._parameters.items() if p is not None}
    return (first, "down_proj") if bool(module.has_gate) == (first == "gate_up_proj") and own == {first, "down_proj", *biases} else None


def _by_interface(module: nn.Module, first: str) -> ExpertsSpec | str:
    gated = bool(module.has_gate)
    if getattr(module, "has_post_expert_norm", False):
        return f"{type(module).__name__} normalises each expert's output, which fp4.moe does not"
    if gated != (first == "gate_up_proj"):
        return f"{type(module).__name__} has has_gate={gated} and a Parameter {first}"
    bias = bool(module.has_bias)
    if {n.removesuffix("_bias") for n in module._parameters if n.endswith("_bias")} != ({first, "down_proj"} if bias else set()):
        return f"{type(module).__name__} has has_bias={bias} and Parameters {sorted(module._parameters)}"
    gate = module._apply_gate if gated else module.act_fn
    act = recognise(gate, gated, _constants(module))  # type: ignore[arg-type]
    return ExpertsSpec(first, bool(module.is_transposed), bias, act) if act else _unknown(module, "_apply_gate" if gated else "act_fn")


def by_forward(module: nn.Module, first: str) -> ExpertsSpec | None:
    """How a module without transformers' interface computes: its forward is run on small random weights and compared with ``fp4.moe``'s definition.

    Proved are the layout of both weights, the activation, and what ids behind the last expert do (nothing else may be there: no
    biases, buffers or submodules with tensors). The module itself is not run or changed. None: it computes something else.
    """
    weights = {n: module._parameters.get(n) for n in (first, "down_proj")}
    held = {n for n, t in (*module.named_parameters(), *module.named_buffers()) if t is not None}
    try:
        arguments = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return None
    if held != set(weights) or arguments != CALL:
        return None
    up, down = (tuple(p.shape) for p in weights.values() if p is not None)
    for transposed in (False, True):
        (rows, columns), (width, inner) = (s[:0:-1] if transposed else s[1:] for s in (up, down))
        gated = rows == 2 * inner
        if columns == width and rows in (inner, 2 * inner) and up[0] >= down[0] and gated == (first == "gate_up_proj"):
            act = _proved(module, first, (up[0], down[0]), transposed, gated)
            if act is not None:
                return ExpertsSpec(first, transposed, False, act, identity=up[0] - down[0])
    return None


_SIDE, _TOKENS, _CHOSEN = 16, 96, 8  # of the probe of a forward: hidden and inner size, tokens, experts that they go to


def _proved(module: nn.Module, first: str, experts: tuple[int, int], transposed: bool, gated: bool) -> Activation | None:
    """The activation with which ``module.forward`` is ``fp4.moe``'s definition on a probe, or None. ``experts``: how many ids, and how many have weights."""
    ids, own = experts
    constants = _constants(module)
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        gate_up, down = random(ids, (1 + gated) * _SIDE, _SIDE) / _SIDE**0.5, random(own, _SIDE, _SIDE)
        x, weights = random(_TOKENS, _SIDE), random(_TOKENS, 2).abs()
        x *= torch.where(torch.arange(_TOKENS) < _TOKENS // 2, 1.5, 3.0 * max((abs(c) for c in constants), default=4.0))[:, None]
        some = torch.linspace(0, own - 1, min(own, _CHOSEN)).long()  # of many experts a few, the first and the last among them
        chosen = some[torch.randint(len(some), (_TOKENS, 2), generator=generator)]
        if ids > own:
            chosen[::3, 0] = torch.randint(own, ids, (len(chosen[::3]),), generator=generator)
        shell = copy.copy(module)
        stored = {first: gate_up, "down_proj": down}
        shell.__dict__["_parameters"] = {n: nn.Parameter((t.mT if transposed else t).contiguous(), requires_grad=False) for n, t in stored.items()}
        before = dict(vars(module))
        try:
            got = type(module).forward(shell, x.clone(), chosen.clone(), weights.clone())
        except Exception:  # a forward that wants more than tokens and their routing, or sizes of its own
            return None
        if not isinstance(got, Tensor) or got.shape != x.shape or vars(module) != before or set(vars(shell)) != set(before):
            return None
        z = torch.einsum("tkgh,th->tkg", gate_up[chosen], x)
        skip = (chosen >= own).unsqueeze(-1)
        for act in _candidates(gated, constants):
            y = torch.einsum("tkhi,tki->tkh", down[chosen.clamp(max=own - 1)], act(z, _SIDE))
            want = (torch.where(skip, x.unsqueeze(1), y) * weights.unsqueeze(-1)).sum(1)
            if bool(((got - want).abs().amax(-1) <= _EQUAL * want.abs().amax(-1)).all()):
                return act
    return None


def _unknown(module: nn.Module, name: str) -> str:
    return f"{type(module).__name__}.{name} is none of the activations of fp4.moe ({', '.join(ACTIVATIONS)})"


def recognise(gate: Callable[[Tensor], Tensor], gated: bool, constants: tuple[float, ...] = ()) -> Activation | None:
    """The activation that equals ``gate`` on a probe whose values reach past every clamp, or None.

    Args:
        gate: float32 ``[..., 2 * I]`` -> ``[..., I]`` if ``gated``, else elementwise.
        constants: slopes and limits that may occur.
    """
    width = _PROBE[1]
    reach = 3.0 * max((abs(c) for c in constants), default=4.0)
    # Device and dtype said outright: a model that transformers is loading is described under its default dtype and on the meta device.
    with torch.device("cpu"):
        z = torch.randn(*_PROBE, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        z *= torch.where(torch.arange(_PROBE[0]) < _PROBE[0] // 2, 1.5, reach)[:, None]  # small values tell smooth functions apart
    try:
        with torch.no_grad(), torch.device("cpu"):
            want = gate(z.clone())
    except Exception:  # a gate that wants more than a tensor is not one we know
        return None
    inner = width // 2 if gated else width
    if not isinstance(want, Tensor) or want.shape != (_PROBE[0], inner):
        return None
    for act in _candidates(gated, constants):
        got = act(z, inner)
        if bool(((got - want).abs().amax(-1) <= _EQUAL * want.abs().amax(-1)).all()):
            return act
    return None


def _candidates(gated: bool, constants: tuple[float, ...]) -> Iterator[Activation]:
    alphas = dict.fromkeys((1.0, 1.702, *constants))
    limits = (None, *(c for c in constants if c > 0))
    for name, (needs_gate, has_alpha) in ACTIVATIONS.items():
        if needs_gate and not gated:
            continue
        for alpha, limit, interleaved in itertools.product(alphas if has_alpha else (1.0,), limits, (False, True) if gated else (False,)):
            yield Activation(name, alpha, limit, interleaved)


def _constants(module: nn.Module) -> tuple[float, ...]:
    found = (float(v) for k, v in vars(module).items() if type(v) in (int, float) and ("alpha" in k or "limit" in k))
    return tuple(c for c in found if math.isfinite(c))  # a limit of infinity clamps nothing


def _halves_product(act: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    gate, up = z.chunk(2, -1)
    return act(gate) * up


def _is_stack(module: nn.Module, name: str) -> bool:
    p = module._parameters.get(name)
    return p is not None and not isinstance(p, nn.parameter.UninitializedParameter) and p.dim() == 3 and p.dtype.is_floating_point


def _described(module: nn.Module) -> Iterator[Experts]:
    for family in families():
        for experts in family.experts:
            if re.fullmatch(experts.owner, type(module).__name__):
                yield experts


def _transposed(family: Experts, first: str) -> bool:
    return dict(family.layouts)[first] == "[E, K, N]"
