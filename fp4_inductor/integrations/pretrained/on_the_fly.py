"""Quantize weights one by one as transformers reads a dense checkpoint: the dense model is never in memory as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps

from ...config import NVFP4Config, weight_only
from ...errors import FP4Error, NonFiniteError, list_names
from ...models.convert import experts_row, install_experts, install_group, quantize_dense, quantize_expert_weight, rows_to_pad
from ...models.coverage import LayerReport
from ...models.plan import make_plan
from ...models.preflight import uncovered_errors
from ...modules import FP4ExpertWeight, FP4Linear


class QuantizeOnLoad(ConversionOps):
    """The operation transformers runs on each weight of the plan when its values arrive.

    Raises:
        CoverageError, GatingError: more weights outside the skip list would stay in high precision than ``strict`` allows.
    """

    def __init__(self, model: PreTrainedModel, config: Any):
        self.config = NVFP4Config(scale_search=config.scale_search, prefill=config.prefill)
        self.plan = make_plan(model, config.ignore)
        for error in uncovered_errors(self.plan, config.strict):
            raise error
        self.groups = {f"{group[0].name}.weight": group for group in self.plan.groups}
        self.experts = {f"{t.name}.{name}": t for t in self.plan.experts for name in t.spec.parameters[:2]}
        self.pads = {t.name: rows_to_pad(t) for t in self.plan.experts}
        self.layers: dict[str, tuple[FP4Linear, float]] = {}
        self.expert_weights: dict[str, tuple[FP4ExpertWeight, float]] = {}
        self.failed: list[tuple[str, FP4Error]] = []

    def wants(self, name: str) -> bool:
        return name in self.groups or name in self.experts

    def convert(self, input_dict: dict[str, Any], *args: Any, full_layer_name: str = "", missing_keys: set[str] | None = None, **kwargs: Any) -> dict:
        """Keep the quantized layer; nothing is left for transformers to place."""
        value: Any = next(iter(input_dict.values()))
        weight: Tensor = value[0] if isinstance(value, list) else value
        _, _, attribute = full_layer_name.rpartition(".")
        try:
            if full_layer_name in self.experts:
                experts = self.experts[full_layer_name]
                module = experts.module
                self.expert_weights[full_layer_name] = quantize_expert_weight(experts, weight, self.config, self.pads[experts.name][attribute])
            else:
                target = self.groups[full_layer_name][0]
                module = target.module
                self.layers[full_layer_name] = quantize_dense(weight.t() if target.transposed else weight, self.config)
        except FP4Error as error:  # transformers would print it and go on
            self.failed.append((full_layer_name, error))
            return {}
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        module.get_parameter(attribute)._is_hf_initialized = True  # type: ignore[attr-defined]
        return {}

    def finish(self, model: PreTrainedModel) -> list[LayerReport]:
        """Put the layers into the model, now that their biases are there too."""
        if self.failed:
            name, error = self.failed[0]
            raise NonFiniteError(
                f"{list_names(n for n, _ in self.failed)} cannot be quantized: {error.what}",
                value=error.value,
                limit=error.limit,
                remedy=f"Repair the weight, or name its layer in ignore=[{name.removesuffix('.weight')!r}].",
            )
        rows: list[LayerReport] = []
        for name, (layer, relative) in self.layers.items():
            rows += install_group(model, self.groups[name], layer, relative)[1]
        for target in self.plan.experts:
            weights = {name: self.expert_weights[f"{target.name}.{name}"] for name in target.spec.parameters[:2]}
            rows += [experts_row(target, name, packed, relative) for name, (packed, relative) in weights.items()]
            install_experts(model, target, {name: packed for name, (packed, _) in weights.items()}, self.pads[target.name], weight_only(self.config.prefill))
        return rows
