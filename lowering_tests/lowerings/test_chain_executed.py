"""Decode steps of a model over a KVCache whose graphs are those of a GPU, run on a CPU: the CUDA kernels of one row are emulated."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config
from fp4_inductor.decoding import regions
from fp4_inductor.kernels import build
from fp4_inductor.lowerings.journal import listen
from lowering_tests.kernels import emulator
from lowering_tests.kernels.test_binding import ops  # noqa: F401
from lowering_tests.lowerings.of_a_gpu import linear_layers_of_a_gpu
from lowering_tests.models.conftest import BASE

pytestmark = pytest.mark.skipif(emulator.compiler() is None or build.cxx() is None, reason="no C++ compiler")
BF16 = torch.bfloat16


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "layers", "least", "whole", "products"),
    [
        ("Qwen3Config", 2, 4, False, 4 + 3), ("LlamaConfig", 3, 2, False, 3 + 3), ("LlamaConfig", 3, 2, True, 4 + 4 + 3),
        pytest.param("LlamaConfig", 2, 4, False, 4 + 3, marks=SLOW), pytest.param("Qwen3Config", 3, 4, False, 4 + 4 + 3, marks=SLOW),
        pytest.param("LlamaConfig", 5, 4, False, 3 + 3, marks=SLOW), pytest.param("LlamaConfig", 5, 4, True, 4 * 4 + 3, marks=SLOW),
    ],
)  # fmt: skip
def test_decode_steps(ops, family, layers, least, whole, products, monkeypatch):  # noqa: F811
    """``least`` layers, all but the last, are one region, but where a step is one graph (``whole``).

    Counters are zero again after each step, and a step reads what the one before it left in the cache.
    """
    import transformers

    monkeypatch.setattr(regions, "LEAST", least)
    torch.manual_seed(0)
    fields = BASE | dict(num_hidden_layers=layers, intermediate_size=128, head_dim=16)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family)(**fields), dtype=BF16).eval()
    model = fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    tokens = torch.randint(3, 128, (4,)).tolist()

    def steps(call, cache):
        with torch.no_grad():
            return torch.cat([call(torch.tensor([[token]]), cache) for token in tokens])

    def step(ids, cache):
        return model(input_ids=ids, past_key_values=cache).logits

    want, cache = steps(step, KVCache(model, 32, 1)), KVCache(model, 32, 1)
    torch._dynamo.reset()
    options = {"force_disable_caches": True}
    undivided = regions.undivided(cache) if whole else contextlib.nullcontext()
    with linear_layers_of_a_gpu("linear_chain"), undivided, listen() as entries, torch._inductor.config.patch(options):
        got = steps(torch.compile(step, fullgraph=True), cache)
    served = [e.decision.row.kernel for e in entries if e.op == "fp4.linear_chain"]
    assert served == ["cuda_gemv_chain"] * products
    assert not cache.counter.arrivals.any()
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 3e-2
