"""Every name of vLLM that this package uses. No other module of the package imports vllm (``lowering_tests/test_floors.py``).

vLLM has no stable interface for quantization methods that live elsewhere, so a name may move, or change its meaning, with any
version. :data:`VERSIONS` are those that CI (on a CPU) and the benchmarks (on GPUs) run; :func:`..vllm.register` refuses others.

``from .engine import LinearBase`` imports the module of that name then and not earlier: vLLM compiles small functions while some
of its modules are imported, which has to wait until its platform is known.
Source: vllm 0.22.1 and 0.32.0.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

VERSIONS = ("0.22.1", "0.32.0")
ATTENTION_VERSIONS = ("0.22.1",)  # with which decode steps have attended by fp4.paged_attention on a GPU
_LAYERS = "vllm.model_executor.layers"
_WHERE = {
    "Attention": f"{_LAYERS}.attention",
    "MLAAttention": f"{_LAYERS}.attention",
    "BaseKVCacheMethod": f"{_LAYERS}.quantization.kv_cache",
    "CompressedTensorsConfig": f"{_LAYERS}.quantization.compressed_tensors.compressed_tensors",
    "ModelOptMixedPrecisionConfig": f"{_LAYERS}.quantization.modelopt",
    "ModelOptNvFp4Config": f"{_LAYERS}.quantization.modelopt",
    "QuantizationConfig": f"{_LAYERS}.quantization.base_config",
    "register_quantization_config": f"{_LAYERS}.quantization",
    "FusedMoEMethodBase": f"{_LAYERS}.fused_moe",
    "FusedMoEQuantConfig": f"{_LAYERS}.fused_moe",
    "FusedMoeWeightScaleSupported": f"{_LAYERS}.fused_moe",
    "MoEActivation": f"{_LAYERS}.fused_moe",
    "RoutedExperts": f"{_LAYERS}.fused_moe",
    "LinearBase": f"{_LAYERS}.linear",
    "LinearMethodBase": f"{_LAYERS}.linear",
    "UnquantizedLinearMethod": f"{_LAYERS}.linear",
    "register_weight_loader_v2_supported_method": f"{_LAYERS}.linear",
    "ParallelLMHead": f"{_LAYERS}.vocab_parallel_embedding",
    "GroupQuantScaleParameter": "vllm.model_executor.parameter",
    "ModelWeightParameter": "vllm.model_executor.parameter",
    "PerTensorScaleParameter": "vllm.model_executor.parameter",
    "set_weight_attrs": "vllm.model_executor.utils",
    "DefaultModelLoader": "vllm.model_executor.model_loader.default_loader",
    "initialize_online_processing": "vllm.model_executor.model_loader.reload.layerwise",
    "AttentionBackendEnum": "vllm.v1.attention.backends.registry",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "FlashAttentionBackend": "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionImpl": "vllm.v1.attention.backends.flash_attn",
    "FlashAttentionMetadataBuilder": "vllm.v1.attention.backends.flash_attn",
    "get_attention_context": "vllm.model_executor.layers.attention.attention",
    "register_backend": "vllm.v1.attention.backends.registry",
    "CompilationMode": "vllm.config",
    "get_current_vllm_config_or_none": "vllm.config",
    "current_platform": "vllm.platforms",
    "init_logger": "vllm.logger",
}
_SELECTOR = "vllm.v1.attention.selector"
_PASSES = "vllm.compilation.passes.inductor_pass"
# Operators in the graphs that vLLM compiles for a GPU; it decomposes them behind Inductor's patterns.
NORM, ADD_NORM = "vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"
_LAST = 1 << 30  # vLLM ends the last range of an encoder at the largest int32: no limit


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def version() -> str:
    """Of vLLM, without a local part."""
    return importlib.import_module("vllm").__version__.partition("+")[0]


def names() -> dict[str, str]:
    """Every name and the module that it is taken from: what a test of a new version asks for."""
    return {**_WHERE, "get_pass_context": _PASSES, "_cached_get_attn_backend": _SELECTOR}


def range_of_compilation() -> tuple[int, int | None] | None:
    """(least, largest) number of tokens of the graph that vLLM is compiling now; None if it compiles none."""
    passes = sys.modules.get(_PASSES)
    if passes is None:
        return None
    try:
        found = passes.get_pass_context().compile_range
    except AssertionError:  # that is how vLLM says that there is no context
        return None
    return found.start, found.end if found.end < _LAST else None


def leave_untuned() -> None:
    """Compile a graph of one size without Inductor's tuning, unless the user asks for it: it takes longer than all of the other compilation.

    vLLM tunes graphs of single sizes because users name them. A size that this package adds is there for its kernel, which is chosen already.
    """
    for name in ("VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING"):
        os.environ.setdefault(name, "0")


def replace_flash_attention(path: str) -> None:
    """The class at ``path`` stands in for vLLM's FlashAttention backend in this process, wherever vLLM chooses that one from now on. May be called again."""
    backend = __getattr__("AttentionBackendEnum").FLASH_ATTN
    if backend.get_path() != path:
        __getattr__("register_backend")(backend, path)
        importlib.import_module(_SELECTOR)._cached_get_attn_backend.cache_clear()


def stream_weights(own: Callable[[Any, Path], Iterator[tuple[str, torch.Tensor]] | None]) -> None:
    """Let ``own(vllm_config, folder)`` give a model's weights in place of vLLM's reader of files, unless it returns None. May be called again."""
    loader = __getattr__("DefaultModelLoader")
    original = loader.get_all_weights
    if hasattr(original, "_fp4_inductor"):
        return
    config = __getattr__("get_current_vllm_config_or_none")

    @functools.wraps(original)
    def get_all_weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        weights = own(config(), Path(model_config.model))
        return original(self, model_config, model) if weights is None else weights

    get_all_weights._fp4_inductor = True  # type: ignore[attr-defined]
    loader.get_all_weights = get_all_weights
