"""Arguments of ``fp4.moe`` for two weights given by their parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp4_inductor.ops.moe_call import ExpertWeight, MoeCall


def moe_call(hidden: Any, ids: Any, weights: Any, gate_up: Sequence[Any], down: Sequence[Any], *rest: Any) -> MoeCall:
    """``gate_up``, ``down``: ``(qdata, scale, global_scale)`` or ``(values, meta, scale, global_scale)``; ``rest``: from ``gate_up_bias`` to ``prefill``."""
    a, b = ExpertWeight.of_parts(gate_up), ExpertWeight.of_parts(down)
    flat = hidden, ids, weights, a.qdata, a.scale, a.global_scale, b.qdata, b.scale, b.global_scale, *rest
    return MoeCall.of(*flat, gate_up_meta=a.meta, down_meta=b.meta)


def arguments(*args: Any) -> tuple[Any, ...]:
    """As :func:`moe_call`, as the op takes them."""
    return moe_call(*args).flat()
