"""csrc/gemm/linear_chain.cu on a CPU (emulator.py): products that read each other, against float64 and against a launch each; broken lines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_inductor.kernels import csrc
from fp4_inductor.kernels.params import ChainParams, LinearParams
from fp4_inductor.ops.linear_chain import ARRIVALS
from fp4_inductor.ops.linear_epilogue import finish
from fp4_inductor.ops.linear_glu import ACTIVATIONS
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, check_caught, emulated, linear_fields
from lowering_tests.kernels.test_emulated_epilogue import ACTS, distance, small_weight, z
from lowering_tests.kernels.test_emulated_gemv import normalised
from lowering_tests.kernels.test_emulated_linear import BF16, FP16

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
CHAIN = "gemm/linear_chain.cu"
PLAIN, POINTWISE, GLU = range(3)
EARLY = ("codes", "scale", "norm_weight")
TOLERANCE = {BF16: 4e-3, FP16: 8e-4}  # of one product; the next ones read its rounded result


@dataclass
class Product:
    """One of a chain. ``residual``: a tensor, or the number of the product whose result it is."""

    w: tuple[Tensor, Tensor, Tensor]
    finish: int = PLAIN
    act: str = ACTS[0]
    bias: Tensor | None = None
    residual: Tensor | int | None = None
    norm: tuple[Tensor | None, float, float] = (None, 0.0, 0.0)
    starts: tuple[int, ...] = ()
    tile: tuple[int, ...] = (0, 0, 0, 0)

    @property
    def columns(self) -> int:
        return self.w[0].shape[0] // (2 if self.finish == GLU else 1)


@dataclass
class Launch:
    """What a launch left: the results, and where its blocks met."""

    results: list[Tensor] = field(default_factory=list)
    arrivals: Tensor = field(default_factory=lambda: torch.zeros(ARRIVALS, dtype=torch.int32))


def fields_of(p: Product, x: Tensor, residual: Tensor | None) -> dict[str, Any]:
    norm = dict(zip(("norm_weight", "eps", "norm_offset"), p.norm, strict=True))
    return dict(linear_fields(x, p.w, p.bias, p.tile, p.starts), act=ACTS.index(p.act), residual=residual, **norm)


def run(
    x: Tensor, products: list[Product], early: bool = True, seed: int = 0, count: int | None = None, after: Callable[[], None] | None = None,
    before: Launch | None = None, **given: Any,
) -> Launch:  # fmt: skip
    """One launch, behind ``before``; ``given``: fields of ChainParams that are otherwise right. ``after``: is called while the emulated memory is there."""
    kernel = emulated(CHAIN, 90)
    library, launch = kernel.library, Launch() if before is None else Launch(arrivals=before.arrivals)
    library.emulator_seed(seed)
    try:
        places, calls, row = [], [], kernel.put(x)
        for p in products:
            out = torch.full((1, p.columns), float("nan"), dtype=x.dtype)
            residual = ctypes.c_void_p(places[p.residual][0]) if isinstance(p.residual, int) else None if p.residual is None else kernel.put(p.residual)
            fields = fields_of(p, x, None) | dict(K=p.w[0].shape[1] * 2, M=1, early=int(early))
            for name, value in fields.items():
                if isinstance(value, Tensor) and name != "x":
                    place = kernel.put(value)
                    if name in EARLY:
                        library.emulator_constant(place, ctypes.c_size_t(value.nbytes))
                    fields[name] = place.value
            places.append((kernel.put(out).value, out))
            calls.append(LinearParams.of(**fields | dict(x=row.value, y=places[-1][0], residual=None if residual is None else residual.value)))
            row = ctypes.c_void_p(places[-1][0])
        counters = kernel.put(launch.arrivals, 4)  # of any alignment
        sizes = dict(count=len(calls) if count is None else count, finish=[p.finish for p in products], arrivals=counters.value, arrivals_count=ARRIVALS)
        call = ChainParams.of(**sizes | given)
        for i, one in enumerate(calls):
            call.products[i] = one
        status = library.fp4_linear_chain(ctypes.byref(call))
        message = library.emulator_message().decode()
        if status or message:
            raise EmulatorError(message or f"status {status}")
        for place, out in places:
            ctypes.memmove(out.data_ptr(), place, out.nbytes)
            launch.results.append(out)
        ctypes.memmove(launch.arrivals.data_ptr(), counters.value, launch.arrivals.nbytes)
        if after is not None:
            after()
        return launch
    finally:
        library.emulator_free_all()


def apart(x: Tensor, products: list[Product]) -> list[Tensor]:
    """The same by linear_gemv, a launch for each."""
    results: list[Tensor] = []
    for p in products:
        residual = results[p.residual] if isinstance(p.residual, int) else p.residual
        library = ("linear_gemv", "linear_gemv_pointwise", "linear_gemv_glu")[p.finish]
        out = torch.full((1, p.columns), float("nan"), dtype=x.dtype)
        fields = dict(fields_of(p, x, residual), early=1, tile=(4, 16, 2 if x.shape[1] > 1024 else 1, 3))  # two warps share K
        results.append(emulated("gemm/linear_gemv.cu", 90, csrc.LIBRARIES[library].defines).run(LinearParams, fields, out, constants=EARLY))
        x = results[-1]
    return results


def errors(x: Tensor, products: list[Product], results: list[Tensor]) -> list[float]:
    """Of each result from what it reads, against float64."""
    found = []
    for i, p in enumerate(products):
        row = x if i == 0 else results[i - 1]
        if p.norm[0] is not None:
            row = normalised(row, *p.norm)
        residual = results[p.residual] if isinstance(p.residual, int) else p.residual
        q, s, g = p.w
        ends = (*p.starts, q.shape[0])
        parts = [
            z(row, (q[a:b], s[a:b], g[k] if g.dim() else g), None if p.bias is None else p.bias[a:b])
            for k, (a, b) in enumerate(zip((0, *p.starts), ends, strict=True))
        ]
        full = torch.cat(parts, 1)
        if p.finish == GLU:
            gate, up = full.chunk(2, 1)
            want = ACTIVATIONS[p.act](gate) * up
        else:
            want = finish(full, p.act, None, None if residual is None else residual.double())
        found.append(distance(results[i], want))
    return found


def layer(hidden: int, inner: int, dtype: torch.dtype, act: str = "silu", offset: float = 0.0) -> tuple[Tensor, list[Product]]:
    """o + residual, gate_up, down + residual, q/k/v of the next layer, which has three global scales."""

    def norm():
        return (torch.randn(hidden) * 0.5 + 1 - offset).to(dtype), 1e-6, offset

    rows = 3 * hidden // 2 + 2  # not a multiple of a group
    q, s, g = small_weight(rows, hidden)
    qkv = (q, s, torch.stack((g, g * 3, g / 2)))
    products = [
        Product(small_weight(hidden, 2 * hidden), POINTWISE, residual=torch.randn(1, hidden).to(dtype)),
        Product(small_weight(2 * inner, hidden), GLU, act, norm=norm()),
        Product(small_weight(hidden, inner), POINTWISE, residual=0),
        Product(qkv, PLAIN, norm=norm(), starts=(hidden, hidden + hidden // 4), bias=torch.randn(rows).to(dtype)),
    ]
    return torch.randn(1, 2 * hidden).to(dtype), products


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("hidden", "inner", "act", "offset"), [(64, 192, "silu", 0.0), (576, 1536, "gelu_tanh", 1.0), (320, 1088, "gelu", 0.0)], ids=str)
def test_a_layer(hidden, inner, act, offset, dtype):
    """Of sizes off every tile, with fewer groups than blocks, too; two and three products of it."""
    x, products = layer(hidden, inner, dtype, act, offset)
    for count in (4, 3, 2):
        assert max(errors(x, products[:count], run(x, products[:count]).results)) <= TOLERANCE[dtype]


def test_bits_of_a_launch_each():
    """The order of summation is that of linear_gemv with the same number of warps that share K."""
    for hidden, inner in ((576, 1088), (1152, 2112)):
        x, products = layer(hidden, inner, BF16)
        for p in products:
            p.tile = (3, 1, 0, 0)
        for one, other in zip(run(x, products).results, apart(x, products), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("tile", [(1, 0), (2, 1), (3, 2), (4, 4), (5, 3)], ids=str)
def test_tiles(tile):
    """Stages, log2 of the warps that share K; more warps than segments."""
    x, products = layer(320, 1088, BF16)
    for i, p in enumerate(products):
        p.tile = (tile[0], tile[1] if i % 2 else 0, 0, 0)
    for seed in (0, 1):
        assert max(errors(x, products, run(x, products, seed=seed).results)) <= TOLERANCE[BF16]


def test_not_early():
    x, products = layer(128, 192, BF16)
    assert max(errors(x, products, run(x, products, early=False).results)) <= TOLERANCE[BF16]


def test_nan_reaches_what_follows():
    """And a residual's stays in its column of that result."""
    x, products = layer(128, 192, BF16)
    products[0].residual[0, 5] = float("nan")
    results = run(x, products).results
    assert results[0].isnan().sum() == 1 and all(result.isnan().all() for result in results[1:2]) and results[3].isnan().all()


def test_more_columns_than_threads():
    """Of a block: a GPU with few multiprocessors."""
    down = Product(small_weight(64, 3008), POINTWISE, residual=torch.randn(1, 64).to(BF16))
    x, products = torch.randn(1, 64).to(BF16), [Product(small_weight(2 * 3008, 64), GLU, "silu"), down]
    assert max(errors(x, products, run(x, products).results)) <= TOLERANCE[BF16]


def test_the_longest_row():
    x, products = torch.randn(1, 16384).to(BF16), [Product(small_weight(64, 16384)), Product(small_weight(70, 64))]
    assert max(errors(x, products, run(x, products).results)) <= TOLERANCE[BF16]


def test_what_is_refused():
    x, products = layer(64, 128, BF16)
    refused = dict(
        count=[dict(count=1), dict(count=5)],
        arrivals=[dict(arrivals=None), dict(arrivals_count=ARRIVALS - 1)],
        size=[dict(finish=[PLAIN, GLU, POINTWISE, PLAIN])],
    )
    for cases in refused.values():
        for given in cases:
            with pytest.raises(EmulatorError, match="status 1$"):
                run(x, products, **given)
    for wrong in (dict(tile=(9, 0, 0, 0)), dict(tile=(8, 5, 0, 0))):
        with pytest.raises(EmulatorError, match="status"):
            run(x, [Product(**{**vars(products[0]), **wrong}), *products[1:]])
    with pytest.raises(EmulatorError, match="status 1$"):  # the row behind three of a group could lie behind the weight
        run(x, [products[0], Product(small_weight(67, 64))])
    long = [Product(small_weight(64, 16448)), Product(small_weight(64, 64))]
    with pytest.raises(EmulatorError, match="status 1$"):
        run(torch.randn(1, 16448).to(BF16), long)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("TRIGGER_BEFORE_PDL_WAIT", "before this one has waited"),
        ("STORE_BEFORE_PDL_WAIT", "before the previous kernel"),
        ("BELIEVE_COUNTER", None),
        ("SKIP_BARRIER_BEFORE_X", "race"),
        ("SKIP_BARRIER_BEFORE_SQUARES", "nobody wrote|race|barrier"),
        ("SKIP_BARRIER_AFTER_X", "nobody wrote|race|barrier"),
        ("SKIP_BARRIER_BEFORE_SUMS", "nobody wrote|race|barrier"),
        ("SKIP_COPY_WAIT", "copy"),
        ("SKIP_WARP_BARRIER", "."),
        ("READ_ROWS_PAST_N", "."),
        ("READ_K_PAST_K", "."),
        ("UP_WITH_GATE_SCALE", None),
        ("UP_FROM_GATE_ROWS", None),
    ],
)
def test_broken_lines(fault, words):
    x, products = layer(320, 320, BF16)
    q, s, g = products[1].w
    products[1].w, products[1].starts = (q, s, torch.stack((g, g * 3))), (320,)

    def broken() -> float:
        return max(errors(x, products, run(x, products).results))

    check_caught(emulated(CHAIN, 90), fault, words, broken, least=0.05)


def launches() -> list[tuple[Tensor, list[Product]]]:
    """Of other sizes, one after the other; the first one's results have zeros."""
    x, products = layer(64, 128, BF16)
    q, s, g = products[0].w
    products[0].w = (torch.cat((torch.zeros_like(q[:9]), q[9:])), s, g)
    products[0].residual[:, :9] = 0
    return [(x, products), layer(128, 320, BF16), layer(64, 128, BF16), (x, products), layer(192, 64, BF16)]


def test_launches_that_share_memory():
    """Each sets to 0 what the one before it has left, of whatever size; what the caller has ahead of the last ARRIVALS numbers stays."""
    shared = Launch(arrivals=torch.cat((torch.full((5,), 7, dtype=torch.int32), torch.zeros(ARRIVALS, dtype=torch.int32))))
    for x, products in launches():
        shared = run(x, products, before=shared, arrivals_count=ARRIVALS + 5)
        assert max(errors(x, products, shared.results)) <= TOLERANCE[BF16]
    assert (shared.arrivals[:5] == 7).all()


@pytest.mark.parametrize(("fault", "words"), [("LEAVE_ROWS", None), ("STORE_ZERO", "deadlock")])
def test_rows_that_are_wrong(fault, words):
    def broken() -> float:
        shared, found = Launch(), 0.0
        for x, products in launches():
            shared = run(x, products, before=shared)
            found = max(found, *errors(x, products, shared.results))
        return found

    check_caught(emulated(CHAIN, 90), fault, words, broken, least=0.05)
