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
from torch import Tensor

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
    "FusedTopKRouter": f"{_LAYERS}.fused_moe.router.fused_topk_router",
    "GateLinear": f"{_LAYERS}.fused_moe.router.gate_linear",
    "MoERunner": f"{_LAYERS}.fused_moe.runner.moe_runner",
    "LinearBase": f"{_LAYERS}.linear",
    "LinearMethodBase": f"{_LAYERS}.linear",
    "ReplicatedLinear": f"{_LAYERS}.linear",
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
    "scaled_fp8_quant": "vllm._custom_ops",
    "get_attention_context": "vllm.model_executor.layers.attention.attention",
    "register_backend": "vllm.v1.attention.backends.registry",
    "get_tp_group": "vllm.distributed.parallel_state",
    "model_parallel_is_initialized": "vllm.distributed.parallel_state",
    "CompilationMode": "vllm.config",
    "CUDAGraphMode": "vllm.config",
    "VllmConfig": "vllm.config",
    "get_current_vllm_config_or_none": "vllm.config",
    "current_platform": "vllm.platforms",
    "init_logger": "vllm.logger",
    "VLLM_BATCH_INVARIANT": "vllm.envs",
}
_SELECTOR = "vllm.v1.attention.selector"
# Of vllm 0.32.0 only: the router of a CPU, and the mask of the tokens that fill a CUDA graph up.
_NOT_IN_0_22 = {"CPURouter": f"{_LAYERS}.fused_moe.router.cpu_router", "_get_padding_mask": _WHERE["FusedTopKRouter"]}
_PASSES = "vllm.compilation.passes.inductor_pass"
# Operators in the graphs that vLLM compiles for a GPU; it decomposes them behind Inductor's patterns.
NORM, ADD_NORM = "vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"
ALL_REDUCE = "vllm::all_reduce"  # (tensor, vLLM's name of a group) -> tensor
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
    later = {} if version().startswith("0.22.") else _NOT_IN_0_22
    return {**_WHERE, "get_pass_context": _PASSES, "_cached_get_attn_backend": _SELECTOR, **later}


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


def tensor_parallel_group() -> Any:
    """vLLM's GroupCoordinator of the ranks that share this process's layers; None: it has them alone."""
    group = __getattr__("get_tp_group")() if __getattr__("model_parallel_is_initialized")() else None
    return group if group is not None and group.world_size > 1 else None


def torch_group(name: str) -> str:
    """torch's name of the process group that vLLM's operators call ``name``; empty: there is none."""
    groups = importlib.import_module(_WHERE["get_tp_group"])._groups
    group = groups[name]() if name in groups else None
    return "" if group is None else group.device_group.group_name


def why_apart(group: Any) -> str:
    """Why GPUs of a GroupCoordinator may not reach each other's memory; empty: vLLM has found that they do, all on one machine."""
    custom = getattr(group.device_communicator, "ca_comm", None)
    return "vLLM's custom all-reduce is off, which asks whether GPUs reach each other's memory" if custom is None or custom.disabled else ""


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


def add_graphs(more: Callable[[Any], list[int]]) -> None:
    """Let vLLM capture steps of ``more(vllm_config)`` tokens, beyond those that it captures by itself. Sizes that the user or the model has set stay.

    May be called again.
    """

    def set_sizes(original: Callable[[Any], None], vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        given = compilation.cudagraph_capture_sizes is not None or compilation.max_cudagraph_capture_size is not None
        original(vllm_config)
        if not given and compilation.cudagraph_capture_sizes and (added := more(vllm_config)):
            compilation.cudagraph_capture_sizes = [*compilation.cudagraph_capture_sizes, *added]
            compilation.max_cudagraph_capture_size = added[-1]
            original(vllm_config)

    _wrap_once(__getattr__("VllmConfig"), "_set_cudagraph_sizes", set_sizes)


def stream_weights(own: Callable[[Any, Path], Iterator[tuple[str, Tensor]] | None]) -> None:
    """Let ``own(vllm_config, folder)`` give a model's weights in place of vLLM's reader of files, unless it returns None. May be called again."""
    config = __getattr__("get_current_vllm_config_or_none")

    def get_weights(original: Callable[..., Iterator[tuple[str, Tensor]]], loader: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        weights = own(config(), Path(model_config.model))
        return original(loader, model_config, model) if weights is None else weights

    _wrap_once(__getattr__("DefaultModelLoader"), "get_all_weights", get_weights)


def _wrap_once(owner: type, name: str, around: Callable[..., Any]) -> None:
    """A call of the method ``name`` of ``owner`` is ``around(the method, *arguments)`` from now on, in this process. A second time changes nothing."""
    original = getattr(owner, name)
    if hasattr(original, "_fp4_inductor"):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapped._fp4_inductor = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


# Routers that choose by a plain softmax, and what is said of a layer with another one.
_PLAIN_ROUTERS = ("FusedTopKRouter", "CPURouter")
_OTHER_ROUTERS = {
    "CustomRoutingRouter": "the model has a routing function of its own",
    "FusedTopKBiasRouter": "a correction bias or a table takes part in the choice",
    "GroupedTopKRouter": "experts are chosen in groups",
    "RoutingSimulatorRouter": "VLLM_MOE_ROUTING_SIMULATION_STRATEGY is set",
    "ZeroExpertRouter": "the model has zero experts",
}


def compilation_config() -> Any:
    """Of the engine that is being built in this process, with its layers; None: there is none."""
    return getattr(__getattr__("get_current_vllm_config_or_none")(), "compilation_config", None)


def runner_of(layer: Any, compilation: Any) -> Any:
    """What runs a layer of experts. vLLM 0.22 has it in the layer, 0.32 has the layer in it."""
    return layer.runner if hasattr(layer, "runner") else compilation.static_forward_context[layer.layer_name]


def obstacles(runner: Any, moe: Any) -> Iterator[str]:
    """Why the routing of a layer is not a softmax over the scores of a plain gate and its k largest. Only the first one is to be read.

    Args:
        moe: vLLM's FusedMoEConfig.
    """
    gate, router, parallel = runner.gate, runner.router, moe.moe_parallel_config
    kind = type(router).__name__
    if type(runner) is not __getattr__("MoERunner"):
        yield f"the model runs its experts by a {type(runner).__name__}"
    if gate is None:
        yield "the model computes the scores outside of the layer of experts"
    if kind not in _PLAIN_ROUTERS:
        yield _OTHER_ROUTERS.get(kind, f"the router is a {kind}")
    if router.scoring_func != "softmax":
        yield f"scores are weighted by a {router.scoring_func}"
    if kind == "CPURouter":  # one class for all that the other classes do
        if router.use_grouped_topk:
            yield _OTHER_ROUTERS["GroupedTopKRouter"]
        if router.custom_routing_function is not None:
            yield _OTHER_ROUTERS["CustomRoutingRouter"]
        if router.e_score_correction_bias is not None or router._hash_indices_table is not None:
            yield _OTHER_ROUTERS["FusedTopKBiasRouter"]
        if router.routed_scaling_factor != 1.0:
            yield "the router scales its weights"
    if router.eplb_state is not None:
        yield "experts are balanced between ranks"
    if parallel.dp_size > 1 or parallel.pcp_size > 1 or parallel.is_sequence_parallel:
        yield "data-, context- or sequence-parallel ranks exchange tokens with their scores"
    if runner.shared_expert_gate is not None:
        yield "the gate of the shared experts is part of the router's product"
    if runner.routed_input_transform is not None:
        yield "the experts' input is transformed"
    if __getattr__("VLLM_BATCH_INVARIANT"):
        yield "VLLM_BATCH_INVARIANT is set"
    yield from _obstacles_of_gate(gate, router)


def _obstacles_of_gate(gate: Any, router: Any) -> Iterator[str]:
    if type(gate) not in (__getattr__("ReplicatedLinear"), __getattr__("GateLinear")):
        yield f"the gate is a {type(gate).__name__}"
    if type(gate.quant_method) is not __getattr__("UnquantizedLinearMethod"):
        yield "the gate is quantized"
    if __getattr__("current_platform").is_cpu() and not (hasattr(gate, "cpu_linear") and gate.weight.numel()):
        yield "vLLM packs the gate's weight for this CPU"
    if getattr(gate, "out_dtype", None) not in (None, gate.weight.dtype):
        yield f"scores are {gate.out_dtype} of a gate in {gate.weight.dtype}"
    if gate.weight.shape[0] != router.global_num_experts:
        yield f"the gate has {gate.weight.shape[0]} scores for {router.global_num_experts} experts"


class _NoGate(torch.nn.Module):
    """Stands for a gate that is not run: it hands the tokens to the router in place of their scores."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x, None


def choose_experts(runner: Any, route: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]) -> None:
    """Let ``route(tokens, weight of the gate, its bias)`` give (weights, ids) of a layer without :func:`obstacles`. The runner's gate is not run any more.

    vLLM's router still calls it, and does what it does behind the choice (it records ids, for example). A mask of the tokens that only fill a
    CUDA graph up has the same effect as in vLLM's kernel: their experts are not read. A step of one token has none of these.
    """
    gate, router = runner.gate, runner.router
    module = importlib.import_module(_WHERE["FusedTopKRouter"])
    mask_of = getattr(module, "_get_padding_mask", None) if type(router) is module.FusedTopKRouter else None

    def compute_routing(hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Any = None) -> tuple[Tensor, Tensor]:
        weights, ids = route(hidden_states, gate.weight, None if gate.skip_bias_add else gate.bias)
        if mask_of is not None and ids.shape[0] > 1 and (fills := mask_of(ids.shape[0])) is not None:
            ids.masked_fill_(fills[:, None], -1)
        return weights, ids

    runner.gate = _NoGate()
    router._compute_routing = compute_routing
