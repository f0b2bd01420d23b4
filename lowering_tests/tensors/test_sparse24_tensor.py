"""Sparse24NVFP4Tensor has every operation of NVFP4Tensor: the cases are those of test_nvfp4_reads.py and test_nvfp4_state.py."""

from __future__ import annotations

import copy
import io
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import NVFP4Tensor, Sparse24NVFP4Tensor, errors
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.tensors import sparse24 as module
from lowering_tests.tensors.test_nvfp4_reads import EXPERT_PARTS, MATMULS, PARTS, READS

N, K, E = 64, 96, 3
# K is cut at multiples of 32, so these are dense.
OFF_BLOCKS = {"columns on blocks", "rows of the transposed", "split of columns on blocks"}


def matrix(dtype=torch.float32, seed=0, **options) -> Sparse24NVFP4Tensor:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(seed))
    return Sparse24NVFP4Tensor.from_dense(w.to(dtype), "magnitude", **options)


def experts() -> Sparse24NVFP4Tensor:
    return Sparse24NVFP4Tensor.from_dense(torch.randn(E, N, K) * torch.tensor([1.0, 0.1, 9.0])[:, None, None], "magnitude")


def plain(t):
    return t.dequantize() if isinstance(t, Sparse24NVFP4Tensor) else t


def same(a, b) -> bool:
    bits = all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a.parts(), b.parts(), strict=True))
    return type(a) is type(b) and (a.dtype, a.shape, a.transposed) == (b.dtype, b.shape, b.transposed) and bits


@pytest.fixture
def ops(monkeypatch):
    """The names of the fp4 ops that tensors call, in order."""
    names = []

    class Recorder:
        def __getattr__(self, name):
            names.append(name)
            return getattr(torch.ops.fp4, name)

    monkeypatch.setattr(module, "fp4", Recorder())
    return names


# --- construction -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_it_presents_the_dense_weight(dtype):
    w = torch.randn(N, K).to(dtype)
    q = Sparse24NVFP4Tensor.from_dense(w, pruning="magnitude")
    assert (q.shape, q.dtype, q.device, q.stride(), q.requires_grad) == (w.shape, dtype, w.device, w.stride(), False)
    shapes = [((N, K // 4), torch.uint8), ((N, K // 8), torch.uint8), ((N, K // 16), torch.float8_e4m3fn), ((), torch.float32)]
    assert [(p.shape, p.dtype) for p in (q.values, q.meta, q.scale, q.global_scale)] == shapes
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    assert torch.equal(q.dequantize(), sparse24.dequantize_sparse24(*parts, dtype))
    assert type(q.dequantize()) is torch.Tensor
    assert same(Sparse24NVFP4Tensor.from_dense(w, mask=sparse24.magnitude_mask(w)), q)
    assert repr(q).startswith("Sparse24NVFP4Tensor(shape=(64, 96)")


def test_existing_is_the_default_and_refuses_others():
    w = torch.randn(N, K)
    kept = w * sparse24.magnitude_mask(w)
    assert same(Sparse24NVFP4Tensor.from_dense(kept), Sparse24NVFP4Tensor.from_dense(w, "magnitude"))
    with pytest.raises(errors.SparsityError, match=r"row 0, k 0\.\.3 with 4 non-zeros"):
        Sparse24NVFP4Tensor.from_dense(w)
    with pytest.raises(errors.ConfigError, match="magnitude"):
        Sparse24NVFP4Tensor.from_dense(w, "sparsegpt")
    with pytest.raises(errors.ShapeError, match="multiple of 32"):
        Sparse24NVFP4Tensor.from_dense(w[:, :48], "magnitude")
    with pytest.raises(errors.NonFiniteError):
        Sparse24NVFP4Tensor.from_dense(w / 0, "magnitude")


def test_illegal_parts_are_refused():
    v, m, s, g = matrix().parts()
    bad = m.clone()
    bad[3, 2] = 0x41
    for error_class, args in (
        (errors.SparsityError, (v, bad, s, g)),
        (errors.SparsityError, (v, torch.nn.Parameter(bad, requires_grad=False), s, g)),
        (errors.DTypeError, (v, m, s.view(torch.uint8), g)),
        (errors.DTypeError, (v.view(torch.int8), m, s, g)),
        (errors.DTypeError, (v, m, s, g, torch.float64)),
        (errors.ShapeError, (v, m[1:], s, g)),
        (errors.ShapeError, (v, m, s[:, 1:], g)),
        (errors.ShapeError, (v, m, s, g.expand(2))),
        (errors.DeviceError, (v, m.to("meta"), s, g)),
    ):
        with pytest.raises(error_class, match=r"; got .*; accepted: "):
            Sparse24NVFP4Tensor(*args)


def test_views_and_copies_do_not_read_the_metadata_again():
    q = matrix()
    with mock.patch.object(sparse24, "validate_meta", side_effect=AssertionError("read")):
        assert q.t()[:, 3:9].clone().detach().to(torch.bfloat16).shape == (K, 6)


# --- matmuls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MATMULS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_matmul(case, mode, ops):
    fn, op = MATMULS[case]
    x, w = torch.randn(5, K), matrix()
    with mode():
        ops.clear()
        got, used = fn(x, w), list(ops)
        torch.testing.assert_close(got, fn(x, w.dequantize()), rtol=1e-4, atol=1e-4)
    if op is not None:
        assert used == [f"sparse_{op}"]


@pytest.mark.parametrize(
    ("fn", "used"),
    [
        (lambda x, w: x @ w.mT, {"bmm", "sparse_decompress"}),
        (lambda x, w: torch.bmm(x, w[torch.tensor([0, 1, 2])].mT), {"bmm", "sparse_decompress"}),
        (lambda x, w: torch.stack([F.linear(a, e) for a, e in zip(x, w.unbind(0), strict=True)]), {"sparse_linear"}),
        (lambda x, w: torch.baddbmm(torch.ones(E, 1, N), x, w.mT), {"sparse_dequantize"}),
    ],
)
def test_expert_matmul(fn, used, ops):
    x, w = torch.randn(E, 5, K), experts()
    ops.clear()
    got, seen = fn(x, w), set(ops)
    torch.testing.assert_close(got, fn(x, w.dequantize()), rtol=1e-4, atol=1e-3)
    assert seen == used


# --- parts of a weight, and everything else ----------------------------------------------------------------------


@pytest.mark.parametrize("case", PARTS)
def test_part_of_a_matrix(case):
    fn, packed = PARTS[case]
    w = matrix()
    got, want = fn(w), fn(w.dequantize())
    assert isinstance(got, Sparse24NVFP4Tensor) == (packed and case not in OFF_BLOCKS)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(plain(got), want)


@pytest.mark.parametrize("cut", [lambda w: w[:, 32:64], lambda w: w[:, -32:], lambda w: w.t()[32:], lambda w: w.split(32, 1)[1], lambda w: w[3:9, :64]])
def test_columns_are_cut_at_32(cut):
    w = matrix()
    part = cut(w)
    assert isinstance(part, Sparse24NVFP4Tensor)
    assert torch.equal(part.dequantize(), cut(w.dequantize()))
    assert part.values.untyped_storage().data_ptr() == w.values.untyped_storage().data_ptr()
    if not part.transposed:
        x = torch.randn(5, part.shape[1])
        assert torch.equal(F.linear(x, part), F.linear(x, part.clone()))


@pytest.mark.parametrize("case", EXPERT_PARTS)
def test_part_of_experts(case):
    fn, packed = EXPERT_PARTS[case]
    w = experts()
    got, want = fn(w), fn(w.dequantize())
    assert isinstance(got, Sparse24NVFP4Tensor) == (packed and case != "columns on blocks")
    assert torch.equal(plain(got), want)


@pytest.mark.parametrize("case", READS)
def test_dense_fallback(case):
    w = matrix()
    got, want = READS[case](w), READS[case](w.dequantize())
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)
    assert same(w, matrix())


def test_stack_cat_and_squeeze_stay_packed():
    parts = [matrix(seed=i) for i in range(3)]
    stacked = torch.stack(parts)
    assert type(stacked) is Sparse24NVFP4Tensor
    assert torch.equal(stacked.dequantize(), torch.stack([p.dequantize() for p in parts]))
    assert all(same(c.squeeze(0), p) for c, p in zip(stacked.chunk(3), parts, strict=True))
    g = torch.tensor(0.01)
    a, b = matrix(global_scale=g), matrix(seed=1, global_scale=g)
    for dim in (0, 1):
        packed = torch.cat([a, b], dim)
        assert type(packed) is Sparse24NVFP4Tensor
        assert torch.equal(packed.dequantize(), torch.cat([a.dequantize(), b.dequantize()], dim))
    for other in (NVFP4Tensor.from_dense(torch.randn(N, K), global_scale=g), matrix(seed=2), torch.randn(N, K)):
        assert type(torch.cat([a, other])) is torch.Tensor


# --- moves, copies, state ---------------------------------------------------------------------------------------


def test_moves_and_copies():
    q = matrix()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(q.to(dtype).dequantize(), q.dequantize(dtype))
    meta = q.to("meta")
    assert all(p.is_meta for p in meta.parts())
    assert F.linear(torch.empty(5, K, device="meta"), meta).shape == (5, N)
    for make in (lambda: matrix(), lambda: matrix().t(), lambda: matrix()[8:24], lambda: matrix()[:, 32:64]):
        q = make()
        for c in (q.clone(), copy.deepcopy(q), copy.deepcopy(nn.Parameter(q, requires_grad=False))):
            assert same(c, q)
            assert not {p.untyped_storage().data_ptr() for p in c.parts()} & {p.untyped_storage().data_ptr() for p in q.parts()}
    buffer = io.BytesIO()
    torch.save({"w": matrix()}, buffer)
    buffer.seek(0)
    assert same(torch.load(buffer, weights_only=True)["w"], matrix())
    q = matrix()
    assert q.share_memory_().is_shared()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(matrix())
        assert type(fake) is Sparse24NVFP4Tensor
        assert F.linear(torch.empty(3, K), fake[:, :]).shape == (3, N)


@pytest.mark.gpu
def test_pin_memory_and_cuda():
    q = matrix()
    assert q.pin_memory().is_pinned()
    for moved in (q.cuda(), q.pin_memory().to("cuda", non_blocking=True)):
        assert all(p.is_cuda for p in moved.parts())
        assert same(moved.cpu(), q)
    x = torch.randn(5, K, device="cuda")
    torch.testing.assert_close(F.linear(x, q.cuda()).cpu(), F.linear(x.cpu(), q), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    def layer(seed):
        linear = nn.Linear(K, N)
        linear.weight = nn.Parameter(matrix(seed=seed), requires_grad=False)
        return linear

    source, target = layer(1), layer(2)
    target.load_state_dict(source.state_dict(), assign=assign)
    assert same(target.weight.data, source.weight.data)
    assert isinstance(target.weight, nn.Parameter)


def test_writes():
    q, other = matrix(), matrix(seed=1)
    q.copy_(other)
    assert same(q, other)
    g = torch.tensor(0.01)
    a, b = matrix(global_scale=g), matrix(seed=1, global_scale=g)
    a[8:24] = b[8:24]
    assert torch.equal(a.dequantize()[8:24], b.dequantize()[8:24])
    dense = NVFP4Tensor.from_dense(torch.randn(N, K))
    for write in (
        lambda: q.add_(1),
        lambda: q.copy_(torch.randn(N, K)),
        lambda: q.copy_(dense),
        lambda: dense.copy_(q),
        lambda: q.__setitem__((slice(None), slice(16, 48)), 0.0),
        lambda: setattr(q, "data", dense),
        lambda: nn.init.normal_(q),
    ):
        with torch.no_grad(), pytest.raises(errors.UnsupportedOpError, match="from_dense"):
            write()
    assert same(q, other)


def test_stable_hash_separates_what_compiles_differently():
    q, dense = matrix(), NVFP4Tensor.from_dense(torch.randn(N, K))
    assert q._stable_hash_for_caching() == matrix(seed=5)._stable_hash_for_caching()
    different = [q, q.bfloat16(), q.t(), q[8:], q[:, 32:], q.to("meta"), nn.Parameter(q), experts(), dense]
    assert len({d._stable_hash_for_caching() for d in different}) == len(different)


def test_gradients_of_activation_and_bias():
    w = matrix()
    x, b = torch.randn(5, K, requires_grad=True), torch.randn(N, requires_grad=True)
    got = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, b))
    want = torch.autograd.grad(F.linear(x, w.dequantize(), b).square().sum(), (x, b))
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-3)
    p = nn.Parameter(matrix())
    F.linear(x, p).square().sum().backward()
    assert type(p.grad) is torch.Tensor
    assert p.grad.shape == (N, K)


# --- compile and export -----------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(matrix(), requires_grad=False), nn.Parameter(torch.randn(N), requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


def test_compiled_parameter_over_many_rows():
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (3, 17, 1, 0):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), layer(x)), m


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x @ w.t(),
        lambda x, w: F.linear(x[:, 32:64], w[8:40, 32:64]),
        lambda x, w: torch.cat([F.linear(x, part) for part in w.chunk(2)], -1),
        lambda x, w: x @ (w + 1).t(),
        lambda x, w: F.linear(x, Sparse24NVFP4Tensor(*w.parts(), w.dtype)),
        lambda x, w: F.linear(x, Sparse24NVFP4Tensor.from_dense(w.dequantize() * 2, "magnitude").to(torch.float32)),
    ],
)
def test_compiled_closure(fn):
    w = matrix()
    compiled = torch.compile(lambda x: fn(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 9):
        x = torch.randn(m, K)
        torch.testing.assert_close(compiled(x), fn(x, w), rtol=1e-6, atol=1e-6)


def test_compiled_experts():
    w, ids = experts(), torch.tensor([2, 0, 1])
    compiled = torch.compile(lambda x, ids: torch.bmm(x, w[ids].mT) + F.linear(x[0], w[1]), fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(E, 5, K)
    assert torch.equal(compiled(x, ids), torch.bmm(x, w[ids].mT) + F.linear(x[0], w[1]))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    layer, x = Layer(), torch.randn(5, K)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=strict).run_decompositions()
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"] == ["fp4.sparse_linear.default"]
    assert sorted(t.dtype.itemsize for t in program.state_dict.values()) == [1, 1, 1, 4, 4]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    x = torch.randn(7, K)
    assert torch.equal(torch.export.load(buffer).module()(x), layer(x))
