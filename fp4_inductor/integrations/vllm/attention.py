"""Decode steps of vLLM's FlashAttention backend by ``fp4.paged_attention``: one launch where vLLM has three (append, attention, combination).

Cache, metadata, prompts and everything that the kernel does not serve stay vLLM's: the classes here are those of its backend, and differ where every sequence
of a step has one token. They stand in the place of vLLM's from the first layer of ours that is built; engines without one get vLLM's own from :class:`Backend`.

A step of one token each is one also under a CUDA graph: vLLM captures such steps on their own (``UNIFORM_BATCH``). It does not where a backend says that its
graphs serve any mixture of prompts and decodes, which FlashAttention 3 says, and which this one cannot.

Over a cache in FP8, FlashAttention takes queries in FP8, too, which vLLM rounds for every step. This kernel multiplies them as they are, so they are rounded
here, and only for the steps that are FlashAttention's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...config import dispatch_config
from ...kernels import select
from ...kernels.asked import cache_in
from ...kernels.kernel import Call
from ...kernels.paged_attention.cuda import MOST_ROWS, NAME, NAME_OF_FP8, TOKENS, WIDTHS
from ...ops.paged_attention import CODES
from . import engine
from .engine import AttentionCGSupport, FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder, get_current_vllm_config_or_none
from .graphs import VLLMS_OWN
from .log import say_once

_HALF = (torch.bfloat16, torch.float16)
_FP8 = ("fp8", "fp8_e4m3")  # vLLM's names of a cache in E4M3, whose tensor is in bytes


def _is_ours(vllm_config: Any) -> bool:
    return getattr(getattr(vllm_config, "quant_config", None), "of_fp4_inductor", False)


class Backend(FlashAttentionBackend):
    """As vLLM's, whose name it keeps."""

    @staticmethod
    def get_impl_cls() -> type:
        return Attention if _is_ours(get_current_vllm_config_or_none()) else FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder


class Builder(FlashAttentionMetadataBuilder):
    """What a step's attention is called with. Without layers of ours it is vLLM's."""

    max_cudagraph_size: int | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._whole_graphs, speculative = self.max_cudagraph_size, getattr(self.vllm_config, "speculative_config", None)
        self._most_queries = 1 + (getattr(speculative, "num_speculative_tokens", 0) or 0)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value) if _is_ours(vllm_config) else support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Without FlashAttention 3's schedule where every layer attends by ``fp4.paged_attention``: making it costs each step launches and time of the host."""
        one_each = common_attn_metadata.max_query_len == 1 and not common_prefix_len
        if _is_ours(self.vllm_config):
            # In a step of up to so many tokens FlashAttention is made to split keys into 32 parts, with memory for the sums of all, because in a CUDA graph it
            # may not choose. A prompt of more than 512 tokens lies in no whole graph, though graphs.TOKENS are larger: 1 GiB for 2,048 tokens of 32 heads.
            prompt = common_attn_metadata.max_query_len > self._most_queries and common_attn_metadata.num_actual_tokens > VLLMS_OWN
            self.max_cudagraph_size = None if prompt else self._whole_graphs
        return super().build(common_prefix_len, common_attn_metadata, fast_build or (one_each and self._are_all_served))

    @functools.cached_property
    def _are_all_served(self) -> bool:
        layers = self.vllm_config.compilation_config.static_forward_context
        impls = [getattr(layers.get(name), "impl", None) for name in self.layer_names]
        return all(isinstance(impl, Attention) and not impl.why_not for impl in impls)


class Attention(FlashAttentionImpl):
    """One layer's."""

    supports_quant_query_input: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        vllm_config = get_current_vllm_config_or_none()
        self.dtype, self.compilation = vllm_config.model_config.dtype, vllm_config.compilation_config
        select.compile_ahead([_call(self, select.arch_of(_device()))])  # while weights are loaded
        # vLLM asks the second of these for whether it is to round queries. The kernel may still be compiled: nobody waits for it here.
        self.rounds_queries = self.supports_quant_query_input and _in_fp8(self) and not _why_not(self, select.expect)
        self.supports_quant_query_input &= not self.rounds_queries

    def serves(self, metadata: Any, kv_cache: Tensor) -> bool:
        """Is this a step of one token each that the kernel serves? The same answer to the append and to the attention of a layer."""
        if metadata is None or metadata.max_query_len != 1 or metadata.use_cascade or not getattr(metadata, "causal", True):
            return False
        is_known = kv_cache.dtype in ((torch.uint8, CODES) if _in_fp8(self) else _HALF)
        return not self.why_not and is_known and kv_cache.shape[2] % TOKENS == 0

    @functools.cached_property
    def why_not(self) -> str:
        """Why the kernel serves none of this layer's steps; empty: it does. An engine logs each answer once."""
        reason = _why_not(self, select.describe)
        say_once(f"vLLM's FlashAttention serves decode steps: {reason}" if reason else "fp4.paged_attention serves decode steps", self.compilation)
        return reason

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        metadata = engine.get_attention_context(layer.layer_name)[0]
        if not self.serves(metadata, kv_cache):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Any = None, *scales: Any, **options: Any
    ) -> Tensor:
        asked = any(s is not None for s in (*scales, *options.values()))  # a rounded result
        if asked or output is None or not self.serves(attn_metadata, kv_cache):
            return self._flash_attention(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options)
        rows = _rows(attn_metadata)
        cache, of_codes = (kv_cache.view(CODES), (layer._k_scale, layer._v_scale)) if _in_fp8(self) else (kv_cache, ())
        keys, values = cache.unbind(0)
        window, softcap = self.sliding_window[0] + 1, self.logits_soft_cap
        # No kernel of a step writes the cache, the table or the lengths but attention itself, and the one before it has ended: what lies between waits for it.
        torch.ops.fp4.paged_attention(
            query[:rows], key[:rows], value[:rows], keys, values, attn_metadata.block_table[:rows], attn_metadata.seq_lens[:rows],
            attn_metadata.slot_mapping[:rows], output.view(-1, self.num_heads, self.head_size)[:rows], self.scale, window or None, softcap or None,
            self.sinks, True, *of_codes,
        )  # fmt: skip
        return output

    def _flash_attention(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any, *rest: Any, **options: Any) -> Tensor:
        if not self.rounds_queries or metadata is None:
            return super().forward(layer, query, key, value, kv_cache, metadata, *rest, **options)
        scale = layer._q_scale if layer._q_scale.numel() == 1 else layer._q_scale.view(1, -1)  # one of all, or one of each KV head
        rounded = engine.scaled_fp8_quant(query.flatten(1).contiguous(), scale)[0].view(query.shape)
        self.supports_quant_query_input = True  # FlashAttention reads it as "the query has a scale"
        try:
            return super().forward(layer, rounded, key, value, kv_cache, metadata, *rest, **options)
        finally:
            self.supports_quant_query_input = False


def _rows(metadata: Any) -> int:
    """Sequences of a step of one token each: those of padding, too."""
    return min(metadata.num_actual_tokens, len(metadata.seq_lens))


def _why_not(layer: Any, described: Callable[..., Call]) -> str:
    group = layer.num_heads // layer.num_kv_heads
    asked = {
        f"vLLM {engine.version()}, with which it has not run": engine.version() not in engine.ATTENTION_VERSIONS,
        f"heads of width {layer.head_size}, not {' or '.join(map(str, WIDTHS))}": layer.head_size not in WIDTHS,
        f"{group} heads that share a KV head, more than {MOST_ROWS}": group > MOST_ROWS,
        f'a KV cache in "{layer.kv_cache_dtype}"': layer.kv_cache_dtype not in ("auto", "bfloat16", "float16", *_FP8),
        "ALiBi": layer.alibi_slopes is not None,
        "attention that is not a decoder's": str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder",
        "a layer that reads another layer's cache": layer.kv_sharing_target_layer_name is not None,
        "a context that ranks share": layer.dcp_world_size > 1,
        "VLLM_BATCH_INVARIANT: how a sequence is divided follows the batch": layer.batch_invariant_enabled,
    }
    reason = next((what for what, is_asked in asked.items() if is_asked), "")
    if reason:
        return reason
    call = described("paged_attention", _device(), layer.dtype, layer.num_heads, layer.head_size, form=_form(layer))
    plan, name = select.plan(call, dispatch_config()), NAME_OF_FP8 if _in_fp8(layer) else NAME
    if plan.pick(group).kernel == name:
        return ""
    return next(refused.reason for refused in plan.refused if refused.kernel.name == name)


def _call(layer: Any, arch: int) -> Call:
    return Call("paged_attention", arch, layer.dtype, layer.num_heads, layer.head_size, triton=select.triton_version(), form=_form(layer))


def _in_fp8(layer: Any) -> bool:
    return layer.kv_cache_dtype in _FP8


def _form(layer: Any) -> tuple[str, ...]:
    return (cache_in("fp8"),) if _in_fp8(layer) else ()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
