"""``fp4.linear_chain``: two to four linear products, each of which reads the result of the one before it.

    x              [..., K]            of the first product
    qdata, scale   a weight for each product, as of ``fp4.linear``
    global_scale   [], or [S]          one for the rows of the weight, or one for those from each of the ``starts`` on and one for the rows ahead of them
    bias           [N] or None
    norm_weight    [K] or None         what the product reads is x / sqrt(mean(x^2) + eps) * (norm_offset + norm_weight), rounded to the dtype of x (RMSNorm)
    residual       [..., N] or None    is added to the result of the product
    added          int                 the number of the earlier product whose result is added; -1: none. A product has one of the two at most
    eps            float               of the norm, as norm_offset
    act            int                 the number of an activation (``ops/activation.py``), which is applied ahead of what is added; 0: none
    glu            int                 1: the weight is of gate and up, and the result is act(gate) * up, [..., N / 2]; nothing is added
    starts         two ints            the rows at which the second and the third global scale begin; 0: there is none
    arrivals       int32, ARRIVALS or  zeros ahead of the first call. A kernel of one launch has its blocks meet in the last ARRIVALS of them, and leaves there
                   more                what the next call wants; calls that share it follow each other on one stream
    router         [E, K] or None      of experts: see below
    routing        four ints, or none  the number of the product of the experts' gates and ups; how many experts a row gets; the place of the router's form in
                                       ``FORMS`` (``ops/router.py``); 1: its weights are rounded to the dtype of x
    summed         ints                the numbers of products whose result is a part: what the ranks of ``group`` have is summed, and then its residual, or the
                                       result ``added``, is added; at most two, not neighbours, without activation
    group          str                 the name of a process group of torch.distributed; empty: there is none
    early          bool                the caller knows that the kernel before it on its stream writes neither the weights nor those of the norms
    prefill        as of ``fp4.linear``, for all products

What stands from ``qdata`` to ``starts`` are lists with an entry for each product; ``starts`` has two. The op returns four tensors, the results of the products
in their order; those of products that are not there are empty.

Two neighbours may be a mixture of experts: gate and up of those that ``router`` chooses by what gate and up read, behind their norm, and down, whose result
is the sum of what the chosen ones give, times their weights. Their ``qdata`` and ``scale`` are ``[E, N, ...]``, ``global_scale`` is ``[E]`` or, of gate and
up, ``[E, 2]``; they have no biases, and the result between them is empty.

A launch that does all of them sums in another order than those of single products.
A graph pass writes it (``passes/chain.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._exchange import SUMS
from .._torch.collectives import sum_of_ranks
from ..errors import ConfigError, DTypeError, ShapeError
from ..formats import nvfp4
from .activation import Activation, ActivationCode, activation_code
from .contract import CONTRACTS, OpContract
from .moe_call import ExpertWeight, MoeCall
from .norm_linear import rms_norm
from .router import FORMS

MOST, LEAST = 4, 2  # products
# What a launch takes of experts (csrc/gemm/routing.cuh): all, those of a row, rows of the router for each multiprocessor, numbers between their products.
MOST_EXPERTS, MOST_CHOSEN, ROUTER_ROWS, MOST_INNER = 512, 32, 4, 16384
ARRIVALS = 50180  # the least length of ``arrivals``: Rows<T>::kBytes / 4 of csrc/common/rows.cuh


class Routing(NamedTuple):
    """By what experts are chosen."""

    router: Any
    top_k: int
    form: str
    rounded: bool


class Product(NamedTuple):
    """One product of a chain. ``routing``: of gate and up of experts; down is the next one. ``summed``: over the ranks, ahead of what is added."""

    qdata: Any
    scale: Any
    global_scale: Any
    bias: Any = None
    norm_weight: Any = None
    residual: Any = None
    added: int = -1
    eps: float = 0.0
    norm_offset: float = 0.0
    act: str = ""
    glu: bool = False
    starts: tuple[int, ...] = ()
    routing: Routing | None = None
    summed: bool = False

    @property
    def adds(self) -> bool:
        return self.residual is not None or self.added >= 0

    @property
    def op(self) -> str:
        """The op that computes it alone."""
        op = "linear_glu" if self.glu else "linear_epilogue" if self.act or self.adds else "linear"
        return op if self.norm_weight is None else f"norm_{op}"

    def arguments(self, x: Any, residual: Any, rows: Sequence[int] | None, prefill: str) -> tuple:
        """Of :attr:`op`. ``rows``: where those with a global scale each begin."""
        norm = () if self.norm_weight is None else (self.norm_weight, self.eps, self.norm_offset)
        lead = (x, *norm, self.qdata, self.scale, self.global_scale, self.bias)
        if self.glu:
            return (*lead, self.act, prefill)
        return (*lead, self.act, None, residual, prefill, rows) if self.act or self.adds else (*lead, prefill, rows)


class ChainCall(NamedTuple):
    """The arguments of one call, in the order of the schema."""

    x: Any
    qdata: Sequence[Any]
    scale: Sequence[Any]
    global_scale: Sequence[Any]
    bias: Sequence[Any]
    norm_weight: Sequence[Any]
    residual: Sequence[Any]
    added: Sequence[int]
    eps: Sequence[float]
    norm_offset: Sequence[float]
    act: Sequence[int]
    glu: Sequence[int]
    starts: Sequence[int]
    arrivals: Any
    router: Any = None
    routing: Sequence[int] = ()
    summed: Sequence[int] = ()
    group: str = ""
    early: bool = False
    prefill: str = "auto"

    @classmethod
    def of(cls, *args: Any, **kwargs: Any) -> ChainCall:
        """From the op's own arguments."""
        return cls(*args, **kwargs)

    @classmethod
    def made(cls, x: Any, products: Sequence[Product], arrivals: Any, prefill: str = "auto", group: str = "") -> ChainCall:
        """Of these products. ``group``: whose ranks sum those that are ``summed``."""
        columns: dict[str, Any] = {name: [getattr(p, name) for p in products] for name in _COLUMNS}
        columns["act"] = [activation_code(p.act) for p in products]
        columns["glu"] = [int(p.glu) for p in products]
        columns["starts"] = [start for p in products for start in (*p.starts, 0, 0)[:2]]
        routed = next((i for i, p in enumerate(products) if p.routing), None)
        columns |= dict(router=None, routing=[])
        if routed is not None:
            router, top_k, form, rounded = products[routed].routing  # type: ignore[misc]
            columns |= dict(router=router, routing=[routed, top_k, FORMS.index(form), int(rounded)])
        summed = [i for i, p in enumerate(products) if p.summed]
        return cls(x, **columns, arrivals=arrivals, prefill=prefill, summed=summed, group=group)

    def products(self) -> list[Product]:
        found = []
        for i in range(len(self.qdata)):
            own = {name: getattr(self, name)[i] for name in _COLUMNS}
            starts = tuple(start for start in self.starts[2 * i : 2 * i + 2] if start)
            act = ActivationCode(own["act"]).name.lower() if own["act"] else ""
            routing = None
            if self.routing and self.routing[0] == i:
                _, top_k, form, rounded = self.routing
                routing = Routing(self.router, top_k, FORMS[form], bool(rounded))
            found.append(Product(**own | dict(act=act, glu=bool(own["glu"]), starts=starts, routing=routing, summed=i in self.summed)))
        return found


_COLUMNS = Product._fields[:-3]  # of ChainCall, an entry for each product


def check(c: ChainCall) -> None:
    """Raise the typed error of a chain that has no meaning; each product is checked by its own op."""
    count = len(c.qdata)
    lengths = {name: len(getattr(c, name)) for name in _COLUMNS} | {"starts": len(c.starts) / 2}
    if not LEAST <= count <= MOST or set(lengths.values()) != {count}:
        raise ShapeError(
            "fp4.linear_chain: lists of other lengths than there are products",
            value=lengths,
            limit=f"{LEAST} to {MOST} products, an entry for each in every list, two in starts",
            remedy="Call the ops of the single products.",
        )
    for i, (added, residual, act, glu) in enumerate(zip(c.added, c.residual, c.act, c.glu, strict=True)):
        if act not in list(ActivationCode):
            limit = [f"{code.value}: {code.name.lower()}" for code in ActivationCode]
            raise ConfigError("fp4.linear_chain: unknown activation", value=act, limit=limit, remedy="Call the ops of the single products.")
        if not -1 <= added < i or (added >= 0 and residual is not None) or (glu and (added >= 0 or residual is not None or not act)):
            raise ConfigError(
                f"fp4.linear_chain: what product {i} adds",
                value=f"added {added}, residual {'there' if residual is not None else None}, glu {glu}, act {act}",
                limit="the number of an earlier product, or a residual, or neither; gate and up have an activation and add nothing",
                remedy="Call the ops of the single products.",
            )
    experts = _experts(c)
    _check_sums(c)
    for i, (qdata, glu, g) in enumerate(zip(c.qdata, c.glu, c.global_scale, strict=True)):
        if i in experts:
            continue
        starts = list(c.starts[2 * i : 2 * i + 2])
        if glu and starts != [qdata.shape[0] // 2 if g.dim() else 0, 0]:
            raise ShapeError(
                f"fp4.linear_chain: starts of product {i}",
                value=f"{starts}, {qdata.shape[0]} rows, global_scale {tuple(g.shape)}",
                limit="of gate and up: [0, 0] for one global scale, else half of the rows and 0",
                remedy="Give gate and up one global scale each, or one for both.",
            )
    if c.arrivals.dtype != torch.int32:
        raise DTypeError("fp4.linear_chain: arrivals", value=c.arrivals.dtype, limit=torch.int32, remedy="Pass zeros of int32.")
    if c.arrivals.numel() < ARRIVALS:
        raise ShapeError("fp4.linear_chain: arrivals", value=tuple(c.arrivals.shape), limit=f"{ARRIVALS} or more", remedy="Pass more zeros.")


def _check_sums(c: ChainCall) -> None:
    sums = list(c.summed)
    fits = bool(sums) == bool(c.group) and len(sums) <= SUMS and sums == sorted({*sums} & {*range(len(c.qdata))})
    if not fits or any(c.glu[i] or c.act[i] for i in sums) or any(b - a == 1 for a, b in itertools.pairwise(sums)):
        raise ConfigError(
            "fp4.linear_chain: products summed over ranks",
            value=f"summed {sums}, group {c.group!r}, glu {list(c.glu)}, act {list(c.act)}",
            limit=f"a group and the numbers of at most {SUMS} products, rising, no neighbours, without activation; or neither",
            remedy="Call the ops of the single products, and all_reduce behind them.",
        )


def _experts(c: ChainCall) -> tuple[int, ...]:
    """The numbers of the two products of experts, which are checked; empty: there are none."""
    if not c.routing and c.router is None:
        return ()
    routed, _, form, rounded = [*c.routing, 0, 0, 0, 0][:4]
    down = routed + 1
    inside = len(c.routing) == 4 and c.router is not None and 0 <= routed < len(c.qdata) - 1 and 0 <= form < len(FORMS) and rounded in (0, 1)
    if not inside or not c.glu[routed] or c.glu[down] or c.act[down] or c.norm_weight[down] is not None or routed in c.added:
        raise ConfigError(
            "fp4.linear_chain: the products of experts",
            value=f"routing {list(c.routing)}, router {'there' if c.router is not None else None}, glu {list(c.glu)}, act {list(c.act)}, added {list(c.added)}",
            limit=f"a router, and [number of gate and up, experts of a row, place in {FORMS}, 0 or 1]; down behind gate and up, without activation or norm",
            remedy="Call fp4.router and fp4.moe.",
        )
    if any(c.bias[i] is not None or any(c.starts[2 * i : 2 * i + 2]) for i in (routed, down)):
        raise ConfigError(
            "fp4.linear_chain: what experts do not have",
            value=f"bias {[c.bias[i] is not None for i in (routed, down)]}, starts {list(c.starts[2 * routed : 2 * routed + 4])}",
            limit="no bias, starts of 0",
            remedy="Call fp4.router and fp4.moe.",
        )
    return routed, down


def _by(compute: Callable[[OpContract], Callable], reduce: Callable[[Tensor, str], Tensor] = sum_of_ranks) -> Callable[[ChainCall], tuple[Tensor, ...]]:
    """The chain, product by product, each by what ``compute`` takes of the contract of its op, and summed over ranks by ``reduce``."""

    def chain(c: ChainCall) -> tuple[Tensor, ...]:
        check(c)
        results: list[Tensor] = []
        products = c.products()
        for i, p in enumerate(products):
            x = results[-1] if results else c.x
            residual = results[p.added] if p.added >= 0 else p.residual
            if p.routing is not None:
                results.append(x.new_empty(0))
                continue
            if i and products[i - 1].routing is not None:
                before = results[-2] if i > 1 else c.x
                results.append(finished(experts(before, products[i - 1], p, c.prefill), p, residual, c.group))
                continue
            rows = [0, *p.starts] if p.global_scale.dim() else None
            if p.summed:
                alone = p._replace(residual=None, added=-1)
                results.append(finished(compute(CONTRACTS[alone.op])(*alone.arguments(x, None, rows, c.prefill)), p, residual, c.group))
                continue
            results.append(compute(CONTRACTS[p.op])(*p.arguments(x, residual, rows, c.prefill)))
        return (*results, *(c.x.new_empty(0) for _ in range(MOST - len(results))))

    def finished(y: Tensor, p: Product, residual: Tensor | None, group: str) -> Tensor:
        y = reduce(y, group) if p.summed else y
        return y if residual is None else y + residual

    def experts(x: Tensor, gate_up: Product, down: Product, prefill: str) -> Tensor:
        hidden = x.reshape(-1, x.shape[-1])
        if gate_up.norm_weight is not None:
            hidden = rms_norm(hidden, gate_up.norm_weight, gate_up.eps, gate_up.norm_offset)
        router, top_k, form, rounded = gate_up.routing  # type: ignore[misc]
        weights, ids = compute(CONTRACTS["router"])(hidden, router, None, top_k, form, x.dtype if rounded else torch.float32)
        first, second = (ExpertWeight(p.qdata, p.scale, p.global_scale) for p in (gate_up, down))
        layer = MoeCall(hidden, ids, weights, first, second, Activation(gate_up.act), prefill=prefill)
        y = compute(CONTRACTS["moe"])(*layer.flat())
        return y.reshape(*x.shape[:-1], y.shape[-1])

    return chain


reference = _by(lambda contract: contract.reference)
fake = _by(lambda contract: contract.fake, lambda part, group: part)
one_by_one = _by(lambda contract: contract.op)  # what every device can do


def inputs(device: torch.device) -> Iterator[tuple[str, tuple]]:
    # (leading dims of x, K, hidden, inner, N of the last product): as a decoder layer has them, with M in {0, 1}, off-tile sizes
    shapes: tuple[tuple[tuple[int, ...], int, int, int, int], ...] = (
        ((1,), 64, 48, 80, 96), ((1, 1), 48, 32, 16, 33), ((0,), 32, 32, 32, 8), ((), 16, 16, 48, 5), ((2, 3), 80, 64, 32, 40), ((33,), 16, 48, 16, 1),
        ((5,), 112, 16, 64, 130), ((1,), 272, 16, 16, 7),
    )  # fmt: skip
    for i, (lead, k, hidden, inner, n) in enumerate(shapes):
        for dtype in (torch.float32, torch.bfloat16):
            arrivals = torch.zeros(ARRIVALS + i, dtype=torch.int32, device=device)
            made = _layer(dtype, device, lead, (k, hidden, inner, n), ("silu", "gelu_tanh", "relu")[i % 3], i)
            first, last = ((0, 4), (0, 3), (1, 4), (1, 3), (0, 2))[i % 5]
            x = torch.randn(*lead, made[first].qdata.shape[1] * 2, device=device).to(dtype)
            part = [p._replace(added=p.added - first if p.added >= first else -1) for p in made[first:last]]
            yield f"x {tuple(x.shape)} products {first} to {last} {dtype}", tuple(ChainCall.made(x, part, arrivals))
    # (leading dims of x, K, hidden, inner, N of the last product, E, experts of a row)
    for i, (lead, *sizes, e, k) in enumerate((((1,), 64, 48, 32, 96, 6, 2), ((2, 3), 32, 64, 48, 40, 3, 3), ((0,), 16, 32, 16, 5, 4, 1))):
        made = _layer(torch.bfloat16, device, lead, tuple(sizes), "silu", i)  # type: ignore[arg-type]
        made[1:3] = _experts_of(made[1], e, k, sizes[2], FORMS[i % 3], i)
        first = i % 2
        x = torch.randn(*lead, made[first].qdata.shape[-1] * 2, device=device).bfloat16()
        part = [p._replace(added=p.added - first if p.added >= first else -1) for p in made[first:]]
        arrivals = torch.zeros(ARRIVALS, dtype=torch.int32, device=device)
        yield f"x {tuple(x.shape)}, {k} of {e} experts", tuple(ChainCall.made(x, part, arrivals))


def _experts_of(dense: Product, e: int, k: int, inner: int, form: str, i: int) -> list[Product]:
    """Gate, up and down of ``e`` experts behind the norm of ``dense``, ``k`` of them chosen."""
    device, hidden = dense.qdata.device, dense.qdata.shape[1] * 2

    def stack(n: int, columns: int) -> list[Tensor]:
        return list(map(torch.stack, zip(*(nvfp4.quantize(torch.randn(n, columns, device=device) / columns**0.5) for _ in range(e)), strict=True)))

    (q, s, g), (down, scale, global_scale) = stack(2 * inner, hidden), stack(hidden, inner)
    g = torch.stack((g, g * 2), 1) if i % 2 else g
    router = torch.randn(e, hidden, device=device).to(dense.norm_weight.dtype)
    norm = dict(norm_weight=dense.norm_weight, eps=dense.eps, norm_offset=dense.norm_offset)
    return [Product(q, s, g, act="silu", glu=True, routing=Routing(router, k, form, i % 2 == 0), **norm), Product(down, scale, global_scale, added=0)]


def _layer(dtype: torch.dtype, device: torch.device, lead: tuple[int, ...], sizes: tuple[int, int, int, int], act: str, i: int) -> list[Product]:
    """o + residual, gate and up behind a norm, down + the result of o, and q, k and v behind a norm, with three global scales."""
    k, hidden, inner, n = sizes

    def part(rows: int, columns: int, scales: int = 1, **options: Any) -> Product:
        q, s, g = nvfp4.quantize(torch.randn(rows, columns, device=device) / columns**0.5)
        g = g * torch.arange(1, scales + 1, device=device) if scales > 1 else g
        bias = torch.randn(rows, device=device).to(dtype) if i % 2 else None
        return Product(q, s, g, bias, **options)

    def norm(width: int) -> dict[str, Any]:
        return dict(norm_weight=torch.randn(width, device=device).to(dtype), eps=(1e-5, 1e-6)[i % 2], norm_offset=float(i % 3 == 1))

    residual = torch.randn(*lead, hidden, device=device).to(dtype)
    several = (n // 3, 2 * n // 3) if n > 3 else ()
    return [
        part(hidden, k, residual=residual),
        part(2 * inner, hidden, 1 + i % 2, act=act, glu=True, starts=(inner,) if i % 2 else (), **norm(hidden)),
        part(hidden, inner, added=0),
        part(n, hidden, 1 + len(several), starts=several, **norm(hidden)),
    ]


CONTRACT = OpContract(
    name="linear_chain",
    schema="(Tensor x, Tensor[] qdata, Tensor[] scale, Tensor[] global_scale, Tensor?[] bias, Tensor?[] norm_weight, Tensor?[] residual, int[] added, "
    "float[] eps, float[] norm_offset, int[] act, int[] glu, int[] starts, Tensor(a!) arrivals, "
    'Tensor? router=None, int[] routing=[], int[] summed=[], str group="", bool early=False, str prefill="auto") -> (Tensor, Tensor, Tensor, Tensor)',
    reference=reference,
    fake=fake,
    inputs=inputs,
    # Results are rounded on the way from one product to the next.
    tolerance={torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3},
    any_strides=True,
    struct=ChainCall,
)
CONTRACT.implement("CompositeExplicitAutograd", one_by_one)
CONTRACT.refuse_gradients()
