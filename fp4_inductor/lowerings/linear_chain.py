"""fp4.linear_chain -> one launch of ``csrc/gemm/linear_chain.cu``, if it takes every product; else the lowerings of the products one by one.

Counters that the pass made are zeros (``passes/chain.py``), filled at each call of the graph: a small kernel. The launch leaves them zero. So a graph that is
called on one stream at a time keeps them instead: a constant of the compiled graph, whose memory Inductor gives to nothing else, one for each graph and device,
zero again in each process that loads the graph from a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _engines, _exchange
from .._torch import kept
from .._torch import lowering as inductor
from .._torch.collectives import sum_lowered
from ..config import dispatch_config
from ..kernels import select
from ..kernels.forms import Norm
from ..kernels.select import plan
from ..ops.activation import Activation
from ..ops.linear_chain import ARRIVALS, CONTRACT, MOST, ChainCall, Product
from ..ops.moe_call import ExpertWeight, MoeCall
from ..passes.chain import PATHS, ZEROS
from . import linear, linear_epilogue, linear_glu, moe
from . import norm as norms
from .journal import record
from .regime import known

_LOWERINGS: dict[str, Any] = {"linear": linear.lower, "linear_epilogue": linear_epilogue.lower, "linear_glu": linear_glu.lower}
_LATE = "M is not known: the products are computed one by one"


def register() -> None:
    inductor.register(CONTRACT.op, lower)


def lower(*args, **kwargs):
    """Lowering of ``fp4.linear_chain``: x ``[..., K]`` -> four results ``[..., N]``, of which those of products that are not there are empty."""
    c: Any = ChainCall.of(*args, **kwargs)  # of IR values
    symbols = inductor.Symbols()
    m, products = inductor.rows_of(c.x), c.products()
    sizes: Any = [[symbols.static_int(size) for size in p.qdata.get_size()[-2:]] for p in products]
    if any(None in size for size in sizes):
        return _padded(_one_by_one(c, products), c.x)
    called = [select.describe("linear_chain", c.x.get_device(), c.x.get_dtype(), n, 2 * half_k, c.prefill) for n, half_k in sizes]
    plans = [plan(call, dispatch_config()) for call in called]
    decisions = [known(options, m, symbols, _LATE) for options in plans]
    apart = next((i for i, d in enumerate(decisions) if d.row is None or d.row.library is None), None)
    if apart is not None:
        record(plans[apart], decisions[apart], m, note="every product of the chain is a call of its own")
        return _padded(_one_by_one(c, products), c.x)
    lead = c.x.get_size()[:-1]

    def flat(t):
        return None if t is None else inductor.contiguous(t if len(lead) == 1 else inductor.view(t, [m, t.get_size()[-1]]))

    dense = {name: [None if t is None else inductor.contiguous(t) for t in getattr(c, name)] for name in ("qdata", "scale", "global_scale", "norm_weight")}
    arrivals, met = _arrivals(c)
    router = None if c.router is None else inductor.contiguous(c.router)
    given = c._replace(group=_exchange.number_of(c.group), arrivals=arrivals, x=flat(c.x), residual=[flat(t) for t in c.residual], router=router, **dense)
    arch = plans[0].call.arch
    # Where blocks meet, global scales and what is added are read when the kernel before it has ended.
    read = tuple(t for name in ("qdata", "scale", "norm_weight") for t in dense[name] if t is not None)
    read += () if router is None else (router,)
    early, told = linear.begins_early(arch, (given.x,), read)
    notes = [linear.join(f"product {i + 1} of {len(products)} of one launch", *_remarks(p)) for i, p in enumerate(products)]
    notes[0] = linear.join(notes[0], told, met)
    paths = (inductor.current_meta("custom") or {}).get(PATHS) or [("", [])] * len(products)
    for options, decision, note, (path, members) in zip(plans, decisions, notes, paths, strict=True):
        record(options, decision, m, module=path, note=linear.join(linear.together(members), note))
    results = inductor.call_op(torch.ops.fp4_csrc.linear_chain.default, *given[: ChainCall._fields.index("early")], int(early), arch)
    if len(lead) == 1:
        return results
    return [inductor.view(y, [*lead, y.get_size()[-1]]) if i < len(products) else y for i, y in enumerate(results)]


def _arrivals(c: Any) -> tuple[Any, str]:
    """Where the blocks of the launch meet, and what explain() says of it."""
    node = inductor.argument("arrivals", ChainCall._fields.index("arrivals"))
    if node is None or not (node.meta.get("custom") or {}).get(ZEROS):
        return c.arrivals, ""
    reason = kept.why_not() if _engines.compiles() else "its calls may run at the same time"
    if reason:
        return c.arrivals, f"what its blocks meet in is filled at each call of the graph: {reason}"
    return kept.zeros("fp4_arrivals", ARRIVALS, c.x.get_device()), "its blocks meet in a constant of the graph"


def _remarks(p: Product) -> tuple[str, ...]:
    if p.routing is not None:
        k, e = p.routing.top_k, p.qdata.get_size()[0]
        norm = norms.remark(Norm(p.norm_weight, p.eps, p.norm_offset))
        return norm, f"{k} of {e} experts, chosen in the kernel", f"{p.act}(gate) * up"
    several = f"{len(p.starts) + 1} global scales" if p.starts and not p.glu else ""
    ranks = "summed over the ranks in the kernel" if p.summed else ""
    norm = norms.remark(None if p.norm_weight is None else Norm(p.norm_weight, p.eps, p.norm_offset))
    behind = " ".join(filter(None, (p.act, "+ residual" if p.adds else "")))
    return several, norm, ranks, f"{p.act}(gate) * up" if p.glu else f"in the kernel: {behind}" if behind else ""


def _one_by_one(c: Any, products: list[Product]) -> list:
    """The results of the products by the lowerings of their own ops."""
    results: list = []
    for i, p in enumerate(products):
        x = results[-1] if results else c.x
        if p.routing is not None:
            results.append(inductor.full([0], 0.0, c.x))
            continue
        if i and products[i - 1].routing is not None:
            results.append(_added(c, p, _experts(results[-2] if i > 1 else c.x, products[i - 1], p, c.prefill), results))
            continue
        norm = None if p.norm_weight is None else Norm(p.norm_weight, p.eps, p.norm_offset)
        rows = [0, *p.starts] if len(p.global_scale.get_size()) else None
        if p.summed:
            alone = p._replace(norm_weight=None, residual=None, added=-1)
            results.append(_added(c, p, _LOWERINGS[alone.op](*alone.arguments(x, None, rows, c.prefill), norm=norm), results))
            continue
        residual = results[p.added] if p.added >= 0 else p.residual
        alone = p._replace(norm_weight=None)
        results.append(_LOWERINGS[alone.op](*alone.arguments(x, residual, rows, c.prefill), norm=norm))
    return results


def _added(c: Any, p: Product, y, results: list):
    """``y`` of product ``p``, summed over the ranks if it is a part, and what is added to it."""
    residual = results[p.added] if p.added >= 0 else p.residual
    y = sum_lowered(y, c.group) if p.summed else y
    return y if residual is None else inductor.inline(torch.add, (y, residual))


def _experts(x, gate_up: Product, down: Product, prefill: str):
    """The two products of experts by the ops that they are without a chain."""
    router, top_k, form, rounded = gate_up.routing  # type: ignore[misc]
    lead, dtype = x.get_size()[:-1], x.get_dtype()
    hidden = inductor.view(x, [inductor.rows_of(x), x.get_size()[-1]])
    if gate_up.norm_weight is not None:
        hidden = norms.applied(hidden, Norm(gate_up.norm_weight, gate_up.eps, gate_up.norm_offset))
    weights, ids = inductor.call_op(torch.ops.fp4.router.default, hidden, router, None, top_k, form, dtype if rounded else torch.float32)
    first, second = (ExpertWeight(p.qdata, p.scale, p.global_scale) for p in (gate_up, down))
    layer = MoeCall(hidden, ids, weights, first, second, Activation(gate_up.act), prefill=prefill)
    return inductor.view(moe.lower(*layer.flat()), [*lead, down.qdata.get_size()[-2]])


def _padded(results: list, x) -> list:
    return [*results, *(inductor.full([0], 0.0, x) for _ in range(MOST - len(results)))]
