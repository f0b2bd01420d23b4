"""read_sparse24 and write_sparse24: other projects' tensors as a weight that multiplies, and back, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor import Sparse24Linear, Sparse24NVFP4Tensor, errors, read_sparse24, write_sparse24

N, K = 24, 64


def weight(*lead: int, power: float | None = None) -> Sparse24NVFP4Tensor:
    g = None if power is None else torch.full(lead, power)
    return Sparse24NVFP4Tensor.from_dense(torch.randn(*lead, N, K, dtype=torch.bfloat16), "magnitude", global_scale=g)


def bits(w: Sparse24NVFP4Tensor) -> list[bytes]:
    return [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in w.parts()]


def same(a: Sparse24NVFP4Tensor, b: Sparse24NVFP4Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("k_per_scale", [None, 8, 16])
def test_dgx_vllm_v7(lead, k_per_scale):
    w = weight(*lead)
    tensors = write_sparse24(w, "dgx-vllm-v7", k_per_scale=k_per_scale)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "values": (*lead, K // 4, N),
        "meta": (*lead, K // 8, N),
        "scale": (*lead, K // (k_per_scale or 8), N),
        "global_scale": lead,
    }
    assert same(read_sparse24(tensors, "dgx-vllm-v7"), w)


def test_metal_marlin():
    w = weight(power=2.0**-9)  # a power of two: float16 holds the products exactly
    tensors = write_sparse24(w, "metal-marlin")
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "values": ((K // 16, N), torch.int32),
        "metadata": ((K // 32, N), torch.int32),
        "scales": ((K // 16, N), torch.float16),
    }
    for words in (torch.int32, torch.uint32):
        read = read_sparse24({name: t.view(words) if t.dtype == torch.int32 else t for name, t in tensors.items()}, "metal-marlin", torch.float32)
        assert read.dtype == torch.float32 and torch.equal(read.dequantize(), w.dequantize(torch.float32))


@pytest.mark.parametrize("layout", ["dgx-vllm-v7", "metal-marlin"])
def test_it_multiplies(layout):
    w = weight(power=2.0**-9)
    read = read_sparse24(write_sparse24(w, layout), layout)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    torch.testing.assert_close(F.linear(x, read), F.linear(x, w), rtol=0, atol=0)


def test_the_weight_of_a_layer():
    layer = Sparse24Linear.from_weight(weight().dequantize(), None)
    assert same(read_sparse24(write_sparse24(layer.weight, "dgx-vllm-v7"), "dgx-vllm-v7"), layer.weight)


@pytest.mark.parametrize("n", [1, N])
def test_it_owns_its_memory(n):
    w = Sparse24NVFP4Tensor.from_dense(torch.randn(n, K), "magnitude")
    tensors = write_sparse24(w, "dgx-vllm-v7", k_per_scale=16)
    kept = [t.untyped_storage().data_ptr() for t in w.parts()]
    assert not {t.untyped_storage().data_ptr() for t in tensors.values()} & set(kept)
    read = read_sparse24(tensors, "dgx-vllm-v7")
    before = read.dequantize()
    for t in tensors.values():
        t.view(torch.uint8).zero_() if t.dim() else t.zero_()
    assert torch.equal(read.dequantize(), before)


def assert_says(error, value, limit):
    assert error.value.value == value and error.value.limit == limit and error.value.remedy


def test_bad_input():
    w = weight()
    layouts = ["dgx-vllm-v7", "metal-marlin"]
    for call in (lambda: read_sparse24({}, "marlin"), lambda: write_sparse24(w, "marlin")):
        with pytest.raises(errors.ConfigError, match="no such layout") as error:
            call()
        assert_says(error, "'marlin'", layouts)
    tensors = write_sparse24(w, "dgx-vllm-v7")
    for given in ({n: t for n, t in tensors.items() if n != "meta"}, tensors | {"bias": w}):
        with pytest.raises(errors.ConfigError, match="not the tensors of dgx-vllm-v7") as error:
            read_sparse24(given, "dgx-vllm-v7")
        assert_says(error, sorted(given), ["values", "meta", "scale", "global_scale"])
    with pytest.raises(errors.DTypeError, match="takes a 2:4-sparse weight") as error:
        write_sparse24(torch.zeros(N, K), "dgx-vllm-v7")
    assert_says(error, "Tensor", "Sparse24NVFP4Tensor")
    with pytest.raises(errors.ConfigError, match="k_per_scale"):
        write_sparse24(w, "dgx-vllm-v7", k_per_scale=4)
    with pytest.raises(errors.ConfigError, match="has no effect"):
        write_sparse24(w, "metal-marlin", k_per_scale=16)
    with pytest.raises(errors.ShapeError, match="one matrix"):
        write_sparse24(weight(2), "metal-marlin")
    with pytest.raises(errors.SparsityError, match="0x05"):
        read_sparse24(tensors | {"meta": torch.full_like(tensors["meta"], 5)}, "dgx-vllm-v7")
