"""FP4Linear as an nn.Module: buffers, casts, moves, state_dict, padding of K, and the same bits as an NVFP4Tensor weight."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, NVFP4Tensor, errors
from fp4_inductor.formats import nvfp4

N, K = 64, 96
PACKED = ("qdata", "scale", "global_scale")


def bits(layer: FP4Linear) -> list[bytes]:
    return [getattr(layer, name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in PACKED]


def make(n=N, k=K, bias=True, dtype=torch.float32, seed=0, **options) -> FP4Linear:
    g = torch.Generator().manual_seed(seed)
    w, b = torch.randn(n, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
    return FP4Linear.from_weight(w, b if bias else None, **options)


# --- what it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_buffers(bias, dtype):
    layer = make(bias=bias, dtype=dtype)
    want = {"qdata": ((N, K // 2), torch.uint8), "scale": ((N, K // 16), torch.float8_e4m3fn), "global_scale": ((), torch.float32)}
    want |= {"bias": ((N,), dtype)} if bias else {}
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.named_buffers()} == want
    assert sum(p.numel() for p in layer.parameters()) == 0
    assert (layer.in_features, layer.out_features, layer.dtype, layer.bias is not None) == (K, N, dtype, bias)
    assert "nvfp4" in repr(layer)
    fresh = FP4Linear(K, N, bias, dtype=dtype)
    assert {name: (tuple(t.shape), t.dtype) for name, t in fresh.named_buffers()} == want
    assert not fresh(torch.randn(3, K).to(dtype)).any()


def test_from_weight_copies_and_leaves_the_source():
    source = nn.Linear(K, N)
    before = copy.deepcopy(source.state_dict())
    layer = FP4Linear.from_weight(source.weight, source.bias, prefill="bf16")
    assert all(torch.equal(before[k], v) for k, v in source.state_dict().items())
    assert layer.bias.data_ptr() != source.bias.data_ptr()
    assert not layer.bias.requires_grad
    assert layer.prefill == "bf16"
    torch.testing.assert_close(layer(torch.eye(K)), source(torch.eye(K)), rtol=0, atol=0.03)


@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
def test_scale_search_reaches_the_format(search):
    w, g = torch.randn(N, K), torch.tensor(0.01)
    layer = FP4Linear.from_weight(w, scale_search=search, global_scale=g)
    assert torch.equal(layer.dequantize(), nvfp4.dequantize(*nvfp4.quantize(w, search, g), torch.float32))


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (5,), (17,), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_both_doors_have_the_same_bits(dtype, lead, bias):
    layer = make(bias=bias, dtype=dtype)
    x = torch.randn(*lead, K).to(dtype)
    q = NVFP4Tensor(layer.qdata, layer.scale, layer.global_scale, dtype)
    assert torch.equal(layer(x), F.linear(x, q, layer.bias))
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer(x).shape == (*lead, N)


def test_weight_shares_memory():
    layer = make(dtype=torch.bfloat16)
    w = layer.weight
    assert (type(w), w.shape, w.dtype) == (NVFP4Tensor, (N, K), torch.bfloat16)
    assert [getattr(w, n).data_ptr() for n in PACKED] == [getattr(layer, n).data_ptr() for n in PACKED]
    assert torch.equal(w.dequantize(), layer.dequantize())
    assert layer.dequantize(torch.float32).dtype == torch.float32
    w.copy_(make(seed=1, dtype=torch.bfloat16).weight)
    assert bits(layer) == bits(make(seed=1, dtype=torch.bfloat16))


# --- K that is not a multiple of 16 -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 15, 17, 40, 95])
@pytest.mark.parametrize("search", ["amax", "mse"])
def test_padding(k, search):
    w, b = torch.randn(N, k), torch.randn(N)
    layer = FP4Linear.from_weight(w, b, scale_search=search)
    assert (layer.in_features, layer.padding, layer.qdata.shape) == (k, -k % 16, (N, math.ceil(k / 16) * 8))
    assert layer.dequantize().shape == (N, k)
    assert float((layer.dequantize() - w).norm() / w.norm()) < 0.12
    whole = nvfp4.dequantize(layer.qdata, layer.scale, layer.global_scale, torch.float32)
    assert not whole[:, k:].any()
    for lead in ((5,), (), (2, 3), (0,)):
        x = torch.randn(*lead, k)
        torch.testing.assert_close(layer(x), F.linear(x, layer.dequantize(), b), rtol=1e-4, atol=1e-4)
    fresh = FP4Linear(k, N, True, dtype=torch.float32)
    fresh.load_state_dict(layer.state_dict())
    assert bits(fresh) == bits(layer)
    assert copy.deepcopy(layer).padding == layer.padding


def test_padding_with_calibration():
    w, weight = torch.randn(N, 40), torch.rand(40) + 0.1
    layer = FP4Linear.from_weight(w, scale_search="activation", channel_weight=weight)
    plain = FP4Linear.from_weight(w, scale_search="mse")
    assert (((layer.dequantize() - w) ** 2) * weight).sum() < (((plain.dequantize() - w) ** 2) * weight).sum()


def test_a_padded_weight_is_decoded():
    layer = make(k=40)
    assert layer.weight.shape == (N, 40) and layer.weight.dtype == layer.dtype and torch.equal(layer.weight, layer.dequantize())


# --- casts and moves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.float(), torch.float32),
        (lambda m: m.to(torch.float16), torch.float16),
        (lambda m: m.to("cpu", torch.bfloat16), torch.bfloat16),
        (lambda m: m.to(torch.zeros(1, dtype=torch.float16)), torch.float16),
    ],
)
def test_a_cast_changes_the_dtype_and_keeps_the_bits(cast, dtype):
    layer, want = make(), bits(make())
    model = nn.Sequential(layer)
    cast(model)
    assert bits(layer) == want
    assert [getattr(layer, n).dtype for n in PACKED] == [torch.uint8, torch.float8_e4m3fn, torch.float32]
    assert (layer.dtype, layer.bias.dtype, layer.weight.dtype) == (dtype, dtype, dtype)
    x = torch.randn(3, K).to(dtype)
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("cast", [lambda m: m.double(), lambda m: m.to(torch.float64), lambda m: m.type(torch.float16), lambda m: m.type(torch.int8)])
def test_a_cast_it_cannot_follow_is_refused_before_anything_changes(cast):
    layer, fresh = make(), make()
    with pytest.raises(errors.DTypeError, match=r"FP4Linear.*; got .*; accepted: .*dequantize\(\)"):
        cast(layer)
    assert bits(layer) == bits(fresh)
    assert torch.equal(layer.bias, fresh.bias)
    assert (layer.bias.dtype, layer.dtype) == (torch.float32, torch.float32)


def test_an_activation_of_another_dtype_is_computed_in_its_own():
    """As Autocast would: the bias follows the activation; float64 and integers are refused."""
    layer = make()
    assert layer(torch.randn(3, K).bfloat16()).dtype == torch.bfloat16
    for bad in (torch.randn(3, K).double(), torch.ones(3, K, dtype=torch.int64)):
        with pytest.raises(errors.DTypeError, match=r"activation dtype; got torch\.(float64|int64); accepted"):
            layer(bad)


def test_an_activation_of_another_width_is_refused():
    for layer in (make(), make(k=90)):
        with pytest.raises(errors.ShapeError, match=r"disagree on K; got x \(3, "):
            layer(torch.randn(3, 64))


def test_meta_and_to_empty():
    meta = make().to("meta")
    assert all(t.is_meta for t in meta.state_dict().values())
    assert [t.dtype for t in meta.state_dict().values()] == [t.dtype for t in make().state_dict().values()]
    assert meta(torch.empty(5, K, device="meta")).shape == (5, N)
    with torch.device("meta"):
        assert FP4Linear(K, N, True).qdata.is_meta
    empty = meta.to_empty(device="cpu")
    assert [(t.shape, t.dtype, t.device.type) for t in empty.state_dict().values()] == [(t.shape, t.dtype, "cpu") for t in make().state_dict().values()]
    empty.load_state_dict(make().state_dict())
    assert bits(empty) == bits(make())
    with pytest.raises(NotImplementedError, match="meta"):
        make().to("meta").to("cpu")


def test_deepcopy_is_independent():
    layer = make()
    twin = copy.deepcopy(layer)
    twin.qdata.zero_()
    twin.bias.zero_()
    assert bits(layer) == bits(make())
    assert layer.bias.any()


def test_share_memory():
    layer = make().share_memory()
    assert all(t.is_shared() for t in layer.buffers())
    assert bits(layer) == bits(make())


def test_submodules_and_other_buffers_follow():
    """Adapters hang themselves onto layers."""
    layer = make()
    layer.adapter = nn.Linear(K, N)
    layer.register_buffer("steps", torch.zeros(3))
    layer.half()
    assert (layer.adapter.weight.dtype, layer.steps.dtype) == (torch.float16, torch.float16)
    assert layer.scale.dtype == torch.float8_e4m3fn


@pytest.mark.gpu
def test_cuda_and_back():
    layer, x = make(), torch.randn(5, K)
    want = layer(x)
    layer.cuda()
    assert all(t.is_cuda for t in layer.state_dict().values())
    torch.testing.assert_close(layer(x.cuda()).cpu(), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(errors.DeviceError, match=r"cpu.*cuda"):
        layer(x)
    assert bits(layer.cpu()) == bits(make())


# --- state_dict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(assign):
    source, target = make(seed=1), make(seed=2)
    pointer = target.qdata.data_ptr()
    target.load_state_dict(source.state_dict(), assign=assign)
    assert bits(target) == bits(source)
    assert torch.equal(target.bias, source.bias)
    assert (target.qdata.data_ptr() == pointer) == (not assign)


def test_load_state_dict_onto_meta():
    target = make().to("meta")
    target.load_state_dict(make(seed=1).state_dict(), assign=True)
    assert bits(target) == bits(make(seed=1))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", lambda t: t.view(torch.uint8)), ("scale", lambda t: t.float()), ("qdata", lambda t: t.view(torch.int8)), ("global_scale", lambda t: t.double())],
)
def test_a_state_dict_of_another_dtype_is_refused(name, value, assign):
    """copy_ would convert scale bytes to the numbers 0 to 255."""
    model = nn.Sequential(make())
    state = model.state_dict()
    state[f"0.{name}"] = value(state[f"0.{name}"])
    with pytest.raises(errors.DTypeError, match=rf"0\.{name} in the state_dict.*; got torch.*; accepted: torch.*view\(dtype\)"):
        model.load_state_dict(state, assign=assign)
    assert bits(model[0]) == bits(make())


def test_a_state_dict_of_another_shape_or_a_dense_one_is_refused():
    layer = make()
    with pytest.raises(RuntimeError, match="size mismatch for qdata"):
        layer.load_state_dict(make(n=32).state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*qdata.*weight is a dense weight"):
        layer.load_state_dict(nn.Linear(K, N).state_dict())
    assert bits(layer) == bits(make())


# --- training and autocast --------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [K, 90])
def test_gradients_flow_through(k):
    layer = make(k=k)
    layer.bias.requires_grad_()
    before, x = nn.Linear(7, k), torch.randn(5, 7)
    loss = layer(before(x)).square().mean()
    got = torch.autograd.grad(loss, (*before.parameters(), layer.bias))
    bias = layer.bias.detach().requires_grad_()
    want = torch.autograd.grad(F.linear(before(x), layer.dequantize(), bias).square().mean(), (*before.parameters(), bias))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_trainable_scale_is_refused():
    layer = make()
    layer.global_scale.requires_grad_()
    with pytest.raises(errors.UnsupportedOpError, match="no gradient for global_scale"):
        layer(torch.randn(3, K))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer, x = make(), torch.randn(5, K)
    with torch.autocast("cpu", dtype):
        got = layer(x)
        assert got.dtype == dtype
        with pytest.raises(errors.DTypeError, match="float64"):
            layer(x.double())
    assert torch.equal(got, layer(x.to(dtype)))
    with torch.autocast("cpu", dtype, enabled=False):
        assert layer(x).dtype == torch.float32


# --- refusals ---------------------------------------------------------------------------------------------------


def test_bad_weights_are_typed():
    with pytest.raises(errors.ShapeError, match=r"\(2, 3, 32\).*\[N, K\]"):
        FP4Linear.from_weight(torch.randn(2, 3, 32))
    with pytest.raises(errors.DTypeError, match="float64"):
        FP4Linear.from_weight(torch.randn(N, K).double())
    for bad in (math.nan, math.inf):
        w = torch.randn(N, K)
        w[3, 4] = bad
        with pytest.raises(errors.NonFiniteError, match=f"1 of {N * K}"):
            FP4Linear.from_weight(w)


def test_bad_arguments_are_typed():
    w = torch.randn(N, K)
    with pytest.raises(errors.ShapeError, match=r"bias.*\(3,\); accepted: \(64,\)"):
        FP4Linear.from_weight(w, torch.randn(3))
    with pytest.raises(errors.DeviceError, match=r"bias.*meta; accepted: cpu"):
        FP4Linear.from_weight(w, torch.randn(N, device="meta"))
    with pytest.raises(errors.ConfigError, match=r"prefill; got 'fp4'; accepted: \['auto'"):
        FP4Linear.from_weight(w, prefill="fp4")
    with pytest.raises(errors.DTypeError, match=r"float64; accepted"):
        FP4Linear(K, N, dtype=torch.float64)


@pytest.mark.parametrize(("k", "n"), [(0, 8), (32, 0), (0, 0)])
def test_empty_layers(k, n):
    layer = FP4Linear.from_weight(torch.randn(n, k), torch.randn(n))
    x = torch.randn(3, k)
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantize(), layer.bias))
