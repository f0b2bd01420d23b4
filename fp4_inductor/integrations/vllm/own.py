"""The config of our own checkpoints (``fp4_inductor.save``, ``save_pretrained``), and of dense ones that are quantized while they load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ...checkpoint.manifest import FILE as NATIVE
from ...errors import CheckpointError
from ...formats import fp8, nvfp4, sparse24
from ...models import families
from . import gpt_oss, weights
from .config import Common
from .engine import Attention, BaseKVCacheMethod, LinearBase, MLAAttention, ParallelLMHead, RoutedExperts, UnquantizedLinearMethod
from .named import Named

# Layers that one merged layer of vLLM stands for, where its model does not say.
_MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class OwnConfig(Common, Named):
    """``stored`` is what is in the folder (:class:`.weights.Stored`); None: the weights are dense and are quantized while they load."""

    def __init__(self, source: dict[str, Any] | None = None):
        super().__init__()
        self.source = source
        self.formats: dict[str, str] = {}
        self.of_gpt_oss = False

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OwnConfig:
        return cls(config)

    def look_into(self, folder: Path, hf_config: Any, revision: str | None) -> None:
        self.of_gpt_oss = gpt_oss.is_gpt_oss(hf_config)
        if self.source is None and not (folder / NATIVE).exists():
            if self.of_gpt_oss:
                gpt_oss.refuse_format("a dense checkpoint, which is not quantized while it loads")
            return
        self.stored = weights.look_into(weights.on_this_machine(folder, revision), hf_config)
        self.formats = dict(self.stored.formats)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.formats = hf_to_vllm_mapper.apply_dict(self.formats)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        settings, _ = begun = self.begin()
        if isinstance(layer, (Attention, MLAAttention)):
            return BaseKVCacheMethod(self)
        if not isinstance(layer, (LinearBase, ParallelLMHead, RoutedExperts)):
            return None
        dense = UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if self.stored is None:
            return dense if self._stays_dense(layer, prefix, settings) else self._online(layer, prefix, begun)
        found = self._formats_of(prefix)
        if not found:
            return dense
        if isinstance(layer, RoutedExperts):
            from .experts import FP4MoEMethod
            from .linear import MODELOPT

            down = self._names_of_down(layer)
            first, second = ({f for name, f in found.items() if (name.rpartition(".")[2] in down) == last} for last in (False, True))
            self._check_one(prefix, first), self._check_one(prefix, second)
            names = gpt_oss.NAMES if self.of_gpt_oss else MODELOPT
            return FP4MoEMethod(layer.moe_config, names, prefix, *begun, sparse=(sparse24.NAME in first, sparse24.NAME in second))
        from .linear import MODELOPT, FP4LinearMethod, FP8LinearMethod

        kind = self._check_one(prefix, set(found.values()))
        return FP8LinearMethod(prefix, *begun) if kind == fp8.NAME else FP4LinearMethod(MODELOPT, prefix, *begun, sparse=kind == sparse24.NAME)

    def _names_of_down(self, layer: Any) -> tuple[str, ...]:
        return (getattr(layer, "ckpt_down_proj_name", "down_proj"), "down_proj", "w2", "w2_weight")  # the last: vLLM's name of gpt-oss'

    def _formats_of(self, prefix: str) -> dict[str, str]:
        """name -> format of the stored weights that this layer is made of; ``""`` for one that is stored dense."""
        if prefix in self.formats:
            return {prefix: self.formats[prefix]}
        parent, _, last = prefix.rpartition(".")
        merged = self.packed_modules_mapping.get(last) or _MERGED.get(last) or ()
        members = {f"{parent}.{name}": self.formats.get(f"{parent}.{name}", "") for name in merged}
        if any(members.values()):
            return members
        return {name: kind for name, kind in self.formats.items() if name.startswith(f"{prefix}.")}

    def _check_one(self, prefix: str, found: set[str]) -> str:
        if len(found) != 1:
            raise CheckpointError(
                f"{prefix}: vLLM merges layers that are stored in different formats",
                value=sorted(kind or "dense" for kind in found),
                limit=f"one of {nvfp4.NAME}, {sparse24.NAME}, {fp8.NAME}, dense",
                remedy="Quantize all of these layers in one format (q/k/v, gate/up): ignore=, or layers= of Sparse24Config.",
            )
        return next(iter(found))

    def _stays_dense(self, layer: Any, prefix: str, settings: Any) -> bool:
        if isinstance(layer, ParallelLMHead) or settings.names.reason((prefix,), layer, None):
            return True
        # vLLM asks before the layer has its weight, whose shape tells a router from another layer of that name.
        owner = torch.nn.Linear(layer.input_size, layer.output_size, bias=False, device="meta") if isinstance(layer, LinearBase) else layer
        return any(skip.matches(prefix, owner) for family in families() for skip in family.skips)

    def _online(self, layer: Any, prefix: str, begun: Any) -> Any:
        if isinstance(layer, RoutedExperts):
            from .experts import OnlineMoEMethod

            return OnlineMoEMethod(layer.moe_config, prefix, *begun)
        from .linear import OnlineLinearMethod

        return OnlineLinearMethod(prefix, *begun)
