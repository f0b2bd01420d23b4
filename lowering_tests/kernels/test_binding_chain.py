"""torch.ops.fp4_csrc.linear_chain: what the binding, and ctypes in its place, hand to a kernel. A function of this file stands for the kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fp4_inductor import _exchange
from fp4_inductor.errors import DeviceError
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import build
from fp4_inductor.kernels.linear_chain import on_csrc
from fp4_inductor.kernels.params import ChainParams, LinearParams
from fp4_inductor.ops.linear_chain import ARRIVALS, CONTRACT, ChainCall, Product, Routing
from fp4_inductor.ops.router import FORMS
from lowering_tests.kernels import emulator
from lowering_tests.kernels.bound import STANDINS, binding, operators

pytestmark = pytest.mark.skipif(emulator.compiler() is None or build.cxx() is None, reason="no C++ compiler")
ARCH, BF16 = 91, torch.bfloat16  # an architecture that nothing else is resolved for
K, HIDDEN, INNER, N = 64, 32, 96, 48
seen: list[ChainParams] = []
status = [0]


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ChainParams))
def kernel(call):
    seen.append(ChainParams.from_buffer_copy(call.contents))
    for p, finish in zip(seen[-1].products[: seen[-1].count], seen[-1].finish, strict=False):
        ctypes.memset(p.y, 0, 2 * (p.N // 2 if finish == 2 else p.N))
    return status[0]


@pytest.fixture(scope="session")
def ops():
    return operators()


@pytest.fixture
def chain(ops):
    STANDINS["linear_chain", ARCH] = ctypes.cast(kernel, ctypes.c_void_p).value
    seen.clear()
    status[0] = 0
    return ops.linear_chain


def part(n, k, scales=1, **options):
    q, s = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8), torch.ones(n, k // 16).to(torch.float8_e4m3fn)
    return Product(q, s, torch.ones(scales) if scales > 1 else torch.ones(()), **options)


def call(dtype=BF16, rows=1) -> ChainCall:
    norm = dict(eps=1e-6, norm_offset=1.0)
    products = [
        part(HIDDEN, K, residual=torch.randn(rows, HIDDEN).to(dtype)),
        part(2 * INNER, HIDDEN, 2, act="silu", glu=True, starts=(INNER,), norm_weight=torch.randn(HIDDEN).to(dtype), **norm),
        part(HIDDEN, INNER, added=0),
        part(N, HIDDEN, 3, starts=(16, 32), bias=torch.randn(N).to(dtype), norm_weight=torch.randn(HIDDEN).to(dtype), **norm),
    ]
    return ChainCall.made(torch.randn(rows, K).to(dtype), products, torch.zeros(ARRIVALS, dtype=torch.int32))._replace(early=True)


def flat(c: ChainCall, early=1) -> tuple:
    return (*c[: ChainCall._fields.index("group")], _exchange.number_of(c.group), early, ARCH)


def fields(p: LinearParams) -> dict:
    return {name: list(value) if name == "tile" else value for name, _ in p._fields_ for value in [getattr(p, name)]}


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_what_the_kernel_is_given(chain, dtype):
    c = call(dtype)
    results = chain(*flat(c))
    assert [(tuple(y.shape), y.dtype) for y in results] == [((1, n), dtype) for n in (HIDDEN, INNER, HIDDEN, N)]
    [given] = seen
    assert (given.count, list(given.finish), given.arrivals, given.arrivals_count) == (4, [1, 2, 1, 0], c.arrivals.data_ptr(), ARRIVALS)
    y = [t.data_ptr() for t in results]
    first, second, third, fourth = given.products
    assert [p.y for p in given.products] == y
    assert [p.x for p in given.products] == [c.x.data_ptr(), *y[:3]]
    assert [p.residual for p in given.products] == [c.residual[0].data_ptr(), None, y[0], None]
    assert [(p.M, p.N, p.K) for p in given.products] == [(1, HIDDEN, K), (1, 2 * INNER, HIDDEN), (1, HIDDEN, INNER), (1, N, HIDDEN)]
    assert [(p.second, p.third) for p in given.products] == [(0, 0), (INNER, 0), (0, 0), (16, 32)]
    assert [p.act for p in given.products] == [0, 1, 0, 0] and {p.dtype for p in given.products} == {int(dtype == torch.float16)}
    assert [p.norm_weight for p in given.products] == [None if t is None else t.data_ptr() for t in c.norm_weight]
    assert [p.bias for p in given.products] == [None, None, None, c.bias[3].data_ptr()]
    assert second.eps == fourth.eps == pytest.approx(1e-6) and second.norm_offset == 1.0 and first.early == 1
    for p, q, s, g in zip(given.products, c.qdata, c.scale, c.global_scale, strict=True):
        assert (p.codes, p.scale, p.global_scale, p.mul) == (q.data_ptr(), s.data_ptr(), g.data_ptr(), None) and p.size == ctypes.sizeof(LinearParams)
    assert third.norm_weight is None


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_ctypes_give_the_same(chain, dtype):
    c = call(dtype)
    results = chain(*flat(c))
    own, given, _ = on_csrc.call_of(c)
    assert (given.count, list(given.finish), given.arrivals, given.arrivals_count) == (4, list(seen[0].finish), seen[0].arrivals, ARRIVALS)
    moved = dict(zip((t.data_ptr() for t in own), (t.data_ptr() for t in results), strict=True))  # results have other addresses
    for ours, theirs in zip(given.products, seen[0].products, strict=True):
        a = {name: moved.get(value, value) if name in ("x", "y", "residual") else value for name, value in fields(ours).items()}
        a["early"] = theirs.early = 0  # that of the first one counts
        assert a == fields(theirs)
    assert given.products[0].early == 1


def test_ranks(chain, monkeypatch):
    """The operator finds the memory of a group by its number; so do calls through ctypes."""
    monkeypatch.setattr(_exchange, "_GROUPS", {})
    c = call()._replace(summed=[0, 2], group="a group of test_ranks")
    with pytest.raises(RuntimeError, match="load the model before the graph is called"):
        chain(*flat(c))
    with pytest.raises(DeviceError, match="Load the model before the graph is called"):
        on_csrc.call_of(c)
    _exchange.add(c.group, _exchange.Exchange((16, 32, 48), 1, None))
    _exchange.tell(binding(), _exchange.number_of(c.group), _exchange.of(c.group))
    chain(*flat(c))
    for given in (seen[0], on_csrc.call_of(c)[1]):
        assert (given.ranks, given.rank, list(given.summed), list(given.memory)) == (3, 1, [1, 0, 1, 0], [16, 32, 48, *[None] * 5])
    chain(*flat(call()))
    assert (seen[1].ranks, list(seen[1].summed)) == (0, [0] * 4)


def test_two_products(chain):
    c = call()
    two = ChainCall.made(c.x, [p._replace(norm_weight=None) for p in (c.products()[0], part(N, HIDDEN, added=-1))], c.arrivals)
    y, z, *none = chain(*flat(two, 0))
    assert seen[0].count == 2 and seen[0].products[1].x == y.data_ptr() and seen[0].products[0].early == 0 and list(seen[0].finish) == [1, 0, 0, 0]
    assert z.shape == (1, N) and [t.shape for t in none] == [(0,), (0,)]


def test_what_is_not_dense_is_copied_and_not_read_early(chain):
    c = call()
    wide = torch.zeros(2 * INNER, HIDDEN, dtype=torch.uint8)
    strided = c._replace(qdata=[c.qdata[0], wide[:, : HIDDEN // 2], *c.qdata[2:]])
    chain(*flat(strided))
    assert seen[0].products[0].early == 0 and seen[0].products[1].codes != wide.data_ptr()
    _, given, kept = on_csrc.call_of(strided)
    assert given.products[0].early == 0 and any(t.data_ptr() == given.products[1].codes for t in kept)


def test_fake(chain):
    torch.library.opcheck(chain, flat(call()), test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))


REFUSED = {
    "lists": ("every list has an entry", lambda c: c._replace(act=[0])),
    "starts": ("one to four products", lambda c: c._replace(starts=[0])),
    "a later product": ("the result of an earlier one", lambda c: c._replace(added=[-1, 1, 0, -1])),
    "counters": ("arrivals are int32", lambda c: c._replace(arrivals=torch.zeros(8))),
    "counters apart": ("arrivals are int32", lambda c: c._replace(arrivals=torch.zeros(16, dtype=torch.int32)[::2])),
    "K": ("does not fit N and K", lambda c: c._replace(qdata=[*c.qdata[:2], c.qdata[0], c.qdata[3]])),
    "a residual": ("as the result", lambda c: c._replace(residual=[torch.zeros(1, 3).to(BF16), None, None, None])),
    "global scales": ("fewer global scales", lambda c: c._replace(global_scale=[torch.ones(())] * 4)),
    "rows": ("at most M = 1", lambda c: call(rows=2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(chain, case):
    words, change = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        chain(*flat(change(call())))
    assert not seen


def test_a_launch_that_fails(chain):
    status[0] = 801
    with pytest.raises(RuntimeError, match="cudaError 801 for 4 products, the first of N=32, K=64"):
        chain(*flat(call()))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_the_kernel_behind_the_operator(ops, dtype):
    """Emulated, against the reference: what the operator passes is what it means."""
    norm = dict(eps=1e-6, norm_offset=1.0)
    products = [
        random(64, 128, residual=torch.randn(1, 64).to(dtype)),
        random(256, 64, 2, act="silu", glu=True, starts=(128,), norm_weight=torch.randn(64).to(dtype), **norm),
        random(64, 128, added=0),
        random(96, 64, 3, starts=(32, 64), bias=torch.randn(96).to(dtype), norm_weight=torch.randn(64).to(dtype), **norm),
    ]
    c = ChainCall.made(torch.randn(1, 128).to(dtype), products, torch.zeros(ARRIVALS, dtype=torch.int32))
    got = ops.linear_chain(*flat(c, 0)[:-1], 90)
    for a, b in zip(got, CONTRACT.reference(*c), strict=True):
        assert float((a.double() - b.double()).norm() / b.double().norm()) <= CONTRACT.tolerance[dtype]


def random(n, k, scales=1, **options):
    q, s, g = nvfp4.quantize(torch.randn(n, k) / k**0.5)
    return Product(q, s, g * torch.arange(1, scales + 1) if scales > 1 else g, **options)


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_ranks_behind_the_operator(ops, experts, monkeypatch):
    """Emulated, a group of one rank: its part is the sum. Four calls, because the memory is used again after three; they share
    that of a GPU, too."""
    monkeypatch.setattr(_exchange, "_GROUPS", {})
    group, memory = "a group of one", torch.zeros(_exchange.size(1), dtype=torch.uint8)
    _exchange.add(group, _exchange.Exchange((memory.data_ptr(),), 0, memory))
    _exchange.tell(binding(), _exchange.number_of(group), _exchange.of(group))
    norm = dict(norm_weight=torch.randn(64).to(BF16), eps=1e-6)
    gate_up, down = random(256, 64, act="silu", glu=True, **norm), random(64, 128, added=0)
    if experts:
        several = [[random(n, k) for _ in range(6)] for n, k in ((256, 64), (64, 128))]
        stacks = [{name: torch.stack([getattr(p, name) for p in of]) for name in ("qdata", "scale", "global_scale")} for of in several]
        gate_up = gate_up._replace(**stacks[0], routing=Routing(torch.randn(6, 64).to(BF16), 2, FORMS[1], True))
        down = down._replace(**stacks[1])
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32)
    for _ in range(4):
        products = [random(64, 128, residual=torch.randn(1, 64).to(BF16)), gate_up, down, random(96, 64, **norm)]
        alone = ChainCall.made(torch.randn(1, 128).to(BF16), products, arrivals)
        got = ops.linear_chain(*flat(alone._replace(summed=[0, 2], group=group), 0)[:-1], 90)
        for a, b in zip(got, CONTRACT.reference(*alone), strict=True):
            assert float((a.double() - b.double()).norm()) <= CONTRACT.tolerance[BF16] * float(b.double().norm())
