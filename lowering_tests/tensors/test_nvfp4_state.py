"""NVFP4Tensor moves, is copied, saved and loaded whole; a write that has no packed form is refused, never lost."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import NVFP4Tensor, errors

N, K = 64, 96
PARTS = NVFP4Tensor.PARTS


def matrix(seed=0, **kw) -> NVFP4Tensor:
    return NVFP4Tensor.from_dense(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)), **kw)


def same(a, b) -> bool:
    """Same kind, presentation and bits."""
    bits = all(torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)) for x, y in zip(a.parts(), b.parts(), strict=True))
    return type(a) is type(b) and (a.dtype, a.shape, a.transposed) == (b.dtype, b.shape, b.transposed) and bits


def linear(w=None, bias=True) -> nn.Linear:
    layer = nn.Linear(K, N, bias=bias)
    layer.weight = nn.Parameter(matrix() if w is None else w, requires_grad=False)
    return layer


# --- moves and copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_to_dtype_changes_the_presentation_not_the_bits(dtype):
    q = matrix()
    for moved in (q.to(dtype), q.to("cpu", dtype), q.type(dtype)):
        assert moved.dtype == dtype
        assert torch.equal(moved.qdata, q.qdata)
        assert torch.equal(moved.scale.view(torch.uint8), q.scale.view(torch.uint8))
        assert moved.global_scale.dtype == torch.float32
        assert torch.equal(moved.dequantize(), q.dequantize(dtype))
    assert q.to(torch.float32) is q


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_to_a_dtype_it_cannot_present_is_a_typed_error(dtype):
    with pytest.raises(errors.DTypeError, match=r"float.*accepted.*bfloat16.*dequantize\(\).to"):
        matrix().to(dtype)


def test_to_meta_and_back_needs_values():
    meta = matrix().to("meta")
    assert (type(meta), meta.device.type, meta.shape) == (NVFP4Tensor, "meta", (N, K))
    assert all(p.is_meta for p in meta.parts())
    assert F.linear(torch.empty(5, K, device="meta"), meta).shape == (5, N)
    assert torch.empty_like(meta, device="cpu").device.type == "cpu"
    with pytest.raises(errors.DeviceError, match="one device"):
        F.linear(torch.zeros(5, K), meta)
    with pytest.raises(NotImplementedError, match="meta"):
        meta.to("cpu")


@pytest.mark.parametrize("make", [lambda: matrix(), lambda: matrix().t(), lambda: matrix().bfloat16(), lambda: matrix()[8:24], lambda: matrix()[:, 16:48]])
def test_copies_are_independent(make):
    q = make()
    for c in (q.clone(), copy.deepcopy(q), copy.deepcopy(nn.Parameter(q, requires_grad=False))):
        assert same(c, q)
        assert not {p.untyped_storage().data_ptr() for p in c.parts()} & {p.untyped_storage().data_ptr() for p in q.parts()}
    shared = copy.deepcopy({"a": q, "b": q})
    assert shared["a"] is shared["b"]


def test_deepcopy_keeps_parameters_parameters():
    p = copy.deepcopy(linear()).weight
    assert isinstance(p, nn.Parameter)
    assert not p.requires_grad


def test_save_and_load_with_safe_globals():
    for q in (matrix(), matrix().t().bfloat16(), nn.Parameter(matrix(), requires_grad=False)):
        buffer = io.BytesIO()
        torch.save({"w": q}, buffer)
        buffer.seek(0)
        back = torch.load(buffer, weights_only=True)["w"]
        assert same(back, q)
        assert isinstance(back, nn.Parameter) == isinstance(q, nn.Parameter)


def test_plain_pickle_of_float8_is_broken_in_torch_not_here():
    """pickle.loads of any float8 tensor fails in torch's storage loader; when it is repaired, this test says so."""
    with pytest.raises(AttributeError, match="UntypedStorage"):
        pickle.loads(pickle.dumps(torch.zeros(2).to(torch.float8_e4m3fn)))


def test_share_memory():
    """torch's own share_memory_ would follow the wrapper's null storage: a segmentation fault."""
    q = matrix()
    assert not q.is_shared()
    want = q.clone()
    assert q.share_memory_() is q
    assert q.is_shared()
    assert all(p.is_shared() for p in q.parts())
    assert same(q, want)
    assert linear().share_memory().weight.is_shared()


@pytest.mark.gpu
def test_pin_memory_and_cuda():
    q = matrix()
    pinned = q.pin_memory()
    assert pinned.is_pinned()
    assert not q.is_pinned()
    for moved in (q.cuda(), pinned.to("cuda", non_blocking=True), q.to("cuda", torch.bfloat16)):
        assert all(p.is_cuda for p in moved.parts())
        assert torch.equal(moved.cpu().qdata, q.qdata)
    x = torch.randn(5, K, device="cuda")
    torch.testing.assert_close(F.linear(x, q.cuda()).cpu(), F.linear(x.cpu(), q), rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.DeviceError, match="cuda"):
        F.linear(x, q)
    with pytest.raises(errors.DeviceError, match="cuda"):
        NVFP4Tensor(q.qdata, q.scale.cuda(), q.global_scale)


def test_fake_tensor_mode():
    q = matrix()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert type(fake) is NVFP4Tensor
        assert F.linear(torch.empty(3, K), fake).shape == (3, N)
        assert fake[:, 16:48].shape == (N, 32)
        assert (fake + 1).shape == (N, K)
        assert repr(fake) == repr(q)


def test_modules_move_as_a_whole():
    layer = linear()
    assert layer.half().weight.dtype == torch.float16
    assert layer.bias.dtype == torch.float16
    assert isinstance(layer.weight, nn.Parameter)
    assert layer(torch.randn(3, K).half()).dtype == torch.float16
    meta = linear().to("meta")
    assert meta.weight.is_meta
    assert type(meta.to_empty(device="cpu").weight.data) is NVFP4Tensor
    before = linear()
    with pytest.raises(errors.DTypeError, match="float64"):
        before.double()
    assert same(before.weight, linear().weight)
    assert sum(p.numel() for p in linear().parameters()) == N * K + N


# --- state_dict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    source, target = linear(matrix(1)), linear(matrix(2))
    old = target.weight
    target.load_state_dict(source.state_dict(), assign=assign)
    assert same(target.weight, source.weight)
    assert isinstance(target.weight, nn.Parameter)
    assert (target.weight is old) == (not assign)
    x = torch.randn(3, K)
    assert torch.equal(target(x), source(x))


def test_state_dict_into_a_meta_model():
    with torch.device("meta"):
        target = nn.Linear(K, N)
    target.load_state_dict(linear().state_dict(), assign=True)
    assert same(target.weight, linear().weight)


def test_a_dense_checkpoint_is_refused_and_changes_nothing():
    target = linear()
    with pytest.raises(RuntimeError, match=r"weight.*copy_ into a NVFP4Tensor of shape \(64, 96\).*got Tensor.*from_dense"):
        target.load_state_dict(nn.Linear(K, N).state_dict())
    assert same(target.weight, linear().weight)


def test_a_packed_checkpoint_into_a_dense_layer_is_dequantised():
    target = nn.Linear(K, N)
    target.load_state_dict(linear().state_dict())
    assert type(target.weight.data) is torch.Tensor
    assert torch.equal(target.weight, linear().weight.dequantize())


def test_tied_weights_stay_tied():
    a, b = linear(bias=False), nn.Linear(K, N, bias=False)
    b.weight = a.weight
    both = nn.ModuleList([a, b])
    for moved in (copy.deepcopy(both), both.to(torch.bfloat16)):
        assert moved[0].weight is moved[1].weight
    assert len(list(both.parameters())) == 1


# --- writes -----------------------------------------------------------------------------------------------------


def test_copy_of_the_same_kind():
    q, other = matrix(1), matrix(2)
    pointers = [p.data_ptr() for p in q.parts()]
    assert q.copy_(other) is q
    assert same(q, other)
    assert [p.data_ptr() for p in q.parts()] == pointers
    q.t().copy_(matrix(3).t())
    assert same(q, matrix(3))
    shared = torch.tensor(0.01)
    a, b = matrix(1, global_scale=shared), matrix(2, global_scale=shared)
    a[8:24] = b[8:24]
    assert torch.equal(a.dequantize()[8:24], b.dequantize()[8:24])
    assert torch.equal(a.dequantize()[24:], matrix(1, global_scale=shared).dequantize()[24:])
    experts = NVFP4Tensor.from_dense(torch.randn(3, N, K))
    experts[1] = q
    assert torch.equal(experts[1].dequantize(), q.dequantize())


@pytest.mark.parametrize("part", [lambda q: q[8:24], lambda q: q[:, 16:48], lambda q: q.t()[16:48]])
def test_copy_into_a_part_must_not_rescale_the_rest(part):
    q, other = matrix(1), matrix(2)
    assert q.global_scale != other.global_scale
    with pytest.raises(errors.UnsupportedOpError, match=r"global scale of the rest; got .*; accepted: .*global_scale=whole"):
        part(q).copy_(part(other))
    assert same(q, matrix(1))


def test_copy_into_an_expert_brings_its_own_global_scale():
    whole = torch.randn(3, N, K) * torch.tensor([1.0, 0.1, 9.0])[:, None, None]
    experts, other = NVFP4Tensor.from_dense(whole), NVFP4Tensor.from_dense(whole.flip(0))
    want = torch.stack([experts[0].dequantize(), other[1].dequantize(), other[2].dequantize()])
    experts[1:] = other[1:]
    assert torch.equal(experts.dequantize(), want)


def test_data_of_the_same_kind():
    q, other = matrix(1), matrix(2)
    q.data = other
    assert same(q, other)
    assert torch.equal(F.linear(torch.eye(K), q), F.linear(torch.eye(K), other))
    assert same(q.data, other)


D = torch.randn(N, K)
WRITES = {
    "add_": lambda q: q.add_(1),
    "mul_ by a tensor": lambda q: q.mul_(D),
    "mul_ by a negative number": lambda q: q.mul_(-2),
    "mul_ by zero": lambda q: q.mul_(0),
    "mul_ out of range": lambda q: q.mul_(1e39),
    "div_ of some rows": lambda q: q[8:].div_(2),
    "zero_": lambda q: q.zero_(),
    "fill_": lambda q: q.fill_(1),
    "normal_": lambda q: nn.init.normal_(q),
    "kaiming": lambda q: nn.init.kaiming_uniform_(q),
    "clamp_": lambda q: q.clamp_(0, 1),
    "copy_ from dense": lambda q: q.copy_(D),
    "copy_ of another shape": lambda q: q.copy_(matrix()[8:]),
    "copy_ from the transposed": lambda q: q[:, :64].copy_(matrix()[:, :64].t()),
    "out=": lambda q: torch.add(D, D, out=q),
    "foreach": lambda q: torch._foreach_mul_([q], 2.0),
    "index_put_": lambda q: q.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "masked_fill_": lambda q: q.masked_fill_(D > 0, 0.0),
    "row = number": lambda q: q.__setitem__(0, 1.0),
    "element = number": lambda q: q.__setitem__((0, 1), 1.0),
    "rows = number": lambda q: q.__setitem__(slice(0, 2), 0.0),
    "rows = dense": lambda q: q.__setitem__(slice(0, 2), D[:2]),
    "columns off blocks": lambda q: q.__setitem__((slice(None), slice(3, 9)), 0.0),
    "mask": lambda q: q.__setitem__(D > 0, 0.0),
    "slice.zero_": lambda q: q[1:3].zero_(),
    "resize_": lambda q: q.resize_(3, 3),
    "set_": lambda q: q.set_(D),
    "t_": lambda q: q.t_(),
    "data": lambda q: setattr(q, "data", D),
    "data of another shape": lambda q: setattr(q, "data", matrix()[8:]),
    "data of another dtype": lambda q: setattr(q, "data", matrix().bfloat16()),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_write_without_a_packed_form_is_refused_and_changes_nothing(case):
    q = matrix()
    with torch.no_grad(), pytest.raises(errors.UnsupportedOpError, match=r"NVFP4Tensor.*; got .*; accepted: .*(from_dense|from_dense\(\))"):
        WRITES[case](q)
    assert same(q, matrix())
    assert (q.shape, q.dtype) == ((N, K), torch.float32)


@pytest.mark.parametrize("factor", [0.25, 3, torch.tensor(0.5)], ids=str)
def test_a_positive_number_scales_in_place(factor):
    """What RWKV does to its layers before it generates; the global scale takes it, in the tensors that a layer holds."""
    q, want = matrix(), matrix()
    parts = q.parts()
    with torch.no_grad():
        assert q.mul_(factor) is q
        assert all(a is b for a, b in zip(q.parts(), parts, strict=True))
        assert torch.equal(q.global_scale, want.global_scale * factor)
        assert torch.equal(q.scale.view(torch.uint8), want.scale.view(torch.uint8))
        q.div_(factor)
    torch.testing.assert_close(q.global_scale, want.global_scale, rtol=2.0**-22, atol=0)


# --- torch's cache key ------------------------------------------------------------------------------------------


def test_stable_hash_separates_what_compiles_differently():
    q = matrix()
    assert q._stable_hash_for_caching() == matrix(5)._stable_hash_for_caching()
    different = [
        q,
        q.bfloat16(),
        q.t(),
        q[8:],
        q[:, 16:],
        q[:, :16],
        q.to("meta"),
        nn.Parameter(q),  # requires grad: a graph without its gradient must not be reused
        NVFP4Tensor.from_dense(torch.randn(2, N, K)),
    ]
    assert len({d._stable_hash_for_caching() for d in different}) == len(different)
