"""Larger CUDA graphs for models with experts. vLLM captures steps of up to 512 tokens, or two for each sequence. The host takes longer to launch a larger
step than the GPU to compute it.

Qwen3-30B-A3B's shape on an H200, with and without a graph of its size: a prompt of 2,048 tokens 28.6 and 43.6 ms, of 1,024 18.3 ms. From about 4,000 tokens
on the GPU takes longer than the host (``benchmarks/results/serve.csv``). Attention stays outside of the graph.
"""

from __future__ import annotations

from typing import Any

from . import engine
from .log import say_once
from .settings import KEY

# A step is filled up to the next of these. Those that vLLM captures by itself are left to it.
TOKENS = (32, 64, 128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)
VLLMS_OWN = 512  # the most that vLLM captures by itself
MEASURED = 90  # compute capability, times ten: on a slower GPU the host does not wait


def more_tokens(vllm_config: Any) -> list[int]:
    """Tokens of steps that vLLM is to capture, beyond those that it captures by itself; none where a step waits for the GPU, or the user says so."""
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    if not getattr(vllm_config.quant_config, "of_fp4_inductor", False) or not model.is_moe or _asked_of(vllm_config) != "auto":
        return []
    if compilation.mode != engine.CompilationMode.VLLM_COMPILE or compilation.cudagraph_mode.mixed_mode() != engine.CUDAGraphMode.PIECEWISE:
        return []
    if not engine.current_platform.is_device_capability(MEASURED):
        return []
    own, most = compilation.cudagraph_capture_sizes[-1], vllm_config.scheduler_config.max_num_batched_tokens
    added = [tokens for tokens in TOKENS if own < tokens <= most]
    if added:
        say_once(f'CUDA graphs of up to {added[-1]} tokens, so that prompts do not wait for the host ("graphs": "vllm" leaves it at {own})', compilation)
    return added


def _asked_of(vllm_config: Any) -> Any:
    """Of the settings, which are checked when the first layer is built."""
    given = getattr(vllm_config, "additional_config", None)
    options = given.get(KEY) if isinstance(given, dict) else None
    return options.get("graphs", "auto") if isinstance(options, dict) else "auto"
