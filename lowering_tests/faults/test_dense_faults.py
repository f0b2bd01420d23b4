"""Bad, empty and extreme dense weights, eager and compiled: the right answer or a typed error."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Tensor, errors
from fp4_inductor.formats import nvfp4

N, K = 33, 80


def layer_of(n=N, k=K, dtype=torch.float32) -> FP4Linear:
    return FP4Linear.from_weight(torch.randn(n, k).to(dtype) / k**0.5, torch.randn(n).to(dtype))


def doors(layer: FP4Linear):
    """The ways to multiply by one weight."""
    return {
        "FP4Linear": layer,
        "F.linear": lambda x: F.linear(x, layer.weight, layer.bias),
        "op": lambda x: torch.ops.fp4.linear(x, *layer.weight.parts(), layer.bias),
        "compiled": torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager"),
    }


def expect(layer: FP4Linear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.double(), layer.dequantize(torch.float32).double(), layer.bias.double())


# --- non-contiguous, strided, offset input ----------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 3, 20])
def test_views_of_the_activation_give_the_bits_of_the_copy(m):
    layer = layer_of()
    store = torch.randn(2 * m + 5, 2 * K + 7)
    views = [store[3 : 3 + m, 5 : 5 + K], store[:m, : 2 * K : 2], store[1 : 2 * m : 2, 7 : 7 + K], store.t()[:K, :m].t(), store[:1, :K].expand(m, K)]
    for name, door in doors(layer).items():
        for x in views:
            assert x.shape == (m, K)
            assert torch.equal(door(x), door(x.clone(memory_format=torch.contiguous_format))), name


# --- off-tile and empty sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 15, 16, 17, 31, 48, 100, 272])
@pytest.mark.parametrize("n", [1, 7, 130])
def test_off_tile_sizes_are_padded_inside(n, k):
    layer = layer_of(n, k)
    for m in (1, 2, 9, 33):
        x = torch.randn(m, k)
        torch.testing.assert_close(layer(x), expect(layer, x).float(), rtol=1e-4, atol=1e-4)


def test_a_tensor_with_k_off_its_block_is_refused_with_the_remedy():
    with pytest.raises(errors.ShapeError, match=r"\(33, 90\); accepted: .*K % 16 == 0. Pad K"):
        NVFP4Tensor.from_dense(torch.randn(N, 90))


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("k", [0, 16])
def test_empty_sizes_have_a_result(m, n, k):
    x = torch.randn(m, k)
    layer = FP4Linear.from_weight(torch.randn(n, k), torch.randn(n))
    for name, door in doors(layer).items():
        assert torch.allclose(door(x), expect(layer, x).float(), atol=1e-5), name
        assert door(x).shape == (m, n)


# --- NaN, Inf, zeros, saturation --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_weight_is_named_with_its_layer_and_nothing_changes(bad):
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    model[2].weight.data[3, 4] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(errors.FP4Error, match=r"(?s)2\b.*(NaN|Inf|finite)"):
        fp4_inductor.quantize_model(model, progress=False)
    assert [type(m) for m in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert all(torch.equal(before[k].view(torch.int32), v.view(torch.int32)) for k, v in model.state_dict().items())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("m", [2, 9, 20])
def test_a_non_finite_activation_row_stays_alone_through_every_door(bad, m):
    layer = layer_of(N, 90)  # K is padded: the padding must not spread it either
    x = torch.randn(m, 90)
    dirty = x.clone()
    dirty[1] = bad
    for door in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        got, clean = door(dirty), door(x)
        keep = torch.arange(m) != 1
        assert torch.equal(got[keep], clean[keep])
        assert not torch.isfinite(got[1]).any()


def test_zero_weights_give_exact_zeros_and_no_nan_scale():
    for w in (torch.zeros(N, K), torch.cat([torch.zeros(16, K), torch.randn(17, K)]), -torch.zeros(N, K)):
        for search in ("amax", "four_over_six", "mse"):
            layer = FP4Linear.from_weight(w, scale_search=search)
            zero_rows = (w == 0).all(-1)
            assert not layer.dequantize()[zero_rows].any()
            assert not layer(torch.full((3, K), 1e30))[:, zero_rows].any()
            assert (layer.scale.view(torch.uint8) < 0x7F).all()
    experts = NVFP4Tensor.from_dense(torch.stack([torch.zeros(N, K), torch.randn(N, K)]))
    y = torch.randn(2, 3, K) @ experts.mT
    assert not y[0].any()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("search", ["amax", "four_over_six", "mse"])
def test_the_largest_weights_stay_finite(dtype, search):
    w = torch.full((4, 64), torch.finfo(dtype).max, dtype=dtype) * torch.tensor([1.0, -1.0, 0.87, 0.55], dtype=dtype)[:, None]
    w[:, ::3] /= 7
    q = NVFP4Tensor.from_dense(w, search)
    assert torch.isfinite(q.dequantize()).all()
    assert not (q.scale.view(torch.uint8) >= 0x7F).any()


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "qdata", "scale", "global_scale", "bias"])
def test_every_pair_of_devices_is_refused(name):
    layer = layer_of()
    args = {"x": torch.randn(3, K), "qdata": layer.qdata, "scale": layer.scale, "global_scale": layer.global_scale, "bias": layer.bias}
    args[name] = args[name].to("meta")
    with pytest.raises(errors.DeviceError, match=r"meta.*one device.*\.to\(device\)"):
        torch.ops.fp4.linear(*args.values())


def test_a_layer_of_another_device_is_refused():
    layer = layer_of()
    with pytest.raises(errors.DeviceError, match=r"cpu.*meta.*Move"):
        layer(torch.randn(3, K, device="meta"))
    with pytest.raises(errors.DeviceError, match=r"cpu.*meta.*Move"):
        copy.deepcopy(layer).to("meta")(torch.randn(3, K))
    with pytest.raises(errors.DeviceError, match=r"memory.*Load"):
        nvfp4.quantize(torch.randn(N, K, device="meta"))


def test_an_offloaded_model_comes_back_with_its_bits():
    model = nn.Sequential(layer_of(48, 32), nn.ReLU(), layer_of(16, 48))
    x, state = torch.randn(5, 32), model.state_dict()
    want = model(x)
    away = copy.deepcopy(model).to("meta")
    away.load_state_dict(state, assign=True)
    assert torch.equal(away(x), want)
    assert torch.equal(copy.deepcopy(model).bfloat16().float()[0].weight.dequantize(), model[0].weight.dequantize())


# --- determinism, autocast, gradients ---------------------------------------------------------------------------


def test_deterministic_algorithms_are_honoured():
    layer, x = layer_of(), torch.randn(20, K)
    want = {name: door(x) for name, door in doors(layer).items()}
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: an unwritten output shows
    try:
        for name, door in doors(layer).items():
            assert torch.equal(door(x), want[name]), name
        q = NVFP4Tensor.from_dense(torch.randn(3, N, K))
        y = torch.randn(3, 5, K) @ q.mT
        assert torch.isfinite(y).all()
        assert torch.isfinite(q.dequantize()).all()
        x.requires_grad_()
        layer(x).sum().backward()
        assert torch.isfinite(x.grad).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_hundred_forward_passes_have_one_hash():
    for m in (1, 7, 33):
        layer, x = layer_of(dtype=torch.bfloat16), torch.randn(m, K).bfloat16()
        for name, door in doors(layer).items():
            assert len({door(x).view(torch.uint8).numpy().tobytes() for _ in range(100)}) == 1, name


def test_autocast_is_one_rule_for_every_door():
    layer, x = layer_of(), torch.randn(5, K)
    with torch.autocast("cpu", torch.bfloat16):
        results = [doors(layer)[name](x) for name in ("FP4Linear", "F.linear", "compiled")]
    assert all(r.dtype == torch.bfloat16 for r in results)
    assert all(torch.equal(r, results[0]) for r in results)


def test_no_gradient_is_ever_silently_none():
    layer = layer_of()
    layer.bias.requires_grad_()
    for name, door in doors(layer).items():
        x = torch.randn(5, K, requires_grad=True)
        layer.bias.grad = None
        door(x).square().sum().backward()
        assert x.grad is not None, name
        assert layer.bias.grad is not None, name
    g = layer.global_scale.clone().requires_grad_()
    with pytest.raises(errors.UnsupportedOpError, match="fp4.linear has no gradient for global_scale"):
        torch.ops.fp4.linear(torch.randn(5, K), layer.qdata, layer.scale, g)
