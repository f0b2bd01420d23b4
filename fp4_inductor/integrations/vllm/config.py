"""Checkpoints of other libraries: which method each of their layers gets.

Each config is a subclass of vLLM's own config of the format: what is excluded, how names of merged layers are matched, and the scales
of a KV cache stay vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import compiling, gpt_oss, ranks, weights
from .engine import (
    CompressedTensorsConfig,
    LinearBase,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ParallelLMHead,
    RoutedExperts,
    UnquantizedLinearMethod,
    current_platform,
    get_current_vllm_config_or_none,
    replace_flash_attention,
)
from .refusals import ACTIVATIONS, NVFP4, check_platform
from .settings import Settings, settings_of


class Common:
    """What every config here does besides vLLM's own part. ``stored``: a folder that :func:`.weights.stream` reads instead of vLLM."""

    of_fp4_inductor = True
    source: dict[str, Any] | None = None
    stored: weights.Stored | None = None

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # vLLM's message would have no remedy: check_platform

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return ACTIVATIONS

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """vLLM calls this while it makes its configuration: before a process is started and before memory is taken."""
        check_platform(current_platform)
        self.look_into(Path(model_name), hf_config, revision)

    def look_into(self, folder: Path, hf_config: Any, revision: str | None) -> None:
        from .preflight import check_folder

        if self.source is not None:
            check_folder(folder, self.source)

    def begin(self) -> tuple[Settings, bool]:
        """Called for each layer while the model is built, in the process that will compile it: (options, are the weights random?)."""
        vllm_config = get_current_vllm_config_or_none()
        settings = settings_of(vllm_config)
        compiling.set_fields(settings)
        ranks.join(vllm_config)
        compiling.mark_cache(vllm_config)  # whose salt knows the ranks that share memory
        if vllm_config is not None and current_platform.is_cuda():
            replace_flash_attention(f"{__package__}.attention.Backend")
        load = getattr(vllm_config, "load_config", None)
        return settings, str(getattr(load, "load_format", "")) == "dummy"


class Foreign(Common):
    """What the configs of other libraries' checkpoints do besides, before vLLM's own config of the format in their bases."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        made = super().from_config(config)  # type: ignore[misc]
        made.source = config
        return made

    def look_into(self, folder: Path, hf_config: Any, revision: str | None) -> None:
        super().look_into(folder, hf_config, revision)
        if gpt_oss.is_gpt_oss(hf_config):
            self.look_into_gpt_oss(folder, hf_config, revision)

    def look_into_gpt_oss(self, folder: Path, hf_config: Any, revision: str | None) -> None:
        source = self.source or {}
        gpt_oss.refuse_format(str(source.get("quant_algo") or source.get("quant_method")))


def nvfp4_linear(layer: Any, names: Any, prefix: str, begun: tuple[Settings, bool]) -> Any:
    from .linear import FP4LinearMethod

    return FP4LinearMethod(names, prefix, *begun)


def nvfp4_experts(layer: Any, names: Any, prefix: str, begun: tuple[Settings, bool]) -> Any:
    from .experts import FP4MoEMethod

    return FP4MoEMethod(layer.moe_config, names, prefix, *begun)


class ModelOptConfig(Foreign, ModelOptNvFp4Config):
    """ModelOpt NVFP4 and W4A16_NVFP4. get_name() stays vLLM's: its models ask for it."""

    of_gpt_oss = False

    def look_into_gpt_oss(self, folder: Path, hf_config: Any, revision: str | None) -> None:
        self.of_gpt_oss = True
        if not folder.is_dir() or any(folder.glob("*.safetensors")):  # a folder without weights: load_format="dummy"
            self.stored = weights.look_into(weights.on_this_machine(folder, revision), hf_config, self.source)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from .linear import MODELOPT

        begun = self.begin()
        # Not super() first: vLLM's methods look for a kernel of their own when they are made, and a CPU has none.
        if isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            if self.is_layer_excluded(prefix):
                return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
            if _is_vision(prefix):
                return super().get_quant_method(layer, prefix)
            if isinstance(layer, RoutedExperts):
                return nvfp4_experts(layer, gpt_oss.NAMES if self.of_gpt_oss else MODELOPT, prefix, begun)
            return nvfp4_linear(layer, MODELOPT, prefix, begun)
        return super().get_quant_method(layer, prefix)


def _is_vision(prefix: str) -> bool:
    """Towers that older exporters left out of the list of excluded layers; vLLM's rule."""
    return "vision_tower" in prefix or "vision_model" in prefix


class MixedConfig(Foreign, ModelOptMixedPrecisionConfig):
    """ModelOpt MIXED_PRECISION: NVFP4 layers are ours, all others (FP8) run as vLLM runs them."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from .linear import MODELOPT, ModelOptFP8LinearMethod

        begun = self.begin()
        if isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)) and not self.is_layer_excluded(prefix):
            algorithm = self._resolve_quant_algo(prefix)
            if algorithm in NVFP4:
                return (nvfp4_experts if isinstance(layer, RoutedExperts) else nvfp4_linear)(layer, MODELOPT, prefix, begun)
            if algorithm == "FP8" and not isinstance(layer, RoutedExperts) and current_platform.is_cpu():
                return ModelOptFP8LinearMethod(prefix, *begun)  # vLLM has no such kernel for a CPU
        elif isinstance(layer, ParallelLMHead):
            return None
        return super().get_quant_method(layer, prefix)


class CompressedConfig(Foreign, CompressedTensorsConfig):
    """compressed-tensors: the layers in nvfp4-pack-quantized are ours, all others run as vLLM runs them."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from .linear import COMPRESSED

        begun = self.begin()
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            projections = (getattr(layer, f"ckpt_{name}_proj_name", f"{name}_proj") for name in ("gate", "up", "down"))
            if all(self._is_ours(layer, f"{prefix}.0.{name}") for name in projections if name):
                return nvfp4_experts(layer, COMPRESSED, prefix, begun)
        elif isinstance(layer, (LinearBase, ParallelLMHead)) and self._is_ours(layer, prefix):
            return nvfp4_linear(layer, COMPRESSED, prefix, begun)
        return super().get_quant_method(layer, prefix)

    def _is_ours(self, layer: Any, prefix: str) -> bool:
        if isinstance(layer, ParallelLMHead):
            if _has_tied_head():
                return False
            layer = torch.nn.Linear(1, 1, device="meta")  # which the format's "targets" mean; vLLM's class has another name
        try:
            scheme = self.get_scheme_dict(layer, prefix)
        except ValueError:  # no group has this layer
            return False
        weights = (scheme or {}).get("weights")
        return weights is not None and self._is_nvfp4_format(weights)


def _has_tied_head() -> bool:
    """Is the output head the embedding? vLLM makes it, then puts the embedding in its place."""
    model = getattr(get_current_vllm_config_or_none(), "model_config", None)
    return bool(getattr(getattr(model, "hf_text_config", None), "tie_word_embeddings", False))
