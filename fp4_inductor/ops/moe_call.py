"""The arguments of ``fp4.moe`` and ``fp4.moe_backward`` as structs: the only place that knows their flat order.

The schemas stay flat, because torch's do not nest. Whoever implements, reads or makes a call uses :class:`MoeCall`. Its fields are tensors in eager
calls, nodes of a graph in a pass, and buffers in a lowering; nothing here reads more of them than their shapes.
Nobody changes one: they are not declared frozen because that triples what it costs to make them, which happens at every call of a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .activation import Activation

NAMES = (
    "hidden", "expert_ids", "expert_weights",
    "gate_up_qdata", "gate_up_scale", "gate_up_global_scale", "down_qdata", "down_scale", "down_global_scale",
    "gate_up_bias", "down_bias", "activation", "alpha", "limit", "interleaved", "weight_on_input", "expert_map", "prefill", "gate_up_meta", "down_meta",
)  # fmt: skip
_DEFAULTS = (None, None, "silu", 1.0, None, False, False, None, "auto", None, None)
_REQUIRED = len(NAMES) - len(_DEFAULTS)
PREFILL = NAMES.index("prefill")
_ACTIVATION_END = NAMES.index("interleaved") + 1
# An Activation checks itself, which costs as much as the rest of MoeCall.of: a model has one or two of them.
_activation = functools.lru_cache(maxsize=64)(Activation)
_SILU = Activation()


def positions(*names: str) -> dict[str, int]:
    """``{name: position in the schema}``."""
    return {name: NAMES.index(name) for name in names}


def fields_of_parts(parts: Sequence[Any], bias: Any = None) -> tuple[Any, ...]:
    """``(qdata, scale, global_scale, bias, meta)`` from parts in the order of their storage: ``(qdata, scale, global_scale)``, or of a 2:4-sparse
    weight ``(values, meta, scale, global_scale)``."""
    if len(parts) == 3:
        return (*parts, bias, None)
    qdata, meta, scale, global_scale = parts
    return qdata, scale, global_scale, bias, meta


def flat(
    tokens: tuple[Any, Any, Any], gate_up: tuple[Any, ...], down: tuple[Any, ...], act: Activation,
    weight_on_input: bool = False, expert_map: Any = None, prefill: str = "auto",
) -> tuple[Any, ...]:  # fmt: skip
    """The op's arguments, by position, without trailing defaults: torch leaves them out of graphs, too, and equal graphs are one cache entry.

    For layers whose forward is traced: it makes no object, which Dynamo of every supported torch follows.

    Args:
        tokens: (hidden, expert_ids, expert_weights).
        gate_up, down: as of :func:`fields_of_parts`.
    """
    (q1, s1, g1, gate_up_bias, gate_up_meta), (q2, s2, g2, down_bias, down_meta) = gate_up, down
    args = (
        *tokens, q1, s1, g1, q2, s2, g2, gate_up_bias, down_bias,
        act.name, act.alpha, act.limit, act.interleaved, weight_on_input, expert_map, prefill, gate_up_meta, down_meta,
    )  # fmt: skip
    if down_meta is not None:
        return args
    if gate_up_meta is not None:
        return args[:-1]
    if prefill != "auto":
        return args[: PREFILL + 1]
    if expert_map is not None:
        return args[:PREFILL]
    if weight_on_input:
        return args[: _ACTIVATION_END + 1]
    if act.interleaved:
        return args[:_ACTIVATION_END]
    if act.limit is not None:
        return args[: _ACTIVATION_END - 1]
    if act.alpha != 1.0:
        return args[: _ACTIVATION_END - 2]
    if act.name != "silu":
        return args[: _ACTIVATION_END - 3]
    if down_bias is not None:
        return args[: _ACTIVATION_END - 4]
    return args[: _REQUIRED + 1] if gate_up_bias is not None else args[:_REQUIRED]


@dataclass(slots=True, eq=False)
class ExpertWeight:
    """The stacked weight of one of the two products; shapes as in :mod:`.moe`.

    Args:
        qdata: codes, ``[E, N, K/2]``, or the kept ones of a 2:4-sparse weight, ``[E, N, K/4]``.
        global_scale: ``[E]``, or ``[E, 2]``, of gate and of up.
        bias: ``[E, N]`` or None.
        meta: ``[E, N, K/8]`` of a 2:4-sparse weight; None: dense.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    bias: Tensor | None = None
    meta: Tensor | None = None

    @classmethod
    def of_parts(cls, parts: Sequence[Any], bias: Any = None) -> ExpertWeight:
        """As :func:`fields_of_parts`."""
        return cls(*fields_of_parts(parts, bias))

    @property
    def experts(self) -> int:
        return self.qdata.shape[0]

    @property
    def n(self) -> int:
        return self.qdata.shape[1]

    @property
    def k(self) -> int:
        """A byte holds two codes: for every k of a dense weight, for every other one of a 2:4-sparse weight."""
        return self.qdata.shape[-1] * (2 if self.meta is None else 4)

    @property
    def packed(self) -> tuple[Tensor, ...]:
        """The codes, and the metadata of a 2:4-sparse weight."""
        return (self.qdata,) if self.meta is None else (self.qdata, self.meta)


@dataclass(slots=True, eq=False)
class MoeCall:
    """One call of ``fp4.moe``; see there."""

    hidden: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: ExpertWeight
    down: ExpertWeight
    activation: Activation = _SILU
    weight_on_input: bool = False
    expert_map: Tensor | None = None
    prefill: str = "auto"

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> MoeCall:
        """From the op's arguments, by position and by name, with the schema's defaults for those that are not given.

        Raises:
            ConfigError: an activation without meaning.
        """
        if kwargs:
            given = {**dict(zip(NAMES[_REQUIRED:], _DEFAULTS, strict=True)), **dict(zip(NAMES, args, strict=False)), **kwargs}
            args = tuple(given[name] for name in NAMES)
        elif len(args) < len(NAMES):
            args += _DEFAULTS[len(args) - _REQUIRED :]
        (
            hidden, ids, weights, q1, s1, g1, q2, s2, g2, gate_up_bias, down_bias,
            name, alpha, limit, interleaved, weight_on_input, expert_map, prefill, gate_up_meta, down_meta,
        ) = args  # fmt: skip
        gate_up, down = ExpertWeight(q1, s1, g1, gate_up_bias, gate_up_meta), ExpertWeight(q2, s2, g2, down_bias, down_meta)
        return cls(hidden, ids, weights, gate_up, down, _activation(name, alpha, limit, interleaved), weight_on_input, expert_map, prefill)

    def flat(self) -> tuple[Any, ...]:
        """The op's arguments, by position: :func:`flat`."""
        a, b = ((w.qdata, w.scale, w.global_scale, w.bias, w.meta) for w in (self.gate_up, self.down))
        return flat((self.hidden, self.expert_ids, self.expert_weights), a, b, self.activation, self.weight_on_input, self.expert_map, self.prefill)

    @property
    def assignments(self) -> int:
        """(token, expert) assignments: T * k."""
        return self.expert_ids.numel()

    @property
    def experts(self) -> int:
        return self.gate_up.experts

    @property
    def chosen_from(self) -> int:
        """Experts that the assignments are spread over: those of all ranks, if there is a map. Kernels and tiles are chosen by how many each gets."""
        return self.experts if self.expert_map is None else max(self.experts, self.expert_map.shape[0])

    @property
    def inner(self) -> int:
        """I: what lies between the two products."""
        return self.down.k

    @property
    def width(self) -> int:
        """Of the result."""
        return self.down.n

    @property
    def gated(self) -> bool:
        return self.gate_up.n != self.inner

    @property
    def two_scales(self) -> bool:
        """Gate and up of an expert have a global scale each."""
        return self.gate_up.global_scale.numel() != self.experts


@dataclass(slots=True, eq=False)
class MoeBackwardCall:
    """One call of ``fp4.moe_backward``: ``grad``, then the arguments of the forward call without ``prefill``."""

    grad: Tensor
    call: MoeCall

    @classmethod
    def of(cls, grad: Any, *args: Any, **kwargs: Any) -> MoeBackwardCall:
        return cls(grad, MoeCall.of(*args[:PREFILL], *(("auto", *args[PREFILL:]) if len(args) > PREFILL else ()), **kwargs))

    def flat(self) -> tuple[Any, ...]:
        args = replace(self.call, prefill="auto").flat()
        return self.grad, *args[:PREFILL], *args[PREFILL + 1 :]
