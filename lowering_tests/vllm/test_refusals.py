"""What is not served is refused with value, limit and remedy: before an engine takes memory, or at the layer that cannot be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4_inductor import errors, set_dispatch
from fp4_inductor.config import dispatch_config
from fp4_inductor.integrations.vllm import compiling, refusals
from fp4_inductor.integrations.vllm.entry import FP4Config
from fp4_inductor.integrations.vllm.linear import MODELOPT, loaded_scales
from fp4_inductor.integrations.vllm.settings import Settings, settings_of
from lowering_tests.vllm import checkpoints, served
from lowering_tests.vllm.test_registration import config_of

ASKED = {"quantization": "fp4_inductor"}


def assert_says(error, *parts) -> None:
    """Message with each of ``parts``; value, limit and remedy are there."""
    text = str(error.value)
    for part in parts:
        assert part in text, text
    assert error.value.remedy


def parallel(**changes):
    plain = {"use_batched_activation_format": False, "all2all_backend": "naive", "use_all2all_kernels": False, "enable_eplb": False}
    return SimpleNamespace(**(plain | changes))


@pytest.mark.parametrize(
    ("here", "whole", "sparse", "parts"),
    [
        (24, 48, False, ("24 (48 columns over 2 ranks)", "a multiple of 16", "fewer tensor-parallel ranks")),
        (48, 96, True, ("48 (96 columns over 2 ranks)", "a multiple of 32 (2:4-sparse NVFP4)", "fewer")),
        (40, 40, False, ("40 (40 columns)", "multiple of 16", "Quantize the model without this layer")),
    ],
)
def test_columns_of_a_rank(here, whole, sparse, parts):
    with pytest.raises(errors.ShapeError) as error:
        refusals.check_columns("model.layers.0.mlp.down_proj", here, whole, sparse)
    assert_says(error, "model.layers.0.mlp.down_proj", *parts)


@pytest.mark.parametrize(
    ("moe", "parts"),
    [
        ({"is_lora_enabled": True}, ("LoRA", "Leave out --enable-lora")),
        ({"moe_parallel_config": parallel(use_batched_activation_format=True, all2all_backend="deepep_low_latency")}, ("batched", "deepep_low_latency")),
        ({"moe_parallel_config": parallel(use_all2all_kernels=True, all2all_backend="deepep_high_throughput")}, ("deepep_high_throughput", "naive")),
        ({"moe_parallel_config": parallel(enable_eplb=True)}, ("enable_eplb=True", "Leave out --enable-eplb")),
    ],
)
def test_ways_to_run_experts(moe, parts):
    with pytest.raises(errors.UnsupportedOpError) as error:
        refusals.check_experts("model.layers.0.mlp.experts", SimpleNamespace(**({"is_lora_enabled": False, "moe_parallel_config": parallel()} | moe)))
    assert_says(error, "model.layers.0.mlp.experts", *parts)


def test_gpu_without_a_kernel():
    old = SimpleNamespace(
        is_cuda=lambda: True, is_cpu=lambda: False, get_device_capability=lambda: SimpleNamespace(major=7, minor=5, to_int=lambda: 75), device_name="cuda"
    )
    with pytest.raises(errors.DeviceError) as error:
        refusals.check_platform(old)
    assert_says(error, "7.5", ">= 8.0", "Ampere")
    with pytest.raises(errors.DeviceError) as error:
        refusals.check_platform(SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False, device_name="tpu"))
    assert_says(error, "tpu")


@pytest.mark.parametrize("source", [{"quant_method": "awq", "bits": 4}, {"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "gptq"}])
def test_other_formats(source):
    assert refusals.kind_of(source) is None
    with pytest.raises(errors.ConfigError) as error:
        FP4Config.override_quantization_method(source, "fp4_inductor")
    assert_says(error, source["quant_method"], "modelopt (NVFP4", "Leave out quantization=")


def test_scales_that_were_not_loaded():
    nan = float("nan")
    assert loaded_scales(torch.tensor([2.0, 3.0, 4.0]), "layer", whole=False).tolist() == [2.0, 3.0, 4.0]
    assert loaded_scales(torch.tensor([nan, 3.0, nan]), "layer", whole=True).tolist() == [3.0]  # one tensor for the merged layer (Phi-3)
    for g, whole in (([nan, nan, nan], True), ([1.0, nan, 2.0], True), ([1.0, nan], False)):
        with pytest.raises(errors.CheckpointError) as error:
            loaded_scales(torch.tensor(g), "model.layers.3.qkv_proj", whole)
        assert_says(error, "model.layers.3.qkv_proj", f"{sum(x != x for x in g)} of {len(g)}", "q/k/v")


@pytest.mark.skipif(not served.in_process(), reason="the worker is another process")
@pytest.mark.parametrize("part", ["weight", "weight_scale", "weight_scale_2"])
def test_tensors_that_are_not_in_the_checkpoint(folders, tmp_path, part, monkeypatch):
    """What a look into the folder does not see (a hub id): the layer says what it was not given."""
    from fp4_inductor.integrations.vllm import preflight

    folder = without(folders("llama-modelopt-nvfp4"), tmp_path, f"model.layers.1.mlp.up_proj.{part}")
    monkeypatch.setattr(preflight, "check_folder", lambda folder, source: None)
    with pytest.raises(errors.CheckpointError) as error, served.engine(folder, **ASKED):
        pass
    assert_says(error, "model.layers.1.mlp.gate_up_proj", "1 of 2", "download the checkpoint again")


def without(folder, work, name):
    """A copy of ``folder`` whose tensor ``name`` is missing."""
    copied = shutil.copytree(folder, work / "incomplete")
    [file] = copied.glob("*.safetensors")
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    return copied


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"large_n": "fp8"}, ("large_n", "prefill")),
        ({"prefill": "nvfp4"}, ("prefill", "auto")),
        ({"scale_search": "activation"}, ("scale_search", "four_over_six")),
        ({"bounds": [0, 3]}, ("bounds", "> 0")),
        ({"dispatch": {"threshold": 1}}, ("dispatch", "thresholds", "chain")),
        ({"dispatch": {"thresholds": {"chain": -1}}}, ("thresholds", ">= 0")),
        ({"dispatch": "chain"}, ("dispatch", "an object with")),
        ("fp8", ("fp8", "an object with")),
    ],
)
def test_options(options, parts):
    with pytest.raises(errors.ConfigError) as error:
        settings_of(SimpleNamespace(additional_config={"fp4_inductor": options}))
    assert_says(error, *parts)


def test_options_are_read():
    assert settings_of(SimpleNamespace(additional_config={"fp4_inductor": {"prefill": "bf16", "bounds": [4, 8], "salt": "x"}})) == Settings(
        "bf16", bounds=(4, 8)
    )
    assert settings_of(SimpleNamespace(additional_config=None)) == Settings()
    given = settings_of(SimpleNamespace(additional_config={"fp4_inductor": {"dispatch": {"thresholds": {"chain": 0}, "early": "never"}}}))
    before = set_dispatch()
    try:
        compiling.set_fields(given)
        assert dispatch_config() == replace(before, thresholds=(("chain", 0),), early="never")
    finally:
        set_dispatch(before)


def test_weights_that_are_prefetched_are_written_in_a_step(monkeypatch):
    from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig

    monkeypatch.setattr(compiling, "range_of_compilation", lambda: (1, 1))
    prefetched = OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=2))
    for offload, promised in ((OffloadConfig(), True), (prefetched, False), (OffloadConfig(offload_backend="uva"), True)):
        compiling.mark_cache(SimpleNamespace(additional_config={}, offload_config=offload))
        assert compiling.promises() == promised
    compiling.mark_cache(SimpleNamespace(additional_config={}))
    monkeypatch.setattr(compiling, "range_of_compilation", lambda: None)
    assert not compiling.promises()


def test_cuda_sources_are_compiled_while_weights_are_loaded(monkeypatch):
    """Those of what a graph fuses, too: nothing is left for the compilation of the graphs."""
    begun = []
    monkeypatch.setattr(compiling.select, "compile_ahead", lambda calls: begun.extend(calls))
    compiling._compile_ahead((("linear", 6144, 4096), ("linear_glu", 24576, 4096)), 90, torch.bfloat16, "auto")
    halves = {"linear_residual_squares", "rms_scaled_linear", "rms_scaled_linear_glu"}
    assert {call.op for call in begun} == {"linear", "linear_epilogue", "linear_glu", "linear_chain", *halves}
    assert {name for call in begun for name in compiling.select.csrc_names(call)} >= {"linear_gemv", "linear_gemv_pointwise", "linear_gemv_glu", "linear_chain"}
    begun.clear()
    compiling._compile_ahead((("linear", 6144, 4096),), 0, torch.bfloat16, "auto")
    assert not begun


@pytest.mark.parametrize("damage", ["missing", "nan", "zero"])
def test_checkpoint_with_bad_scales_is_refused_before_an_engine(folders, tmp_path, damage):
    """While vLLM makes its configuration: no process, no memory."""
    folder = shutil.copytree(folders("llama-modelopt-nvfp4"), tmp_path / "damaged")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if n.endswith(MODELOPT.global_scale))
    if damage == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.full_like(tensors[name], float("nan") if damage == "nan" else 0.0)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(Exception, match=name.removesuffix(f".{MODELOPT.global_scale}")) as error:
        config_of(folder, **ASKED)
    assert "Download" in str(error.value) or "remedy" in str(error.value)


NVFP4_GROUP = {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (None, "a dense checkpoint"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"group_0": NVFP4_GROUP}}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}}, "MIXED_PRECISION"),
    ],
)
def test_formats_of_gpt_oss(tmp_path, source, part):
    config = FP4Config() if source is None else FP4Config.from_config(source)
    with pytest.raises(errors.UnsupportedOpError) as error:
        config.look_into(tmp_path, SimpleNamespace(model_type="gpt_oss"), None)
    assert_says(error, part, "fp4-inductor quantize MODEL OUT --format modelopt")


def test_the_head_of_gpt_oss(tmp_path):
    checkpoints.write("gptoss-fp8-transformers", tmp_path, tmp_path / "head")
    with pytest.raises(Exception, match="no quantized output head; got fp8") as error:
        config_of(tmp_path / "head")
    assert "without lm_head=" in str(error.value)


def test_formats_mixed_in_a_merged_layer():
    from fp4_inductor.integrations.vllm.own import OwnConfig

    with pytest.raises(errors.CheckpointError) as error:
        OwnConfig()._check_one("model.layers.0.qkv_proj", {"nvfp4", ""})
    assert_says(error, "model.layers.0.qkv_proj", "dense", "Quantize all of these layers in one format")


def test_export_has_one_scale_for_each_merged_layer(folders):
    """Stock vLLM takes the largest of them: an export must not have several."""
    folder = folders("dense-modelopt")
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert json.loads((folder / "config.json").read_text())["quantization_config"]
    for layer in range(5):
        for block, members in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            scales = {float(tensors[f"model.layers.{layer}.{block}.{m}.weight_scale_2"]) for m in members}
            assert len(scales) == 1
