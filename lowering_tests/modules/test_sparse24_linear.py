"""Sparse24Linear is an FP4Linear: buffers, casts, padding to 32, state_dict, both doors, compile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, Sparse24Linear, Sparse24NVFP4Tensor, errors, explain
from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.models.convert import share
from fp4_inductor.models.rounding_error import relative_error
from fp4_inductor.modules import BY_STORAGE

N, K = 64, 96
PARTS = Sparse24NVFP4Tensor.PARTS


def bits(layer) -> list[bytes]:
    return [getattr(layer, name).reshape(-1).view(torch.uint8).numpy().tobytes() for name in PARTS]


def dense(n=N, k=K, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)


def make(n=N, k=K, bias=True, dtype=torch.float32, seed=0, **options) -> Sparse24Linear:
    w, b = dense(n, k, dtype, seed)
    padded = F.pad(w, (0, -k % 4))
    return Sparse24Linear.from_weight(w, b if bias else None, mask=sparse24.magnitude_mask(padded)[:, :k], **options)


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
def test_buffers(dtype):
    layer = make(dtype=dtype)
    want = {
        "values": ((N, K // 4), torch.uint8),
        "meta": ((N, K // 8), torch.uint8),
        "scale": ((N, K // 16), torch.float8_e4m3fn),
        "global_scale": ((), torch.float32),
    }
    want["bias"] = ((N,), dtype)
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.named_buffers()} == want
    assert sum(p.numel() for p in layer.parameters()) == 0
    assert "sparse24_nvfp4" in repr(layer)
    assert isinstance(layer, FP4Linear)
    assert BY_STORAGE[layer.storage().name] is Sparse24Linear
    fresh = Sparse24Linear(K, N, True, dtype=dtype)
    sparse24.validate_meta(fresh.meta)
    assert not fresh(torch.randn(3, K).to(dtype)).any()
    assert not fresh.weight.dequantize().any()


@pytest.mark.parametrize("dtype", nvfp4.HIGH_PRECISION)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (17,), (2, 3)])
def test_both_doors_have_the_same_bits(dtype, lead):
    layer, x = make(dtype=dtype), torch.randn(*lead, K).to(dtype)
    assert type(layer.weight) is Sparse24NVFP4Tensor
    assert [p.data_ptr() for p in layer.weight.parts()] == [p.data_ptr() for p in layer.parts()]
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert layer(x).shape == (*lead, N)
    if x.numel():
        want = F.linear(x.double(), layer.dequantize(torch.float32).double(), layer.bias.double())
        assert float((layer(x).double() - want).norm() / want.norm()) < 8e-3


@pytest.mark.parametrize("k", [1, 15, 33, 40, 95])
def test_padding(k):
    w, b = dense(k=k)
    layer = make(k=k)
    assert (layer.in_features, layer.padding, tuple(layer.values.shape)) == (k, -k % 32, (N, (k + -k % 32) // 4))
    mask = sparse24.magnitude_mask(F.pad(w, (0, -k % 4)))[:, :k]
    assert float((layer.dequantize() - w * mask).norm() / (w * mask).norm()) < 0.13
    x = torch.randn(5, k)
    torch.testing.assert_close(layer(x), F.linear(x, layer.dequantize(), b), rtol=1e-4, atol=1e-4)
    existing = Sparse24Linear.from_weight(w * mask, b)
    assert torch.equal(existing(x), layer(x))
    assert torch.equal(layer.weight, layer.dequantize()) if layer.padding else isinstance(layer.weight, Sparse24NVFP4Tensor)
    calibrated = make(k=k, scale_search="activation", channel_weight=torch.rand(k) + 0.1)
    assert calibrated.dequantize().shape == (N, k)


def test_casts_and_copies_keep_the_bits():
    layer = make()
    before = bits(layer)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        moved = copy.deepcopy(layer).to(dtype)
        assert bits(moved) == before
        assert moved.bias.dtype == moved.dtype == dtype
        assert moved(torch.randn(3, K).to(dtype)).dtype == dtype
    for wrong in (torch.float64, torch.int8):
        with pytest.raises((errors.DTypeError, TypeError)):
            copy.deepcopy(layer).to(wrong)
    assert all(t.is_meta for t in copy.deepcopy(layer).to("meta").state_dict().values())
    twin = share(layer)
    assert type(twin) is Sparse24Linear
    assert twin.meta is layer.meta


def test_state_dict_is_validated():
    layer, other = make(), make(seed=1)
    layer.load_state_dict(other.state_dict())
    assert bits(layer) == bits(other)
    good = make(seed=2).state_dict()
    bad = dict(good, meta=torch.full_like(good["meta"], 0x43))
    with pytest.raises(errors.SparsityError, match="0x43"):
        layer.load_state_dict(bad)
    with pytest.raises(errors.DTypeError, match="scale in the state_dict"):
        layer.load_state_dict(dict(good, scale=good["scale"].view(torch.uint8)))
    assert bits(layer) == bits(other)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict(make(n=32, seed=2).state_dict())


def test_bad_weights():
    w, b = dense()
    mask = sparse24.magnitude_mask(w)
    for error, call in (
        (errors.SparsityError, lambda: Sparse24Linear.from_weight(w)),
        (errors.SparsityError, lambda: Sparse24Linear.from_weight(w, mask=torch.ones_like(mask))),
        (errors.SparsityError, lambda: Sparse24Linear.from_weight(w[:, :40], mask=torch.ones(N, 40, dtype=torch.bool))),
        (errors.ShapeError, lambda: Sparse24Linear.from_weight(w, b[:-1], mask=mask)),
        (errors.ShapeError, lambda: Sparse24Linear.from_weight(w[None], mask=mask[None])),
        (errors.ShapeError, lambda: Sparse24Linear.from_weight(w, mask=mask[:-1])),
        (errors.NonFiniteError, lambda: Sparse24Linear.from_weight(w / 0, mask=mask)),
        (errors.ConfigError, lambda: Sparse24Linear(K, N, prefill="fp4")),
        (errors.DTypeError, lambda: Sparse24Linear(K, N, dtype=torch.float64)),
    ):
        with pytest.raises(error, match=r"; got .*; accepted: "):
            call()


def test_relative_error_counts_what_was_pruned():
    w, _ = dense()
    layer, plain = make(), FP4Linear.from_weight(w)
    assert relative_error(w, plain) < 0.12 < 0.3 < relative_error(w, layer) < 0.5
    want = float((layer.dequantize(torch.float32).double() - w.double()).norm() / w.double().norm())
    assert abs(relative_error(w, layer) - want) < 1e-6


def test_compiled_and_explained():
    model = nn.Sequential(make(dtype=torch.bfloat16), make(n=32, k=64, dtype=torch.bfloat16, seed=1))
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for m in (5, 12, 1):
        x = torch.randn(m, K).bfloat16()
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    for target in (model, compiled):
        rows = explain(target, torch.randn(5, K).bfloat16()).rows
        assert [(r.op, r.n, r.k, r.regime, r.kernel) for r in rows] == [("fp4.sparse_linear", n, k, "cpu", "cpu") for n, k in ((64, 96), (32, 64))]
        assert all("C kernels" in r.note or "ATen path" in r.note for r in rows)
