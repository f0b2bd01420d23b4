"""vLLM's KV cache in FP8 under quantized layers: Transformers with the same numbers in its cache gives the same tokens, in float32."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fp4_inductor
from lowering_tests.vllm.served import by_transformers, differences, engine, in_process

NEAR = 0.05  # nats: a float32 step of a key beside a code of E4M3 moves it by a code; a cache that is not rounded, or otherwise, is 0.2 and more away
ASKED = {"quantization": "fp4_inductor"}
WIDE = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()

pytestmark = [
    pytest.mark.skipif(not in_process(), reason="the worker is another process"),
    pytest.mark.skipif(not WIDE, reason="vLLM's FP8 KV cache needs AVX-512 or AMX on a CPU (cpu_attn.py, _get_attn_isa)"),
]


class InE4M3(transformers.DynamicCache):
    """Keys and values as vLLM's kernel for CPUs stores them: divided by a scale, then rounded towards zero (a GPU rounds to nearest)."""

    def __init__(self, key_scale: float, value_scale: float):
        super().__init__()
        self.scales = key_scale, value_scale

    def update(self, key, value, *args, **options):
        return super().update(*(_rounded(t, scale) for t, scale in zip((key, value), self.scales, strict=True)), *args, **options)


def _rounded(t: torch.Tensor, scale: float) -> torch.Tensor:
    t = t / scale
    nearest = t.to(torch.float8_e4m3fn)
    away = nearest.to(t.dtype).abs() > t.abs()
    return (nearest.view(torch.uint8) - away.to(torch.uint8)).view(torch.float8_e4m3fn).to(t.dtype) * scale


def with_scales(folder, target, key_scale: float, value_scale: float):
    """A copy of a ModelOpt folder that asks for an FP8 cache with these scales, as its exporter writes them."""
    shutil.copytree(folder, target)
    [file] = target.glob("*.safetensors")
    config = json.loads((target / "config.json").read_text())
    layers = [f"model.layers.{i}.self_attn" for i in range(config["num_hidden_layers"])]
    scales = {f"{layer}.{part}_proj.{part}_scale": torch.tensor(s) for layer in layers for part, s in (("k", key_scale), ("v", value_scale))}
    save_file(load_file(file) | scales, file, {"format": "pt"})
    config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("name", "scales", "options"),
    [
        ("dense-modelopt", None, ASKED | {"kv_cache_dtype": "fp8"}),
        pytest.param("moe-transformers", None, {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param("dense-modelopt", (0.02, 0.01), ASKED, marks=pytest.mark.slow),  # the checkpoint asks for it
        ("gptoss-modelopt", (0.02, 0.01), ASKED | {"kv_cache_dtype": "fp8"}),
    ],
)
def test_tokens_are_those_of_a_rounded_cache(folders, tmp_path, name, scales, options):
    folder = folders(name) if scales is None else with_scales(folders(name), tmp_path / "scales", *scales)
    with engine(folder, dtype="float32", **options) as llm:
        got = llm.ask()
        assert {cache.dtype for cache in llm.caches} == {torch.uint8}
    model = fp4_inductor.load_pretrained(folder, dtype=torch.float32).float()
    want = by_transformers(model, cache=lambda: InE4M3(*(scales or (1.0, 1.0))))
    common, worst, _ = differences(got, want)
    assert common == [len(tokens) for tokens, _ in want]
    assert worst < NEAR
    for other in (None, lambda: InE4M3(1.5, 1.5)):  # a cache in float32, and one under other scales
        assert differences(got, by_transformers(model, cache=other))[1] > 4 * NEAR
