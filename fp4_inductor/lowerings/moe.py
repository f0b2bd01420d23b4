"""fp4.moe: one call of the op in the graph. It launches its two to five kernels itself, by T * k and E, so one graph serves every T."""

from __future__ import annotations

import torch

from .._torch import lowering as inductor
from ..config import dispatch_config
from ..kernels import select
from ..kernels.select import plan
from .journal import record
from .regime import known

fp4 = torch.ops.fp4
_RUNTIME = "fp4.moe picks its kernels at each call: no guard, one graph for every number of tokens"


def register() -> None:
    inductor.register(fp4.moe.default, lower)


def lower(hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, *rest):
    """Lowering of ``fp4.moe``: hidden ``[T, H]`` -> ``[T, N]``; the journal gets the regime that T * k lies in."""
    symbols = inductor.Symbols()
    experts, width = symbols.static_int(gate_up_qdata.get_size()[0]), symbols.static_int(down_qdata.get_size()[1])
    stored = symbols.static_int(gate_up_qdata.get_size()[2])
    if experts is not None and stored is not None and width is not None:
        _, top_k = expert_ids.get_size()
        m = inductor.rows_of(expert_ids) * top_k
        prefill = rest[10] if len(rest) > 10 else "auto"
        metas = [rest[i] if len(rest) > i else None for i in (11, 12)]
        op, k = select.moe_op(*metas), stored * (2 if metas[0] is None else 4)
        form, scales = _form(op, symbols, experts, gate_up_qdata, down_qdata, rest), select.scales_of(gate_up_global_scale.get_size())
        call = select.describe(op, hidden.get_device(), hidden.get_dtype(), width, k, prefill, experts, form, scales=scales)
        options = plan(call, dispatch_config())
        record(options, known(options, m, symbols, _RUNTIME), m)
    return inductor.call_op(fp4.moe.default, hidden, expert_ids, expert_weights, gate_up_qdata, gate_up_scale, gate_up_global_scale, down_qdata, *rest)


def _form(op: str, symbols, experts: int, gate_up_qdata, down_qdata, rest) -> tuple[str, ...]:
    """As :func:`select.moe_form` of ``op``, of the arguments behind ``down_qdata``."""
    rows, stored = (symbols.static_int(size) for size in (gate_up_qdata.get_size()[1], down_qdata.get_size()[2]))
    if rows is None or stored is None:
        return ("sizes known at run time only",)
    given = dict(enumerate(rest))
    inner = stored * (2 if given.get(12) is None else 4)
    biases = (given[i].get_dtype() for i in (2, 3) if given.get(i) is not None)
    return select.moe_form(given.get(4, "silu"), rows != inner, inner, experts, given.get(8, False), biases, op)
