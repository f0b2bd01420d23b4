"""Routed experts: one call of ``fp4.moe`` for a layer. Shared experts and the reductions between ranks are vLLM's. :mod:`.routing` says whose routing is.

A method without a modular kernel of vLLM's is given tokens and their routing, and returns the weighted sum of its own experts. Under
expert parallelism ``expert_map`` gives the local id of each expert, -1 for those of other ranks, which is what ``fp4.moe`` takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedOpError
from ...formats import nvfp4
from ...formats.packing import PackedExperts, pack_experts
from ...kernels.moe.held import HeldExperts
from ...ops.activation import Activation
from ...ops.moe_call import ExpertWeight, flat
from . import compiling, gpt_oss, routing
from .dummy import fill_dummy
from .engine import (
    FusedMoEMethodBase,
    FusedMoEQuantConfig,
    FusedMoeWeightScaleSupported,
    compilation_config,
    initialize_online_processing,
    set_weight_attrs,
)
from .linear import META, Names, frozen, nan, never_loaded, quantized
from .refusals import check_columns, check_experts
from .settings import Settings

# vLLM's name of what lies between the two products -> ours. A name that ends in "_no_mul" has no gate.
_SAME = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh", "relu2": "relu2"}
_GPT_OSS = (1.702, 7.0)


def activation_of(moe: Any, prefix: str) -> Activation:
    """The :class:`Activation` of vLLM's FusedMoEConfig.

    Raises:
        UnsupportedOpError: one that ``fp4.moe`` does not compute.
    """
    name = str(getattr(moe.activation, "value", moe.activation))
    limit, alpha, beta = (getattr(moe, f"swiglu_{field}", None) for field in ("limit", "alpha", "beta"))
    plain = _SAME.get(name.removesuffix("_no_mul"))
    if plain is not None:
        if beta or (alpha not in (None, 1.0) and plain != "silu"):
            plain = None
        else:
            return Activation(plain, 1.0 if alpha is None else float(alpha), float(limit) if limit else None)
    if name == "swigluoai":
        return Activation("swiglu_oai", *_GPT_OSS, interleaved=True)
    if name == "swigluoai_uninterleave" and beta in (0.0, 1.0, None):
        return Activation("swiglu_oai" if beta else "silu", 1.0 if alpha is None else float(alpha), float(limit) if limit else None)
    raise UnsupportedOpError(
        f"{prefix}: this activation of experts is not served",
        value=f"{name}, limit {limit}, alpha {alpha}, beta {beta}",
        limit=[*_SAME, "swigluoai"],
        remedy='Serve this model without quantization="fp4_inductor".',
    )


class _Experts(FusedMoEMethodBase):
    """What both methods do. ``own_router``: why vLLM's router chooses the experts of the layer; "": ``fp4.router`` does."""

    def __init__(self, moe: Any, prefix: str, settings: Settings, dummy: bool):
        super().__init__(moe)
        check_experts(prefix, moe)
        self.prefix, self.settings, self.dummy = prefix, settings, dummy
        self.activation = activation_of(moe, prefix)
        self.gates = 2 if moe.is_act_and_mul else 1
        self.compilation = compilation_config()
        self.own_router = "its weights are not loaded"

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FusedMoEQuantConfig.make()

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """vLLM 0.22: None leaves the exchange between data-parallel ranks to the runner."""

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32 if self.own_router else None  # None: as they are, int64

    def _register(self, layer: Any, name: str, data: Tensor, extra: dict[str, Any], kind: Any = None) -> None:
        layer.register_parameter(name, frozen(data))
        set_weight_attrs(getattr(layer, name), {**extra, "quant_method": kind.value} if kind is not None else extra)

    def _check(self, layer: Any, hidden: int, inner: int, sparse: bool, online: bool = False) -> None:
        check_columns(f"{self.prefix} (gate and up)", hidden, hidden, sparse, online)
        whole = getattr(self.moe, "intermediate_size", None) or inner * self.moe.tp_size
        check_columns(f"{self.prefix} (down)", inner, whole, sparse, online)
        compiling.add_experts(self.settings)

    def _add_biases(self, layer: Any, experts: int, hidden: int, inner: int, dtype: torch.dtype, extra: dict[str, Any]) -> None:
        if getattr(self.moe, "has_bias", False):
            self._register(layer, "w13_bias", torch.zeros(experts, self.gates * inner, dtype=dtype), extra)
            self._register(layer, "w2_bias", torch.zeros(experts, hidden, dtype=dtype), extra)

    def _keep(self, layer: Any, gate_up: Any, down: Any) -> None:
        for name, packed in (("w13", gate_up), ("w2", down)):
            setattr(layer, f"{name}_weight", frozen(packed.codes))
            setattr(layer, f"{name}_weight_scale", frozen(packed.scale))
            setattr(layer, f"{name}_weight_global_scale", frozen(packed.global_scale))
            if packed.meta is not None:
                setattr(layer, f"{name}_{META}", frozen(packed.meta))
        if getattr(layer, "w2_bias", None) is not None and self.moe.tp_size > 1 and self.moe.tp_rank:
            layer.w2_bias.data.zero_()  # the sum over ranks counts it once
        layer.fp4_packed = True
        self.own_router = routing.take(layer, self.moe, self.settings, self.compilation)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None, shared_experts_input: Any = None) -> Tensor:
        # On a GPU vLLM runs experts inside of one operator, in Python: nothing traces them there.
        if not torch.compiler.is_compiling():
            return self._held(layer)(x, topk_ids, topk_weights, layer.expert_map)
        gate_up, down = (weight_of(layer, name) for name in ("w13", "w2"))
        tokens, on_input = (x, topk_ids, topk_weights), bool(layer.apply_router_weight_on_input)
        return torch.ops.fp4.moe(*flat(tokens, gate_up, down, self.activation, on_input, layer.expert_map, self.settings.prefill))

    def _held(self, layer: Any) -> HeldExperts:
        """Made at the first call, and again if the layer got other parameters."""
        held = layer.__dict__.get("fp4_held")
        if held is None or held.gate_up.qdata is not layer.w13_weight:
            gate_up, down = (ExpertWeight(*weight_of(layer, name)) for name in ("w13", "w2"))
            held = HeldExperts(gate_up, down, self.activation, bool(layer.apply_router_weight_on_input), self.settings.prefill)
            layer.__dict__["fp4_held"] = held
        return held


def weight_of(layer: Any, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The fields of an :class:`ExpertWeight` of a packed layer. ``name``: "w13" or "w2"."""
    parts = (getattr(layer, f"{name}_weight{part}") for part in ("", "_scale", "_global_scale"))
    return *parts, *(getattr(layer, f"{name}_{part}", None) for part in ("bias", META))  # type: ignore[return-value]


class FP4MoEMethod(_Experts):
    """Experts in NVFP4, dense or 2:4-sparse (``sparse``: of gate/up, of down), under the names of ``names``.

    Raises:
        ShapeError, UnsupportedOpError: as :mod:`.refusals`. CheckpointError, NonFiniteError: scales that are not in the checkpoint, or NaN.
    """

    def __init__(self, moe: Any, names: Names, prefix: str, settings: Settings, dummy: bool, sparse: tuple[bool, bool] = (False, False)):
        super().__init__(moe, prefix, settings, dummy)
        self.names, self.sparse = names, sparse

    def uses_weight_scale_2_pattern(self) -> bool:
        return not self.names.divides

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, params_dtype: torch.dtype, **extra: Any
    ) -> None:
        e, h, inner, n = num_experts, hidden_size, intermediate_size_per_partition, self.names
        self._check(layer, h, inner, any(self.sparse))
        self._add_biases(layer, e, h, inner, params_dtype, extra)
        if n is gpt_oss.NAMES:
            extra = {**extra, "weight_loader": gpt_oss.share_of(layer, self.moe.tp_rank)}
        block, tensor = FusedMoeWeightScaleSupported.BLOCK, FusedMoeWeightScaleSupported.TENSOR
        for w, rows, columns, scales, sparse in (("w13", self.gates * inner, h, self.gates, self.sparse[0]), ("w2", h, inner, 1, self.sparse[1])):
            self._register(layer, f"{w}_{n.codes}", torch.empty(e, rows, columns // (4 if sparse else 2), dtype=torch.uint8), extra)
            if sparse:
                self._register(layer, f"{w}_{n.meta}", torch.zeros(e, rows, columns // 8, dtype=torch.uint8), extra, block)
            self._register(layer, f"{w}_{n.scale}", never_loaded(e, rows, columns // nvfp4.GROUP), extra, block)
            shape = (e, scales) if w == "w13" else (e,)
            self._register(layer, f"{w}_{n.global_scale}", nan(*shape), extra, tensor)
            self._register(layer, f"{w}_{n.input_scale}", nan(*shape), extra, tensor)  # loaded and dropped

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "fp4_packed"):
            return
        done = []
        for w, what, sparse in (("w13", "gate and up", self.sparse[0]), ("w2", "down", self.sparse[1])):
            codes, scale, g = (getattr(layer, f"{w}_{name}").data for name in self.names.tensors[:3])
            meta = getattr(layer, f"{w}_{self.names.meta}").data if sparse else None
            if self.dummy:
                fill_dummy(codes, scale, g, meta, self.names.divides)
            if missing := int(g.isnan().sum()):
                raise CheckpointError(
                    f"{self.prefix} ({what}): global scales are missing or NaN",
                    value=f"{missing} of {g.numel()}",
                    limit="one for each weight of each expert",
                    remedy="Quantize all experts of a layer or none, and download the checkpoint again if it is damaged.",
                )
            done.append(pack_experts(codes, scale, g, meta=meta, divides=self.names.divides, name=f"{self.prefix} ({what})"))
        for w, sparse in (("w13", self.sparse[0]), ("w2", self.sparse[1])):
            for name in (*self.names.tensors, *((self.names.meta,) if sparse else ())):
                delattr(layer, f"{w}_{name}")
        self._keep(layer, *done)


class OnlineMoEMethod(_Experts):
    """bf16 experts that are quantized when all of a layer's are loaded. Gate and up of an expert share one global scale."""

    uses_meta_device = True

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, params_dtype: torch.dtype, **extra: Any
    ) -> None:
        e, h, inner = num_experts, hidden_size, intermediate_size_per_partition
        self._check(layer, h, inner, sparse=False, online=True)
        layer.fp4_largest = largest = LargestOfExperts(e)
        watched = {**extra, "weight_loader": largest.watch(extra["weight_loader"], layer)}
        self._register(layer, "w13_weight", torch.empty(e, self.gates * inner, h, dtype=params_dtype, device="meta"), watched)
        self._register(layer, "w2_weight", torch.empty(e, h, inner, dtype=params_dtype, device="meta"), watched)
        initialize_online_processing(layer)
        self._add_biases(layer, e, h, inner, params_dtype, extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        if hasattr(layer, "fp4_packed"):
            return
        done = []
        for w in ("w13", "w2"):
            weight = getattr(layer, f"{w}_weight").data
            packed = quantized(weight, layer.fp4_largest.of(w, weight), self.settings.scale_search, self.prefix)
            done.append(PackedExperts(*packed, None))
            delattr(layer, f"{w}_weight")
        del layer.fp4_largest
        self._keep(layer, *done)


class LargestOfExperts:
    """As :class:`.linear.Largest`, for each local expert and each of its two weights."""

    def __init__(self, experts: int):
        self.experts = experts
        self.values: dict[tuple[str, int], Tensor] = {}

    def watch(self, loader: Callable, layer: Any) -> Callable:
        @functools.wraps(loader)
        def load(param: Tensor, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, return_success: bool = False) -> Any:
            if loaded_weight.dim() == 2:
                local = layer._map_global_expert_id_to_local_expert_id(expert_id)
                if local >= 0:
                    key = ("w2" if shard_id == "w2" else "w13", int(local))
                    largest = nvfp4.check_finite(loaded_weight.detach())
                    before = self.values.get(key)
                    self.values[key] = largest if before is None else torch.maximum(before, largest)
            return loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=return_success)

        return load

    def of(self, which: str, weight: Tensor) -> Tensor:
        """``[E]``: what was seen, or the maximum of what is here for an expert that came in another way (all in one tensor; dummy weights)."""
        here = nvfp4.check_finite(weight)
        for e in range(self.experts):
            if (seen := self.values.get((which, e))) is not None:
                here[e] = seen.to(here.device, here.dtype)
        return here
