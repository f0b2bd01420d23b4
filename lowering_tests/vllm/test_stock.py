"""What export_pretrained writes is computed rightly by vLLM without the plugin: its own loading, and its own rule for the scales of merged layers.

vLLM has no NVFP4 kernel for a CPU. A product of the weights as its loading left them stands in for its Marlin kernel.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import fp4_inductor
from fp4_inductor.formats import nvfp4
from lowering_tests.vllm import served
from lowering_tests.vllm.served import by_transformers, engine, in_process

TEXTS = [list(b"It is a truth universally acknowledged"), list(b"Mr. Darcy"), list(b"She was not"), list(b"Elizabeth")]

pytestmark = pytest.mark.skipif(not in_process(), reason="the worker is another process")


@pytest.fixture
def products(monkeypatch):
    """Names the shapes of layers that vLLM's method gave to its kernel."""
    from vllm.model_executor.kernels.linear import MarlinNvFp4LinearKernel as Marlin

    seen = set()

    def apply(self, layer, x, bias=None):
        seen.add(tuple(layer.weight.shape))
        g = layer.weight_global_scale.float().reshape(())
        return F.linear(x.float(), nvfp4.dequantize(layer.weight, layer.weight_scale, g, torch.float32), None if bias is None else bias.float()).to(x.dtype)

    monkeypatch.setattr(Marlin, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    monkeypatch.setattr(Marlin, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(Marlin, "apply_weights", apply)
    return seen


@pytest.mark.parametrize("name", ["dense-modelopt", "dense-compressed"])
def test_stock_vllm_computes_an_export(folders, products, name):
    folder = folders(name)
    with engine(folder) as llm:
        kinds = {type(m.quant_method).__module__.partition(".")[0] for m in llm.model.modules() if getattr(m, "quant_method", None) is not None}
        got = llm.ask(TEXTS)
    assert kinds == {"vllm"} and len(products) >= 4
    served.assert_same(got, by_transformers(fp4_inductor.load_pretrained(folder), TEXTS), 0.6)  # bfloat16; the largest of three scales for all: 2.4
