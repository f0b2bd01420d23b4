"""NVFP4Tensor reads like the dense tensor it stands for: matmuls through fp4 ops, parts as views, all else dequantised."""

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor import NVFP4Tensor, errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.tensors import nvfp4 as nvfp4_tensor

N, K, E = 64, 96, 3


def matrix(dtype=torch.float32) -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(N, K).to(dtype))


def experts() -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(E, N, K) * torch.tensor([1.0, 0.1, 9.0])[:, None, None])


def plain(t):
    return t.dequantize() if isinstance(t, NVFP4Tensor) else t


@pytest.fixture
def ops(monkeypatch):
    """The names of the fp4 ops that tensors call, in order."""
    names = []

    class Recorder:
        def __getattr__(self, name):
            names.append(name)
            return getattr(torch.ops.fp4, name)

    monkeypatch.setattr(nvfp4_tensor, "fp4", Recorder())
    return names


def same_bits(a: NVFP4Tensor, parts) -> bool:
    return all(torch.equal(x.view(torch.uint8) if x.dim() else x, y.view(torch.uint8) if y.dim() else y) for x, y in zip(a.parts(), parts, strict=True))


# --- construction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_it_presents_the_dense_weight(dtype):
    w = torch.randn(N, K).to(dtype)
    q = NVFP4Tensor.from_dense(w)
    assert (q.shape, q.dtype, q.device, q.stride(), q.requires_grad) == (w.shape, dtype, w.device, w.stride(), False)
    assert [(p.shape, p.dtype) for p in q.parts()] == [((N, K // 2), torch.uint8), ((N, K // 16), torch.float8_e4m3fn), ((), torch.float32)]
    parts = nvfp4.quantize(w)
    assert same_bits(q, parts)
    assert torch.equal(q.dequantize(), nvfp4.dequantize(*parts, dtype))
    assert type(q.dequantize()) is torch.Tensor
    assert q.dequantize(torch.float32).dtype == torch.float32
    assert (q.dequantize(torch.float32) - w.float()).norm() < 0.11 * w.float().norm()


def test_scale_search_and_shared_global_scale_reach_the_format():
    w = torch.randn(N, K)
    shared = torch.tensor(0.01)
    for search in ("amax", "four_over_six", "mse"):
        q = NVFP4Tensor.from_dense(w, search, shared)
        assert torch.equal(q.qdata, nvfp4.quantize(w, search, shared)[0])
        assert torch.equal(q.global_scale, shared)
    weighted = NVFP4Tensor.from_dense(w, "activation", channel_weight=torch.rand(K))
    assert not torch.equal(weighted.qdata, NVFP4Tensor.from_dense(w, "mse").qdata)


def test_from_dense_of_a_parameter_detaches():
    q = NVFP4Tensor.from_dense(torch.nn.Linear(K, N).weight)
    assert not q.requires_grad
    assert not q.global_scale.requires_grad


def test_repr_says_what_it_is():
    for q in (matrix(torch.bfloat16), matrix().t(), experts(), torch.nn.Parameter(matrix(), requires_grad=False)):
        text = repr(q)
        assert text.startswith("NVFP4Tensor(")
        assert str(tuple(q.shape)) in text
        assert str(q.dtype) in text
        assert f"{q}" == text


def test_parts_that_do_not_belong_together_are_refused():
    q, s, g = matrix().parts()
    for error_class, args in (
        (errors.DTypeError, (q, s.view(torch.uint8), g)),
        (errors.DTypeError, (q.view(torch.int8), s, g)),
        (errors.DTypeError, (q, s, g, torch.float64)),
        (errors.ShapeError, (q, s[:, 1:], g)),
        (errors.ShapeError, (q, s, g.expand(2))),
        (errors.DeviceError, (q, s, g.to("meta"))),
        (errors.DeviceError, (q.to("meta"), s, g)),
    ):
        with pytest.raises(error_class, match=r"; got .*; accepted: "):
            NVFP4Tensor(*args)


# --- matmuls stay packed ----------------------------------------------------------------------------------------

MATMULS = {
    "F.linear": (lambda x, w: F.linear(x, w), "linear"),
    "F.linear, keywords": (lambda x, w: F.linear(input=x, weight=w, bias=None), "linear"),
    "F.linear, bias": (lambda x, w: F.linear(x, w, torch.ones(N)), "linear"),
    "F.linear, 3-D": (lambda x, w: F.linear(x.view(1, 5, K), w), "linear"),
    "F.linear, 1-D": (lambda x, w: F.linear(x[0], w), "linear"),
    "@ t()": (lambda x, w: x @ w.t(), "linear"),
    "@ .T": (lambda x, w: x @ w.T, "linear"),
    "@ .mT": (lambda x, w: x @ w.mT, "linear"),
    "@ permute": (lambda x, w: x @ w.permute(1, 0), "linear"),
    "@ transpose": (lambda x, w: x @ w.transpose(-2, -1), "linear"),
    "mm": (lambda x, w: torch.mm(x, w.t()), "linear"),
    "matmul, 3-D": (lambda x, w: torch.matmul(x.view(1, 5, K), w.t()), "linear"),
    "addmm": (lambda x, w: torch.addmm(torch.ones(N), x, w.t()), "linear"),
    "twice transposed": (lambda x, w: F.linear(x, w.t().t()), "linear"),
    "addmm, beta": (lambda x, w: torch.addmm(torch.ones(N), x, w.t(), beta=2), "dequantize"),
    "addmm, 2-D bias": (lambda x, w: torch.addmm(torch.ones(5, N), x, w.t()), "dequantize"),
    "addmm, scalar bias": (lambda x, w: torch.addmm(torch.ones(1), x, w.t()), "dequantize"),
    "weight on the left": (lambda x, w: w @ x.t(), "dequantize"),
    "transposed weight, F.linear": (lambda x, w: F.linear(x[:, :N], w.t()), "dequantize"),
    "matrix-vector": (lambda x, w: w @ x[0], "dequantize"),
    "einsum": (lambda x, w: torch.einsum("mk,nk->mn", x, w), None),
}


@pytest.mark.parametrize("case", MATMULS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_matmul(case, mode, ops):
    fn, op = MATMULS[case]
    x, w = torch.randn(5, K), matrix()
    with mode():
        ops.clear()
        got, used = fn(x, w), list(ops)
        torch.testing.assert_close(got, fn(x, w.dequantize()), rtol=1e-4, atol=1e-4)
    if op is not None:
        assert used == [op]


@pytest.mark.parametrize("case", [c for c in MATMULS if MATMULS[c][1] == "linear"])
def test_every_form_has_the_bits_of_the_op(case):
    x, w = torch.randn(5, K), matrix()
    got = MATMULS[case][0](x, w)
    want = torch.ops.fp4.linear(x[:1] if "1-D" in case else x, *w.parts(), torch.ones(N) if case in ("F.linear, bias", "addmm") else None)
    assert torch.equal(got.reshape(want.shape), want)


@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (lambda x, w: x @ w.mT, "bmm"),
        (lambda x, w: torch.bmm(x, w.transpose(1, 2)), "bmm"),
        (lambda x, w: torch.bmm(x, w.permute(0, 2, 1)), "bmm"),
        (lambda x, w: torch.stack([F.linear(a, e) for a, e in zip(x, w, strict=True)]), "linear"),
        (lambda x, w: torch.stack([F.linear(a, e) for a, e in zip(x, w.unbind(0), strict=True)]), "linear"),
        (lambda x, w: torch.stack([x[i] @ w[i].t() for i in range(E)]), "linear"),
        (lambda x, w: torch.bmm(x, w[torch.tensor([0, 1, 2])].mT), "bmm"),
        (lambda x, w: torch.baddbmm(torch.ones(E, 1, N), x, w.mT), "dequantize"),
        (lambda x, w: torch.einsum("emk,enk->emn", x, w), None),
        (lambda x, w: x[0] @ w.mT, None),
        (lambda x, w: torch.stack([x, x]) @ w.mT, None),
    ],
)
def test_expert_matmul(fn, op, ops):
    x, w = torch.randn(E, 5, K), experts()
    ops.clear()
    got, used = fn(x, w), set(ops)
    torch.testing.assert_close(got, fn(x, w.dequantize()), rtol=1e-4, atol=1e-3)
    assert op is None or used == {op}


# --- parts of a weight ------------------------------------------------------------------------------------------

# (what, takes the part, stays packed)
PARTS = {
    "rows": (lambda w: w[3:9], True),
    "rows from the end": (lambda w: w[-5:], True),
    "no rows": (lambda w: w[9:9], True),
    "rows past the end": (lambda w: w[60:1000], True),
    "all": (lambda w: w[:], True),
    "narrow": (lambda w: w.narrow(0, 8, 16), True),
    "columns on blocks": (lambda w: w[:, 16:48], True),
    "last columns": (lambda w: w[:, -32:], True),
    "rows of the transposed": (lambda w: w.t()[16:32], True),
    "columns of the transposed": (lambda w: w.t()[:, 3:5], True),
    "chosen rows": (lambda w: w.index_select(0, torch.tensor([5, 0, 5])), True),
    "chunk of rows": (lambda w: w.chunk(3)[1], True),
    "split of rows": (lambda w: w.split([20, 44])[1], True),
    "split of columns on blocks": (lambda w: w.split(48, 1)[1], True),
    "uneven last split": (lambda w: w.split(50)[1], True),
    "tensor_split": (lambda w: w.tensor_split(3)[2], True),
    "columns off blocks": (lambda w: w[:, 3:19], False),
    "split of columns off blocks": (lambda w: w.split([20, 76], 1)[1], False),
    "stepped rows": (lambda w: w[::2], False),
    "stepped columns": (lambda w: w[:, ::3], False),
    "one row": (lambda w: w[3], False),
    "one column": (lambda w: w[:, 3], False),
    "one element": (lambda w: w[3, 4], False),
    "fancy rows": (lambda w: w[[1, 2]], False),
    "block of both": (lambda w: w[3:5, 7:9], False),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_part_of_a_matrix(case, mode):
    fn, packed = PARTS[case]
    w = matrix()
    with mode():
        got, want = fn(w), fn(w.dequantize())
    assert isinstance(got, NVFP4Tensor) == packed
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(plain(got), want)


EXPERT_PARTS = {
    "expert": (lambda w: w[1], True),
    "last expert": (lambda w: w[-1], True),
    "select": (lambda w: w.select(0, 2), True),
    "experts": (lambda w: w[1:], True),
    "unbind": (lambda w: w.unbind(0)[2], True),
    "by id": (lambda w: w[torch.tensor([2, 0, 2])], True),
    "by a table of ids": (lambda w: w[torch.tensor([[2, 0], [1, 1]])], True),
    "by mask": (lambda w: w[torch.tensor([True, False, True])], True),
    "index_select": (lambda w: w.index_select(0, torch.tensor([1])), True),
    "rows": (lambda w: w[:, 3:9], True),
    "columns on blocks": (lambda w: w[:, :, 16:], True),
    "gate and up": (lambda w: w.chunk(2, 1)[1], True),
    "transposed": (lambda w: w.permute(0, 2, 1), True),
    "expert of the transposed": (lambda w: w.mT[1], True),
    "columns off blocks": (lambda w: w[..., 3:], False),
    "row of an expert": (lambda w: w[1, 2], False),
    "by two ids": (lambda w: w[torch.tensor([0, 1]), torch.tensor([3, 4])], False),
    "by a mask of rows": (lambda w: w[torch.arange(E * N).view(E, N) % 2 == 0], False),
    "experts and rows swapped": (lambda w: w.transpose(0, 1), False),
}


@pytest.mark.parametrize("form", ["[E]", "[E, 1, 1]"])
@pytest.mark.parametrize("case", EXPERT_PARTS)
def test_part_of_experts(case, form):
    fn, packed = EXPERT_PARTS[case]
    q = experts()
    w = q if form == "[E]" else NVFP4Tensor(q.qdata, q.scale, q.global_scale.view(E, 1, 1), q.dtype)
    assert w.global_scale.shape == (E,)
    got, want = fn(w), fn(q.dequantize())
    assert isinstance(got, NVFP4Tensor) == packed
    assert torch.equal(plain(got), want)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w: w.transpose(0, 5),
        lambda w: w.permute(0, 4, 1),
        lambda w: w.permute(0, 1),
        lambda w: w.select(7, 0),
        lambda w: w.select(0, E),
        lambda w: w[E],
        lambda w: w.narrow(1, 60, 10),
        lambda w: w.index_select(9, torch.tensor([0])),
        lambda w: w.index_select(0, torch.tensor([E])),
        lambda w: w[torch.tensor([E])],
        lambda w: w[torch.tensor([True, False])],
        lambda w: w.unbind(4),
        lambda w: w.split(0),
        lambda w: w.split_with_sizes([1, 1]),
        lambda w: w.split_with_sizes([4, -1]),
        lambda w: w.chunk(2, 5),
        lambda w: w.view(5, -1),
    ],
)
def test_an_index_out_of_range_is_refused_as_for_a_dense_tensor(fn):
    w = experts()
    with pytest.raises((IndexError, RuntimeError, ValueError)) as dense:
        fn(w.dequantize())
    with pytest.raises(dense.type):
        fn(w)


def test_parts_share_memory_with_the_whole():
    w, w3 = matrix(), experts()
    for part in (w[3:9], w.t(), w.detach(), w[:, 16:48], w.split(32)[1], w.view(N, K)):
        assert part.qdata.untyped_storage().data_ptr() == w.qdata.untyped_storage().data_ptr()
    assert w3[1].scale.untyped_storage().data_ptr() == w3.scale.untyped_storage().data_ptr()
    assert w.clone().qdata.untyped_storage().data_ptr() != w.qdata.untyped_storage().data_ptr()


def test_matmul_with_a_part_has_the_bits_of_the_copied_part():
    x, w = torch.randn(5, K), matrix()
    for part in (w[3:9], w[:, 16:48], w[8:40, 32:]):
        a = x[:, : part.shape[1]]
        assert torch.equal(F.linear(a, part), F.linear(a, part.clone()))


# --- everything else --------------------------------------------------------------------------------------------

READS = {
    "add": lambda w: w + 1,
    "mul": lambda w: 2 * w,
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(-1),
    "norm": lambda w: w.norm(),
    "abs max": lambda w: w.abs().max(),
    "compare": lambda w: w > 0,
    "int": lambda w: w.to(torch.int32),
    "bool": lambda w: w.bool(),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "flatten": lambda w: w.flatten(),
    "view": lambda w: w.view(-1),
    "reshape": lambda w: w.reshape(32, -1),
    "expand": lambda w: w.expand(2, N, K),
    "cat with dense": lambda w: torch.cat([w, torch.ones(2, K)]),
    "stack in the middle": lambda w: torch.stack([w, w], 1),
    "embedding": lambda w: F.embedding(torch.tensor([1, 3]), w),
    "diagonal": lambda w: w.diagonal(),
    "flip": lambda w: w.flip(0),
    "neg": lambda w: -w,
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "conv": lambda w: F.conv1d(torch.ones(1, K, 4), w.unsqueeze(-1)),
    "zeros_like": lambda w: torch.zeros_like(w),
    "contiguous transposed": lambda w: w.t().contiguous(),
    "copy into dense": lambda w: torch.zeros(N, K).copy_(w),
    "numel": lambda w: torch.tensor(w.numel()),
    "item": lambda w: torch.tensor(w[3, 4].item()),
    "equal": lambda w: torch.tensor(torch.equal(w, w)),
    "sort": lambda w: w.sort(-1).values,
}


@pytest.mark.parametrize("case", READS)
def test_dense_fallback(case):
    w = matrix()
    before = [p.clone() for p in w.parts()]
    got, want = READS[case](w), READS[case](w.dequantize())
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)
    assert same_bits(w, before)


def test_iteration_and_float():
    w = matrix()
    assert torch.equal(torch.stack(list(w)), w.dequantize())
    assert float(w.sum()) == float(w.dequantize().sum())


# --- autocast and gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [lambda x, w: F.linear(x, w), lambda x, w: x @ w.t(), lambda x, w: F.linear(x, w, torch.ones(N))])
def test_autocast_casts_the_activation(fn):
    x, w = torch.randn(5, K), matrix()
    with torch.autocast("cpu", torch.bfloat16):
        got = fn(x, w)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), fn(x, w.dequantize()), rtol=2e-2, atol=0.2)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((errors.DTypeError, RuntimeError), match=r"float64|[Dd]ouble|dtype"):
        fn(x.double(), w)


@pytest.mark.parametrize("fn", [lambda x, w, b: F.linear(x, w, b), lambda x, w, b: torch.addmm(b, x, w.t())])
def test_gradients_of_activation_and_bias(fn):
    w = matrix()
    x, b = torch.randn(5, K, requires_grad=True), torch.randn(N, requires_grad=True)
    got = torch.autograd.grad(fn(x, w, b).square().sum(), (x, b))
    want = torch.autograd.grad(fn(x, w.dequantize(), b).square().sum(), (x, b))
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3)


def test_gradient_of_experts():
    w, x = experts(), torch.randn(E, 5, K, requires_grad=True)
    (got,) = torch.autograd.grad((x @ w.mT).square().sum(), x)
    (want,) = torch.autograd.grad((x @ w.dequantize().mT).square().sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("fn", [lambda x, w: F.linear(x, w), lambda x, w: x @ w.t()])
def test_a_weight_that_requires_grad_gets_a_dense_gradient_never_none(fn):
    """nn.Parameter(q) requires grad by default; a step of an optimizer is then refused, not lost."""
    p = torch.nn.Parameter(matrix())
    x = torch.randn(5, K, requires_grad=True)
    fn(x, p).square().sum().backward()
    dense = p.detach().dequantize().requires_grad_()
    (want,) = torch.autograd.grad(fn(x.detach(), dense).square().sum(), dense)
    assert type(p.grad) is torch.Tensor
    torch.testing.assert_close(p.grad, want, rtol=1e-4, atol=1e-3)
    assert x.grad is not None
    with pytest.raises(errors.UnsupportedOpError, match="would write into a NVFP4Tensor"):
        torch.optim.SGD([p], 1e-3).step()


def test_vmap_over_the_activation():
    w, x = matrix(), torch.randn(7, 5, K)
    torch.testing.assert_close(torch.func.vmap(lambda v: F.linear(v, w))(x), F.linear(x, w))


def _weight(*shape: int, global_scale=None) -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(*shape), global_scale=global_scale)


@pytest.mark.parametrize("transposed", [False, True])
def test_stack_cat_and_squeeze_stay_packed(transposed):
    """What transformers does to experts when it loads and saves them: no code and no scale changes."""
    parts = [_weight(32, 48) for _ in range(3)]
    if transposed:
        parts = [p.t() for p in parts]
    stacked = torch.stack(parts)
    assert type(stacked) is NVFP4Tensor
    assert stacked.global_scale.shape == (3,)
    assert torch.equal(stacked.dequantize(), torch.stack([p.dequantize() for p in parts]))
    chunks = torch.chunk(stacked, 3, dim=0)
    for again in ([c.squeeze() for c in chunks], [c.squeeze(0) for c in chunks], list(torch.cat(chunks).unbind())):
        for a, b in zip(again, parts, strict=True):
            assert type(a) is NVFP4Tensor
            assert a.shape == b.shape
            assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.parts()[:2], b.parts()[:2], strict=True))
            assert torch.equal(a.global_scale, b.global_scale)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_of_one_matrix_needs_one_global_scale(dim):
    g = torch.tensor(0.003)
    a, b = _weight(32, 48, global_scale=g), _weight(32, 48, global_scale=g)
    packed = torch.cat([a, b], dim)
    assert type(packed) is NVFP4Tensor
    assert torch.equal(packed.dequantize(), torch.cat([a.dequantize(), b.dequantize()], dim))
    other = _weight(32, 48, global_scale=g * 2)
    dense = torch.cat([a, other], dim)
    assert type(dense) is torch.Tensor
    assert torch.equal(dense, torch.cat([a.dequantize(), other.dequantize()], dim))


def test_cat_of_experts_along_rows_compares_every_expert():
    g = torch.tensor([0.003, 0.004])
    a, b = _weight(2, 32, 48, global_scale=g), _weight(2, 16, 48, global_scale=g)
    assert type(torch.cat([a, b], 1)) is NVFP4Tensor
    assert type(torch.cat([a, _weight(2, 16, 48, global_scale=torch.tensor([0.003, 0.005]))], 1)) is torch.Tensor


def test_squeeze_of_a_row_is_dense():
    w = _weight(1, 48)
    assert type(w.squeeze()) is torch.Tensor
    assert torch.equal(w.squeeze(0), w.dequantize().squeeze(0))
