"""fp4.moe: one call of the op in the graph. It launches its two to five kernels itself, by T * k and E, so one graph serves every T."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.select import plan
from ..ops.moe_call import MoeCall
from .journal import record
from .regime import known

fp4 = torch.ops.fp4
_RUNTIME = "fp4.moe picks its kernels at each call: no guard, one graph for every number of tokens"


def register() -> None:
    inductor.register(fp4.moe.default, lower)


def lower(*args):
    """Lowering of ``fp4.moe``: hidden ``[T, H]`` -> ``[T, N]``; the journal gets the regime that T * k lies in."""
    call: Any = MoeCall.of(*args)  # of buffers
    symbols = inductor.Symbols()
    gate_up, down = call.gate_up.qdata, call.down.qdata
    experts, stored, width = (symbols.static_int(size) for size in (gate_up.get_size()[0], gate_up.get_size()[2], down.get_size()[1]))
    if experts is not None and stored is not None and width is not None:
        _, top_k = call.expert_ids.get_size()
        m = inductor.rows_of(call.expert_ids) * top_k
        op, k = select.moe_op(call.gate_up.meta, call.down.meta), stored * (2 if call.gate_up.meta is None else 4)
        everywhere = None if call.expert_map is None else symbols.static_int(call.expert_map.get_size()[0])
        chosen_from = max(experts, everywhere or 0)  # as MoeCall.chosen_from
        form, counts = _form(op, symbols, experts, call), select.Counts(chosen_from, select.scales_of(call.gate_up.global_scale.get_size()))
        described = select.describe(op, call.hidden.get_device(), call.hidden.get_dtype(), width, k, call.prefill, form, counts)
        options = plan(described, dispatch_config())
        record(options, known(options, m, symbols, _RUNTIME), m)
    return inductor.call_op(fp4.moe.default, *call.flat())


def _form(op: str, symbols, experts: int, call: Any) -> tuple[str, ...]:
    """As :func:`select.moe_form` of ``op``."""
    rows, stored = (symbols.static_int(size) for size in (call.gate_up.qdata.get_size()[1], call.down.qdata.get_size()[2]))
    if rows is None or stored is None:
        return ("sizes known at run time only",)
    inner = stored * (2 if call.down.meta is None else 4)
    biases = (b.get_dtype() for b in (call.gate_up.bias, call.down.bias) if b is not None)
    return select.moe_form(call.activation.name, rows != inner, inner, experts, call.weight_on_input, biases, op)
