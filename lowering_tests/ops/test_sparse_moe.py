"""fp4.moe on 2:4-sparse experts, beyond test_contracts.py: float64 on every pattern, one weight sparse and the other dense, refusals."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import errors
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.moe_call import MoeCall
from lowering_tests.ops.moe_arguments import arguments
from lowering_tests.ops.test_moe import FORMULAS, UNGATED, by_hand, relative
from lowering_tests.ops.test_sparse_contracts import weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
moe = torch.ops.fp4.moe
E, H, INNER = 5, 96, 64


def stack(kind, n, k, device="cpu", experts=E) -> sparse24.Sparse24Parts:
    """Every expert with codes and patterns of its own; scales that keep a product of two layers in range."""
    each = [weight(kind, device, n, k) for _ in range(experts)]
    values, meta = (torch.stack([getattr(w, part) for w in each]) for part in ("values", "meta"))
    scale = torch.randint(0x28, 0x40, (experts, n, k // 16), dtype=torch.uint8, device=device).view(nvfp4.SCALE_DTYPE)
    return sparse24.Sparse24Parts(values, meta, scale, (torch.rand(experts, device=device) + 0.5) / k**0.5 / 4)


def dense_parts(parts: sparse24.Sparse24Parts) -> tuple[torch.Tensor, ...]:
    """The same weight as dense NVFP4."""
    return sparse24.decompress(parts.values, parts.meta), parts.scale, parts.global_scale


def exact(parts) -> torch.Tensor:
    return sparse24.dequantize_sparse24(*parts, torch.float32).double()


def tokens(t, k=3, dtype=torch.float32, device="cpu"):
    # positions of a group differ by powers of two: a swapped pair shows
    x = torch.randn(t, H, device=device) * 2.0 ** (torch.arange(H, device=device) % 4)
    return x.to(dtype), torch.randint(-1, E + 1, (t, k), device=device), torch.rand(t, k, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
@pytest.mark.parametrize("kind", [*range(6), "mixed", "adversarial"])
def test_every_pattern_against_float64(kind, dtype, device):
    up, down = stack(kind, 2 * INNER, H, device), stack(kind, H, INNER, device)
    for t in (1, 40):  # more than eight rows for an expert: the other path of the CPU
        x, ids, w = tokens(t, dtype=dtype, device=device)
        got = moe(*arguments(x, ids, w, up, down))
        want = by_hand(x, ids, w, exact(up), exact(down), FORMULAS["qwen3_moe"][1])
        assert got.dtype == dtype
        assert relative(got, want) <= 2 * CONTRACTS["moe"].tolerance[dtype]
        assert relative(CONTRACTS["moe"].reference(*arguments(x.float(), ids, w, up, down)), want) < 1e-6


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_of_each_model_with_biases(name):
    act, formula = FORMULAS[name]
    rows = INNER * (1 if name in UNGATED else 2)
    up, down = stack("mixed", rows, H), stack("mixed", H, INNER)
    b1, b2 = torch.randn(E, rows), torch.randn(E, H)
    x, ids, w = tokens(6)
    want = by_hand(x, ids, w, exact(up), exact(down), formula, act.interleaved, b1, b2)
    assert relative(moe(*arguments(x, ids, w, up, down, b1, b2, *act.arguments())), want) <= 4e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [0, 1])
def test_one_weight_sparse_and_the_other_dense(which, device):
    """A budget may prune one of the two; zeros that are stored and zeros that are not give the same sums."""
    both = [stack("mixed", 2 * INNER, H, device), stack("mixed", H, INNER, device)]
    x, ids, w = tokens(7, device=device)
    want = moe(*arguments(x, ids, w, *(dense_parts(p) for p in both)))
    mixed = list(both)
    mixed[which] = dense_parts(both[which])
    for pair in (mixed, both):
        assert relative(moe(*arguments(x, ids, w, *pair)), want) < 1e-6
    args = arguments(x, ids, w, *mixed)
    call = MoeCall.of(*args)
    assert (call.gate_up.meta is None, call.down.meta is None) == (which == 0, which == 1)


@pytest.mark.parametrize("device", DEVICES)
def test_sentinels_and_nothing_to_do(device):
    up, down = stack("mixed", 2 * INNER, H, device), stack("mixed", H, INNER, device)
    x, ids, w = tokens(4, 2, device=device)
    ids[:, 1], w[:, 1] = -1, float("nan")
    assert torch.equal(moe(*arguments(x, ids, w, up, down)), moe(*arguments(x, ids[:, :1], w[:, :1], up, down)))
    for some in (slice(0, 0), slice(0, 3)):
        none = moe(*arguments(x[some], torch.full_like(ids[some], E), w[some], up, down))
        assert none.shape == (len(x[some]), H)
        assert not none.any()


def test_an_expert_that_nobody_chose_is_not_read():
    up, down = stack("mixed", 2 * INNER, H), stack("mixed", H, INNER)
    x, w, ids = torch.randn(4, H), torch.rand(4, 2), torch.tensor([[1, 3], [3, 1], [1, 1], [3, -1]])
    clean = moe(*arguments(x, ids, w, up, down))
    for parts in (up, down):
        parts.meta[[0, 2, 4]] = 0xFF
        parts.global_scale[[0, 2, 4]] = float("nan")
    assert torch.equal(moe(*arguments(x, ids, w, up, down)), clean)


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_gradients_are_those_of_autograd(weight_on_input):
    up, down = stack("mixed", 2 * INNER, H), stack("mixed", H, INNER)
    ids = torch.tensor([[0, 1], [2, -1], [4, 4], [1, 5]])
    x, w = torch.randn(4, H, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    y = moe(*arguments(x, ids, w, up, down, None, None, *Activation().arguments(), weight_on_input))
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w), upstream)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    by_autograd = by_hand(x64, ids, w64, exact(up), exact(down), FORMULAS["qwen3_moe"][1], weight_on_input=weight_on_input)
    for a, b in zip(got, torch.autograd.grad(by_autograd, (x64, w64), upstream.double()), strict=True):
        assert relative(a, b) < 1e-5


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("byte", [0x00, 0x45, 0xFF])
def test_a_cpu_refuses_illegal_metadata(which, byte):
    weights = [stack("mixed", 2 * INNER, H), stack("mixed", H, INNER)]
    weights[which].meta[2, 3, 1] = byte
    for t in (1, 20):
        with pytest.raises(errors.SparsityError, match=f"0x{byte:02X} at "):
            moe(*arguments(torch.randn(t, H), torch.full((t, 1), 2), torch.rand(t, 1), *weights))


UP, DOWN = stack("mixed", 2 * INNER, H), stack("mixed", H, INNER)
ONE = tuple(sparse24.Sparse24Parts(*(p[0] for p in w)) for w in (UP, DOWN))
X, IDS, WEIGHTS = torch.ones(3, H), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
CUT = sparse24.Sparse24Parts(UP.values[..., :20], UP.meta[..., :10], UP.scale[..., :5], UP.global_scale)
REFUSED = {
    "H": (errors.ShapeError, r"\(3, 64\).*\[T, 96\]", lambda: moe(*arguments(X[:, :64], IDS, WEIGHTS, UP, DOWN))),
    "K of half a word": (errors.ShapeError, r"K % 32 == 0", lambda: moe(*arguments(X[:, :80], IDS, WEIGHTS, CUT, DOWN))),
    "I": (errors.ShapeError, r"gate_up and down disagree on I", lambda: moe(*arguments(X, IDS, WEIGHTS, UP, stack("mixed", H, 32)))),
    "E": (errors.ShapeError, r"3-D experts", lambda: moe(*arguments(X, IDS, WEIGHTS, UP, sparse24.Sparse24Parts(*(p[:4] for p in DOWN))))),
    "one matrix": (errors.ShapeError, r"3-D experts", lambda: moe(*arguments(X, IDS, WEIGHTS, *ONE))),
    "dense codes": (errors.ShapeError, r"values and meta", lambda: moe(*arguments(X, IDS, WEIGHTS, (dense_parts(UP)[0], *UP[1:]), DOWN))),
    "meta of other rows": (errors.ShapeError, r"values and meta", lambda: moe(*arguments(X, IDS, WEIGHTS, (UP[0], UP[1][:, 1:], *UP[2:]), DOWN))),
    "meta dtype": (errors.DTypeError, r"meta.*int8", lambda: moe(*arguments(X, IDS, WEIGHTS, (UP[0], UP[1].view(torch.int8), *UP[2:]), DOWN))),
    "values without meta": (errors.ShapeError, r"scale", lambda: moe(X, IDS, WEIGHTS, UP[0], *UP[2:], DOWN[0], *DOWN[2:])),
    "meta device": (errors.DeviceError, r"meta meta", lambda: moe(*arguments(X, IDS, WEIGHTS, (UP[0], UP[1].to("meta"), *UP[2:]), DOWN))),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()
    if "device" not in case:  # a graph that could not run is not traced either
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=message):
            call()
