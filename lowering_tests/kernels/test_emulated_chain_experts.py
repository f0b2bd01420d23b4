"""csrc/gemm/linear_chain.cu with a mixture of experts among its products, on a CPU (emulator.py): against the reference; broken lines."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels.linear_chain.on_csrc import call_of
from fp4_inductor.ops.linear_chain import ARRIVALS, ChainCall, Product, Routing, reference
from fp4_inductor.ops.router import FORMS
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, check_caught, emulated
from lowering_tests.kernels.test_emulated_linear import BF16, FP16

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
TOLERANCE = {BF16: 1e-2, FP16: 2e-3}
CONSTANT = ("codes", "scale", "norm_weight")


def run(c: ChainCall, early: bool = True, seed: int = 0, **given: Any) -> list[Tensor]:
    """The results of one launch; ``given``: fields of ChainParams that are otherwise right."""
    results, call, kept = call_of(c)
    kernel = emulated("gemm/linear_chain.cu", 90)
    library = kernel.library
    library.emulator_seed(seed)
    known = {t.data_ptr(): t for t in (*results, *kept, c.x, c.arrivals, c.router, *c.global_scale, *c.residual) if t is not None and t.numel()}
    places: dict[int, ctypes.c_void_p] = {}

    def place(address: int | None) -> int | None:
        if address not in known:
            return address
        if address not in places:
            places[address] = kernel.put(known[address])
        return places[address].value

    try:
        written = [call.products[i].y for i in range(call.count)]
        for y in (known[address] for address in written):
            y.fill_(float("nan"))
        for product in call.products[: call.count]:
            product.early = int(early)
            for name, kind, *_ in product._fields_:
                if kind is ctypes.c_void_p and name != "stream":
                    setattr(product, name, place(getattr(product, name)))
                    if name in CONSTANT and getattr(product, name):
                        size = next(known[a].nbytes for a, p in places.items() if p.value == getattr(product, name))
                        library.emulator_constant(ctypes.c_void_p(getattr(product, name)), ctypes.c_size_t(size))
        for name in ("arrivals", "router"):
            setattr(call, name, place(getattr(call, name)))
        if call.router:
            library.emulator_constant(ctypes.c_void_p(call.router), ctypes.c_size_t(c.router.nbytes))
        for name, value in given.items():
            setattr(call, name, value)
        status = library.fp4_linear_chain(ctypes.byref(call))
        message = library.emulator_message().decode()
        if status or message:
            raise EmulatorError(message or f"status {status}")
        for address, there in places.items():
            ctypes.memmove(address, there, known[address].nbytes)
        return results
    finally:
        library.emulator_free_all()


def stack(experts: int, n: int, k: int) -> tuple[Tensor, ...]:
    return tuple(map(torch.stack, zip(*(nvfp4.quantize(torch.randn(n, k) / k**0.5) for _ in range(experts)), strict=True)))


def layer(
    hidden: int, inner: int, experts: int, k: int, form: str = "normalized", dtype: torch.dtype = BF16, scales: int = 1, act: str = "silu"
) -> tuple[Tensor, list[Product]]:
    """o + residual, gate and up and down of experts, q/k/v."""

    def norm() -> dict[str, Any]:
        return dict(norm_weight=(torch.rand(hidden) + 0.5).to(dtype), eps=1e-6, norm_offset=float(scales - 1))

    q, s, g = stack(experts, 2 * inner, hidden)
    routing = Routing(torch.randn(experts, hidden).to(dtype), k, form, scales == 1)
    products = [
        Product(*nvfp4.quantize(torch.randn(hidden, 128) / 11), residual=torch.randn(1, hidden).to(dtype)),
        Product(q, s, torch.stack((g, g * 3), 1) if scales == 2 else g, act=act, glu=True, routing=routing, **norm()),
        Product(*stack(experts, hidden, inner), added=0),
        Product(*nvfp4.quantize(torch.randn(hidden + 6, hidden) / hidden**0.5), **norm()),
    ]
    return torch.randn(1, 128).to(dtype), products


def chain(x: Tensor, products: list[Product]) -> ChainCall:
    return ChainCall.made(x, products, torch.zeros(ARRIVALS, dtype=torch.int32))


def error(c: ChainCall, results: list[Tensor]) -> float:
    pairs = [(a, b.double()) for a, b in zip(results, reference(c), strict=False) if b.numel()]
    return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("number", "sizes"), enumerate(((320, 128, 12, 3), (64, 64, 20, 5), (576, 192, 3, 3))), ids=str)
def test_a_layer(number, sizes, dtype):
    """More experts than blocks, fewer, all of them chosen; with and without products around them."""
    scales = (2, 1, 2)[number]
    x, products = layer(*sizes, form=FORMS[number], dtype=dtype, scales=scales, act=("silu", "gelu_tanh")[scales - 1])
    for first, last in ((0, 4), (0, 3), (1, 4), (1, 3)):
        part = [p._replace(added=p.added - first if p.added >= first else -1) for p in products[first:last]]
        c = chain(torch.randn(1, sizes[0]).to(dtype) if first else x, part)
        for seed in range(3):  # one launch after another in the same memory
            assert error(c, run(c, early=first == 0, seed=first + seed)) <= TOLERANCE[dtype]


def test_equal_scores():
    """The lower index goes first, as fp4.router has it, -0 is 0, and NaN is above all: results are NaN, no address is out of range."""
    x, products = layer(64, 64, 9, 4)
    for router in (torch.zeros(9, 64), -torch.zeros(9, 64)):
        routed = [products[0], products[1]._replace(routing=products[1].routing._replace(router=router.to(BF16))), *products[2:]]
        c = chain(x, routed)
        assert error(c, run(c)) <= TOLERANCE[BF16]
    c = chain(x * float("nan"), products)
    assert all(result.isnan().all() for result in run(c) if result.numel())


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        (dict(routed=3), (64, 64, 6, 2)), (dict(top_k=7), (64, 64, 6, 2)), (dict(units=3), (64, 64, 6, 2)), (dict(arrivals_count=ARRIVALS - 1), (64, 64, 6, 2)),
        ({}, (64, 96, 6, 2)), ({}, (64, 64, 21, 2)),
    ],
)  # fmt: skip
def test_what_is_refused(given, sizes):
    """Down that is not there, more chosen than there are, other global scales, no room for the scores, I % 64, more rows of the router than blocks take."""
    with pytest.raises(EmulatorError, match="status 1$"):
        run(chain(*layer(*sizes)), **given)


@pytest.mark.parametrize(("fault", "words"), [("SKIP_BARRIER_BEFORE_CHOICE", "."), ("UP_WITH_GATE_SCALE", None), ("SKIP_BARRIER_BEFORE_RANK", ".")])
def test_broken_lines(fault, words):
    x, products = layer(320, 128, 12, 3, scales=2)
    c = chain(x, products)
    check_caught(emulated("gemm/linear_chain.cu", 90), fault, words, lambda: sum(error(c, run(c, seed=seed)) for seed in range(4)), least=0.2)
