"""Pickles, copies and torch.save of quantized models and tensors; what was pickled is read in another process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, NVFP4Tensor, Sparse24NVFP4Tensor
from fp4_inductor.modules import FP8Linear, Sparse24Linear
from lowering_tests.foreign import assert_same, bits, logits
from lowering_tests.models.conftest import build

CONFIGS = {
    "packed siblings": NVFP4Config("four_over_six"),
    "separate, FP8 head": NVFP4Config("four_over_six", siblings="separate", lm_head="fp8"),
}


def through_pickle(value, protocol=None):
    return pickle.loads(pickle.dumps(value, protocol=protocol))


def through_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"pickle": through_pickle, "protocol 2": lambda v: through_pickle(v, 2), "deepcopy": copy.deepcopy, "torch.save": through_torch}


def sparse() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(Sparse24Linear(64, 64, bias=True), FP4Linear(64, 32), FP8Linear(32, 16))
    dense = torch.randn(64, 16, 4) * torch.tensor([1.0, 0.0, 1.0, 0.0])
    layers[0].take(Sparse24NVFP4Tensor.from_dense(dense.reshape(64, 64)).parts())
    layers[1].take(NVFP4Tensor.from_dense(torch.randn(32, 64)).parts())
    return layers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("family", "config"), [("llama", "packed siblings"), ("llama", "separate, FP8 head"), ("mixtral", "packed siblings"), ("gpt_oss", "packed siblings")]
)
def test_models(family, config, way):
    model = fp4_inductor.quantize_model(build(family, torch.bfloat16), CONFIGS[config], progress=False)
    again = WAYS[way](model)
    assert_same(again, model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(logits(again), logits(model))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_layer(way):
    model = sparse()
    again = WAYS[way](model)
    assert_same(again, model)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))
    again.to(torch.float16)
    assert again[0].scale.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["matrix", "transposed", "experts", "parameter", "sparse"])
def test_tensors(kind, way):
    t = {
        "matrix": lambda: NVFP4Tensor.from_dense(torch.randn(32, 64)),
        "transposed": lambda: NVFP4Tensor.from_dense(torch.randn(32, 64)).t(),
        "experts": lambda: NVFP4Tensor.from_dense(torch.randn(2, 32, 64)),
        "parameter": lambda: nn.Parameter(NVFP4Tensor.from_dense(torch.randn(32, 64).half())),
        "sparse": lambda: Sparse24NVFP4Tensor.from_dense((torch.randn(32, 16, 4) * torch.tensor([1.0, 0.0, 1.0, 0.0])).reshape(32, 64)),
    }[kind]()
    t.note = "kept"
    again = WAYS[way](t)
    assert type(again) is type(t) and again.shape == t.shape and again.dtype == t.dtype and again.transposed == t.transposed
    assert again.requires_grad == t.requires_grad and isinstance(again, nn.Parameter) == isinstance(t, nn.Parameter)
    assert all(a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in zip(again.parts(), t.parts(), strict=True))
    assert way == "deepcopy" or again.note == "kept"


def test_weights_only():
    t = {"w": NVFP4Tensor.from_dense(torch.randn(32, 64)), "p": nn.Parameter(NVFP4Tensor.from_dense(torch.randn(32, 64)), requires_grad=False)}
    file = io.BytesIO()
    torch.save(t, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert all(torch.equal(again[name].dequantize(), t[name].dequantize()) for name in t)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_shared_stays_shared(way):
    """Also without torch.save's own bookkeeping: one object in a pickle for one piece of memory."""
    first = FP4Linear.from_weight(torch.randn(32, 64))
    second = FP4Linear(64, 32)
    second.take(first.parts())
    again = WAYS[way](nn.ModuleList([first, second]))
    for part in ("qdata", "scale", "global_scale"):
        assert getattr(again[0], part).data_ptr() == getattr(again[1], part).data_ptr()


def test_a_pickled_model_can_be_freed():
    layer = FP4Linear.from_weight(torch.randn(32, 64))
    pickle.dumps(layer)
    storage = weakref.ref(layer.scale.untyped_storage())
    scale = weakref.ref(layer.scale)
    del layer
    gc.collect()
    assert scale() is None and storage() is None


READ = """
import pickle, sys, torch
model, t, ids, want = pickle.load(open(sys.argv[1], "rb"))
assert type(t).__name__ == "NVFP4Tensor" and t.scale.dtype == torch.float8_e4m3fn
with torch.no_grad():
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
print("read")
"""


def test_in_another_process(tmp_path):
    """One that has not imported this package."""
    model = fp4_inductor.quantize_model(build("mixtral", torch.bfloat16), CONFIGS["packed siblings"], progress=False)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, NVFP4Tensor.from_dense(torch.randn(32, 64)), ids, want)))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, tmp_path / "model.pickle"], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120
    )
    assert run.stdout.strip() == "read", run.stderr[-2000:]
