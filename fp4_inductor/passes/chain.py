"""Linear products of one row, each of which reads the result of the one before it -> ``fp4.linear_chain``: one launch, if there is a kernel for that.

    h = linear_epilogue(attended, o, residual=x);  g = norm_linear_glu(h, gate_up);  y = linear_epilogue(g, down, residual=h);  norm_linear_siblings(y, qkv)
    ->  h, _, y, qkv = linear_chain(attended, [o, gate_up, down, qkv], ...)

In a decoder these are the products between two attentions. It runs behind the passes that make norms, epilogues and gates part of the products. They stay
apart where the kernel is off or does not take one of them, or where another kernel than cuda_gemv would serve one; ``explain()`` gives the reason.

The blocks of the launch meet in the ``arrivals`` of the ``fp4.cached_attention`` before it. Both write them, so that both are ``auto_functionalized_v2`` in the
graph: each reads what the one before it wrote, which keeps their order. In a graph without them (vLLM's, whose attention is its own) the first launch takes
zeros that the graph makes, and the others what it leaves. Where a graph is called on one stream at a time (:mod:`.._engines`), its lowering keeps these
zeros from call to call (``lowerings/linear_chain.py``). Elsewhere they are a launch, so two products alone are not joined for them.

Of a model that is divided among ranks a product may give a part of its result: ``residual + wait_tensor(all_reduce(linear(...)))``. Where the ranks share
memory (``_exchange.py``) the launch sums it, and goes on.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .. import _engines, _exchange
from .._torch.fx import in_one_mutation_region, module_path
from ..config import dispatch_config
from ..formats.packing import MAX_SCALES
from ..kernels import registry, select
from ..kernels.kernel import Span
from ..kernels.select import Plan
from ..ops import linear, linear_chain, linear_epilogue, linear_glu, linear_siblings, norm_linear
from ..ops.linear_chain import ARRIVALS, LEAST, MOST, ChainCall, Product
from ..ops.linear_epilogue import EpilogueCall
from . import rank_sums, views
from .counters import matched
from .emit import OF_ONE_CALL, emit, erase, item
from .layout import below_views, is_call, rows_of, value
from .missed import UNCHAINED, missed
from .rank_sums import RankSum
from .siblings import MEMBERS

aten = torch.ops.aten
_WRITES = torch.ops.higher_order.auto_functionalized_v2
_ALONE = (linear.CONTRACT, linear_siblings.CONTRACT, linear_glu.CONTRACT, linear_epilogue.CONTRACT)
_NORMED = (norm_linear.LINEAR, norm_linear.LINEAR_SIBLINGS, norm_linear.LINEAR_GLU, norm_linear.LINEAR_EPILOGUE)
PRODUCTS = {contract.op for contract in (*_ALONE, *_NORMED)}
# What may be computed ahead of the first product, where it stands behind that.
_MOVED = views.RESHAPES | views.UNITS | views.SAME | views.TURNS | views.PARTS | views.SPLITS
# Of an operator whose programs meet in ``arrivals``: how many results it returns ahead of what it has written.
_MEET = {torch.ops.fp4.cached_attention.default: 1, linear_chain.CONTRACT.op: MOST}
ZEROS = "fp4_zeros_to_meet_in"  # node.meta["custom"]: of the zeros that the first chain of a graph is given
NO_ARRIVALS = "no fp4.cached_attention stands before it, in whose arrivals two products could meet, and zeros of its own would be a launch more"
PATHS = "fp4_products"  # node.meta["custom"], which torch keeps: of each product the path of its layer, and those of its members


class _Linear(NamedTuple):
    """A call of one of :data:`PRODUCTS`, or the two products of experts that :mod:`.mixture` has made. ``rows``: of siblings, the first and the last of each
    member. ``result``: what others read, where that is not ``node``. ``behind``: what leads from ``node`` to a sum over the ranks of ``group``, the result."""

    node: Node
    x: Node
    product: Product
    prefill: str
    multiplied: bool = False
    rows: list[int] | None = None
    before: tuple[Product, ...] = ()
    result: Node | None = None
    behind: tuple[Node, ...] = ()
    group: str = ""

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.before, self.product)

    @property
    def read(self) -> Node:
        return self.node if self.result is None else self.result

    @property
    def sizes(self) -> tuple[int, int]:
        n, half_k = value(self.product.qdata).shape
        return n, half_k * 2


def fuse(graph: Graph) -> None:
    """Rewrite every such run of products in ``graph``."""
    _tell_sums(graph)
    for nodes in _runs(graph):
        told = False
        while len(nodes) > 1:
            run = [found for node in nodes if (found := _read(node)) is not None]  # the rewriting of another run has changed what they read
            if not run[0].before and not is_there(_plan(run[0], "linear_chain")):
                break
            count, reason = _served(graph, run)
            arrivals = arrivals_before(graph, run[0].node, sum(len(p.products) for p in run[:count])) if count > 1 else ""
            if isinstance(arrivals, str):
                count, reason = min(count, 1), reason or arrivals
            if reason and not told:
                node = nodes[max(count - 1, 0)]
                missed(node, value(node), reason, UNCHAINED)
                told = True
            if count > 1 and not isinstance(arrivals, str):
                _rewrite(graph, run[:count], arrivals)
            nodes = nodes[max(count, 1) :]


def _tell_sums(graph: Graph) -> None:
    """Why the launch ends at a sum over ranks, of each that it could go across."""
    for node in graph.nodes:
        p = _read_alone(node)
        if p is not None and (found := _sum_of(p)) and rows_of(p.x) == 1 and is_there(_plan(p, "linear_chain")) and (reason := rank_sums.why_not(found)):
            missed(node, value(found.result), f"its result is summed over ranks: {reason}", UNCHAINED)


def _runs(graph: Graph) -> list[list[Node]]:
    """Up to four products, each of which reads the result of the one before it, or a view of its rows."""
    runs: list[list[Node]] = []
    counts: dict[int, int] = {}  # of the products of a run
    ends: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        found = _read(node) if node.users else None
        if found is None:
            continue
        run = ends.pop(below_views(found.x), [])
        if not run or counts[id(run)] + len(found.products) > MOST:
            run = []
            runs.append(run)
        run.append(node)
        counts[id(run)] = counts.get(id(run), 0) + len(found.products)
        if found.rows is None:
            ends[found.read] = run
    return [run for run in runs if len(run) > 1]


def _read(node: Node) -> _Linear | None:
    found = _read_alone(node)
    return found if found is None else _with_sum(found)


def _with_sum(p: _Linear) -> _Linear:
    """``p`` with the sum over ranks of its result, and what is added to that, if a launch can do it; else ``p``."""
    found = _sum_of(p)
    if found is None or rank_sums.why_not(found):
        return p
    return p._replace(product=p.product._replace(residual=found.residual, summed=True), result=found.result, behind=found.path, group=found.group)


def _sum_of(p: _Linear) -> RankSum | None:
    if p.rows is not None or p.multiplied or p.product.act or p.product.glu or p.product.adds:
        return None
    return rank_sums.read(p.read)


def _read_alone(node: Node) -> _Linear | None:
    if is_call(node, _WRITES) and node.args[0] is linear_chain.CONTRACT.op:
        return _experts(node)
    if node.op != "call_function" or node.target not in PRODUCTS or node.kwargs:
        return None
    op: Any = node.target
    args: Any = node.args
    x, *rest = args
    act: Any
    prefill: Any
    begins: Any
    normed = op._opname.startswith("norm_")
    norm: dict[str, Any] = dict(zip(("norm_weight", "eps", "norm_offset"), rest, strict=False)) if normed else {}
    rest = rest[norm_linear.LEADING :] if normed else rest
    kind = op._opname.removeprefix("norm_")
    parts = dict(zip(("qdata", "scale", "global_scale", "bias"), rest, strict=False)) | norm
    sizes = value(rest[0]).shape
    if len(sizes) != 2 or not all(type(size) is int for size in sizes):
        return None
    several = value(rest[2]).dim() > 0
    if kind == "linear_siblings":
        rows: Any = rest[4]
        begins = linear_siblings.begins(rows)
        if begins is None:
            return None
        starts = tuple(begins[1:]) if several else ()
        return _Linear(node, x, Product(**parts, starts=starts), (*rest[5:], "auto")[0], rows=list(rows))
    if kind == "linear_glu":
        act, prefill = (*rest[4:], *("silu", "auto")[max(len(rest) - 4, 0) :])
        return _Linear(node, x, Product(**parts, act=act, glu=True, starts=(sizes[0] // 2,) if several else ()), prefill)
    if kind == "linear_epilogue":
        c = EpilogueCall.of(x, *rest)
        return _Linear(node, x, Product(**parts, act=c.act, residual=c.residual, starts=tuple(c.rows or ())[1:]), c.prefill, c.mul is not None)
    prefill, begins = (*rest[4:], *("auto", None)[max(len(rest) - 4, 0) :])
    return _Linear(node, x, Product(**parts, starts=tuple(begins or ())[1:]), prefill)


def _experts(node: Node) -> _Linear | None:
    """The launch of the two products of experts."""
    given: Any = {name: part for name, part in node.kwargs.items() if not name.startswith("_")}
    call = ChainCall(**given, arrivals=None)
    result = next((user for user in node.users if is_call(user, operator.getitem) and user.args[1] == len(call.qdata) - 1), None)
    if len(call.qdata) != LEAST or not call.routing or result is None:
        return None
    gate_up, down = call.products()
    return _Linear(node, call.x, down, call.prefill, before=(gate_up,), result=result)


def is_there(options: Plan) -> bool:
    """Is a kernel of one launch written for the device of this plan?"""
    return any(kernel.csrc and kernel.at(options.call.arch) for kernel in registry.kernels("linear_chain"))


def _plan(p: _Linear, op: str) -> Plan:
    x, scales = value(p.x), len(p.product.starts) + 1
    counts = select.Counts(scales=scales) if op == "linear" and scales <= MAX_SCALES else select.ONE
    return select.plan(select.describe(op, x.device, x.dtype, *p.sizes, p.prefill, counts=counts), dispatch_config())


def _served(graph: Graph, run: list[_Linear]) -> tuple[int, str]:
    """How many products from the first on one launch does, and why not the next; an empty reason: it does all."""
    place: dict[Node, int] = {}
    for i, p in enumerate(run):
        place = place or ({node: n for n, node in enumerate(graph.nodes)} if i else {})
        reason = ("" if p.before else _why_not(p)) or _why_not_behind(run[:i], p, place)
        if reason:
            return i, reason
    return len(run), ""


def _why_not(p: _Linear) -> str:
    """Why a launch of several products does not take ``p``; empty: it does."""
    m, (n, k), several = rows_of(p.x), p.sizes, len(p.product.starts) + 1
    if type(m) is not int or m != 1:
        return f"M is {m if type(m) is int else 'dynamic'}: one launch takes M = 1"
    options = _plan(p, "linear_chain")
    if options.pick(1).library is None:
        return next(r.reason for r in options.refused if r.kernel.csrc)
    if p.multiplied:
        return "a result is multiplied by another tensor"
    if several > MAX_SCALES:
        return f"a product has {several} global scales: one launch takes {MAX_SCALES}"
    own: Span = _plan(p, p.node.target._opname.removeprefix("norm_").removesuffix("_siblings")).pick(1)  # type: ignore[union-attr]
    if own.library is None or own.regime != "gemv":
        return f"{own.kernel} serves N = {n}, K = {k}, not cuda_gemv"
    return ""


def _why_not_behind(run: list[_Linear], p: _Linear, place: dict[Node, int]) -> str:
    """Why ``p`` cannot be in one launch with those of ``run``, which it reads."""
    if not run:
        return ""
    if p.prefill != run[0].prefill:
        return f'one product has prefill="{run[0].prefill}", another "{p.prefill}"'
    groups = {q.group for q in (*run, p) if q.group}
    if p.group and (len(groups) > 1 or run[-1].group or sum(bool(q.group) for q in run) == _exchange.SUMS):
        return "a launch sums two products over the ranks of one group, and not two neighbours"
    if not in_one_mutation_region([run[0].node, p.node]):
        return "something is written between two products"
    begin, residual = place[run[0].node], p.product.residual
    if residual is not None and below_views(residual) in [q.read for q in run]:
        residual = None
    read = (operand for product in p.products for name, operand in product._asdict().items() if name not in ("residual", "routing"))
    operands = (*read, *(product.routing.router for product in p.before if product.routing), residual)
    if not all(_is_ahead(operand, place, begin) for operand in operands if isinstance(operand, Node)):
        return "what a product reads besides the result of the one before it is computed between them"
    return ""


def _is_ahead(node: Node, place: dict[Node, int], begin: int) -> bool:
    """Is ``node`` there before position ``begin`` of the graph, or a view of what is?"""
    if node.op != "call_function" or place[node] < begin:
        return True
    return node.target in _MOVED and all(_is_ahead(n, place, begin) for n in node.all_input_nodes)


class Arrivals(NamedTuple):
    """Result ``number`` of ``writer``, the operator whose programs met last; ``writer`` None: zeros that the graph makes."""

    writer: Node | None
    number: int = 0


def arrivals_before(graph: Graph, head: Node, count: int) -> Arrivals | str:
    """In what ``count`` products from ``head`` on meet; or why there is nothing."""
    last = None
    for node in graph.nodes:
        if node is head:
            break
        if is_call(node, _WRITES) and node.args[0] in _MEET and node.kwargs.get("_arrivals_base_index") is not None:
            last = node
    if last is None:
        return Arrivals(None) if _engines.compiles() or count > LEAST else NO_ARRIVALS
    index: Any = last.kwargs["_arrivals_base_index"]
    bases: Any = last.kwargs["_all_bases"]
    arrivals = value(bases[index])
    parts = [name for name in last.kwargs if name.startswith("_arrivals_") and name != "_arrivals_base_index"]
    if parts or arrivals.dtype != torch.int32 or not arrivals.is_contiguous():
        return "the arrivals of the fp4.cached_attention before it are a part of a buffer"
    if type(arrivals.numel()) is not int or arrivals.numel() < ARRIVALS:
        return f"the fp4.cached_attention before it has {arrivals.numel()} arrivals, one launch needs {ARRIVALS}"
    return Arrivals(last, _MEET[last.args[0]] + index)  # type: ignore[index]


def _rewrite(graph: Graph, run: list[_Linear], found: Arrivals) -> None:
    head, group = run[0].node, next((p.group for p in run if p.group), "")
    place = {node: i for i, node in enumerate(graph.nodes)}
    older = [user for user in found.writer.users if is_call(user, operator.getitem) and user.args[1] == found.number] if found.writer is not None else []
    older += [user for p in run if p.before for user in p.node.users if is_call(user, operator.getitem) and user.args[1] == MOST]
    read: list[Node | None] = []  # by whom the results are read now
    with graph.inserting_before(head):
        products: list[Product] = []
        for p in run:
            products += [*p.before, _in_rows(graph, p, read, place, head)]
            read += [*(None for _ in p.before), p.read]
        chain = launch(graph, as_row(graph, run[0].x), products, run[0].prefill, found, head.meta, [p.node for p in run for _ in p.products], group)
        results, new = [None if node is None else item(graph, chain, i) for i, node in enumerate(read)], item(graph, chain, MOST)
    for old in older:  # what counts later reads what the chain has left
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not chain)
        graph.erase_node(old)
    for p, result in zip(run, [result for result in results if result is not None], strict=True):
        with graph.inserting_before(head):
            _replace(graph, p, result)
    for p in reversed(run):
        for node in reversed(p.behind):  # a collective is erased as what has no effect
            graph.erase_node(node)
        for user in list(p.node.users):
            erase(user)
        erase(p.node)
    matched("linear_chain")


def launch(graph: Graph, x: Node, products: list[Product], prefill: str, found: Arrivals, meta: dict[str, Any], layers: list[Node], group: str = "") -> Node:
    """The chain of ``products``, at the place where the graph is being written.

    Args:
        meta: of a node in its place.
        layers: the nodes whose products they were.
        group: whose ranks sum those that are ``summed``.
    """
    writer, number = found
    if writer is None:
        arrivals = _zeros(graph, value(x))
    else:
        with graph.inserting_after(writer):
            arrivals = item(graph, writer, number)
    call = ChainCall.made(x, products, arrivals, prefill, group)._asdict()
    del call["arrivals"]
    chain = graph.call_function(_WRITES, (linear_chain.CONTRACT.op,), call | {"_arrivals_base_index": 0, "_all_bases": [arrivals]})
    chain.meta = _meta(call, arrivals, meta, layers)
    return chain


def _in_rows(graph: Graph, p: _Linear, before: list[Node | None], place: dict[Node, int], head: Node) -> Product:
    """The product of ``p`` with what it adds as ``[1, N]``, or as the number of a product of ``before``; its operands moved ahead of ``head``."""
    begin, residual = place[head], p.product.residual
    added = before.index(below_views(residual)) if residual is not None and below_views(residual) in before else -1
    new = p.product._replace(residual=None, added=added)
    for operand in (*new, *(operand for product in p.before for operand in (*product, product.routing.router if product.routing else None))):
        if isinstance(operand, Node):
            _move(operand, place, begin, head)
    if residual is None or added >= 0:
        return new
    _move(residual, place, begin, head)
    return new._replace(residual=as_row(graph, residual))


def _move(node: Node, place: dict[Node, int], begin: int, head: Node) -> None:
    """To the front of ``head``, if it is not there."""
    if node.op == "call_function" and place[node] > begin:
        for above in node.all_input_nodes:
            _move(above, place, begin, head)
        head.prepend(node)
        place[node] = begin


def as_row(graph: Graph, node: Node) -> Node:
    shape = [1, value(node).shape[-1]]
    return node if list(value(node).shape) == shape else emit(graph, aten.reshape.default, (node, shape))


def _zeros(graph: Graph, like: Tensor) -> Node:
    options = dict(dtype=torch.int32, layout=torch.strided, device=like.device, pin_memory=False)
    zeros = graph.call_function(aten.full.default, ([ARRIVALS], 0), options)
    with like.fake_mode:  # type: ignore[attr-defined]
        zeros.meta["val"] = torch.zeros(ARRIVALS, dtype=torch.int32, device=like.device)
    zeros.meta["custom"] = {ZEROS: True}
    return zeros


def _meta(call: dict[str, Any], given: Node, before: dict[str, Any], layers: list[Node]) -> dict[str, Any]:
    """Of the node of the chain: that of its first product, its own values, and the layers that it computes."""
    fakes = torch.fx.map_arg(call, value)
    arrivals: Any = value(given)
    with arrivals.fake_mode:
        results = linear_chain.fake(ChainCall(**fakes, arrivals=arrivals))
        written = torch.empty_like(arrivals)
    kept = {name: part for name, part in before.items() if name not in (*OF_ONE_CALL, MEMBERS)}
    paths = [(module_path(node), node.meta.get(MEMBERS) or []) for node in layers]
    return kept | {"val": (*results, written), "custom": {**(kept.get("custom") or {}), PATHS: paths}}


def _replace(graph: Graph, p: _Linear, result: Node) -> None:
    """Whatever reads ``p`` reads ``result``, in the shape of ``p``."""
    if p.rows is None:
        shape = list(value(p.read).shape)
        if p.read.users:
            p.read.replace_all_uses_with(result if shape == list(value(result).shape) else emit(graph, aten.reshape.default, (result, shape)))
        return
    for user in list(p.node.users):
        i: Any = user.args[1]
        part = emit(graph, aten.slice.Tensor, (result, 1, p.rows[2 * i], p.rows[2 * i + 1]))
        shape = list(value(user).shape)
        user.replace_all_uses_with(part if len(shape) == 2 else emit(graph, aten.reshape.default, (part, shape)))
        erase(user)
