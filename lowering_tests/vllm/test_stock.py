"""What export_pretrained writes is computed rightly by vLLM without the plugin: its own loading, and its own rule for the scales of merged layers.

vLLM has no NVFP4 kernel for a CPU. Products of the weights as its loading left them stand in for its Marlin kernels of linear layers and of
experts, in float32, which its configs of these formats are made to accept.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import fp4_inductor
from fp4_inductor.formats import nvfp4
from lowering_tests.vllm.served import by_transformers, differences, engine, in_process

NEAR = 1e-3  # nats; float32 in another order

pytestmark = pytest.mark.skipif(not in_process(), reason="the worker is another process")


def dense(codes: torch.Tensor, scale: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return nvfp4.dequantize(codes, scale, g.float().reshape(()), torch.float32)


def linear(self, layer, x, bias=None):
    return F.linear(x, dense(layer.weight, layer.weight_scale, layer.weight_global_scale), bias)


def experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *_, **__):
    """As the experts of a modular kernel of vLLM: the sum over a token's experts goes into ``output``."""
    assert activation.value == "silu"
    output.zero_()
    for e in range(w1.shape[0]):
        tokens, slots = torch.where(topk_ids == e)
        gate, up = F.linear(hidden_states[tokens], dense(w1[e], self.w1_scale[e], self.g1_alphas[e])).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, dense(w2[e], self.w2_scale[e], self.g2_alphas[e]))
        output.index_add_(0, tokens, out * topk_weights[tokens, slots, None])


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """The parameters of each layer of experts as vLLM's loading left them."""
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
    from vllm.platforms import PlatformEnum

    for config in (CompressedTensorsConfig, ModelOptNvFp4Config):
        monkeypatch.setattr(config, "get_supported_act_dtypes", lambda self: [torch.float32])
    Marlin = kernels.MarlinNvFp4LinearKernel
    monkeypatch.setitem(kernels._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CPU, [Marlin])
    monkeypatch.setattr(Marlin, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    monkeypatch.setattr(Marlin, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(Marlin, "apply_weights", linear)
    as_loaded = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")
    layers = []

    def prepare(layer, **given):
        layers.append({name: p.detach().clone() for name, p in layer.named_parameters()})
        return tuple(given[name] for name in as_loaded)

    monkeypatch.setattr(oracle, "prepare_nvfp4_moe_layer_for_marlin", prepare)
    monkeypatch.setattr(MarlinExperts, "_supports_current_device", staticmethod(lambda: True))
    monkeypatch.setattr(MarlinExperts, "apply", experts)
    return layers


def by_stock_vllm(folder, methods):
    """Its answers; ``methods``: what its own classes are called that give the quantized layers to their kernels."""
    with engine(folder, dtype="float32") as llm:
        found = [m.quant_method for m in llm.model.modules() if getattr(m, "quant_method", None) is not None]
        assert {type(method).__module__.partition(".")[0] for method in found} == {"vllm"}
        assert methods <= {type(method).__name__ for method in found}
        return llm.ask()


def by_us(folder):
    return by_transformers(fp4_inductor.load_pretrained(folder, dtype=torch.float32).float())


LINEAR = {"modelopt": "ModelOptLinearMethod", "compressed": "CompressedTensorsLinearMethod"}
EXPERTS = {"modelopt": "ModelOptNvFp4FusedMoE", "compressed": "CompressedTensorsW4A4Nvfp4MoEMethod"}


@pytest.mark.parametrize(
    ("model", "format"),
    [
        ("dense", "modelopt"),
        ("dense", "compressed"),
        ("moe", "modelopt"),
        ("moe", "compressed"),
        ("ownmixtral", "compressed"),
        pytest.param("ownmixtral", "modelopt", marks=pytest.mark.slow),
    ],
)
def test_stock_vllm_computes_an_export(folders, model, format):
    folder = folders(f"{model}-{format}")
    got = by_stock_vllm(folder, {LINEAR[format]} | ({EXPERTS[format]} if model != "dense" else set()))
    want = by_us(folder)
    common, worst, _ = differences(got, want)
    assert common == [len(tokens) for tokens, _ in want]
    assert worst < NEAR


@pytest.mark.slow
def test_the_rule_that_an_export_has_to_satisfy(folders, tmp_path):
    """vLLM takes a gate's global scale for up, too: it does not see that up's is another."""
    apart = shutil.copytree(folders("moe-modelopt"), tmp_path / "apart")
    [file] = apart.glob("*.safetensors")
    tensors = load_file(file)
    ups = [name for name in tensors if name.endswith("up_proj.weight_scale_2")]
    assert len(ups) == len([name for name in tensors if name.endswith("gate_proj.weight_scale_2")]) > 8
    for name in ups:
        assert torch.equal(tensors[name], tensors[name.replace("up_proj", "gate_proj")])
    save_file(tensors | {name: tensors[name] * 2 for name in ups}, file, {"format": "pt"})
    common, worst, _ = differences(by_stock_vllm(apart, {EXPERTS["modelopt"]}), by_us(folders("moe-modelopt")))
    assert min(common) == max(common) > 8
    assert worst < NEAR


@pytest.mark.slow
@pytest.mark.parametrize(("format", "scale"), [("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")])
def test_an_export_with_input_scales(folders, tmp_path, loaded, format, scale):
    """W4A4, of linear layers and experts: what another exporter wrote, written again. The stand-ins do not round activations."""
    folder = tmp_path / "again"
    fp4_inductor.export_pretrained(fp4_inductor.load_pretrained(folders("mixtral-modelopt-nvfp4")), folder, format)
    common, worst, _ = differences(by_stock_vllm(folder, {EXPERTS[format.partition("-")[0]]}), by_us(folder))
    assert set(common) == {24}
    assert worst < NEAR
    [file] = folder.glob("*.safetensors")
    stored = load_file(file)
    assert len(loaded) == 2
    for i, layer in enumerate(loaded):
        for e, (of_gate_up, of_down) in enumerate(zip(layer[f"w13_{scale}"].tolist(), layer[f"w2_{scale}"].tolist(), strict=True)):
            name = f"model.layers.{i}.block_sparse_moe.experts.{e}"
            assert [*of_gate_up, of_down] == [stored[f"{name}.{w}.{scale}"].item() for w in ("w1", "w3", "w2")]
