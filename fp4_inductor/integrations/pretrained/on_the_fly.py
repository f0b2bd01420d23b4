"""Quantize weights one by one as transformers reads a dense checkpoint: the dense model is never in memory as a whole."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps

from ...config import NVFP4Config
from ...errors import FP4Error, NonFiniteError
from ...models.convert import install_group, quantize_dense
from ...models.coverage import LayerReport
from ...models.plan import make_plan
from ...models.preflight import uncovered_errors
from ...modules import FP4Linear


class QuantizeOnLoad(ConversionOps):
    """The operation transformers runs on each weight of the plan when its values arrive.

    Raises:
        CoverageError: ``strict``, and a weight outside the skip list would stay in high precision.
    """

    def __init__(self, model: PreTrainedModel, config: Any):
        self.config = NVFP4Config(scale_search=config.scale_search, large_m=config.large_m)
        self.plan = make_plan(model, config.ignore)
        if config.strict and self.plan.uncovered:
            raise uncovered_errors(self.plan)[0]
        self.groups = {f"{group[0].name}.weight": group for group in self.plan.groups}
        self.layers: dict[str, tuple[FP4Linear, float]] = {}
        self.failed: list[tuple[str, FP4Error]] = []

    def wants(self, name: str) -> bool:
        return name in self.groups

    def convert(self, input_dict: dict[str, Any], *args: Any, full_layer_name: str = "", missing_keys: set[str] | None = None, **kwargs: Any) -> dict:
        """Keep the quantized layer; nothing is left for transformers to place."""
        value: Any = next(iter(input_dict.values()))
        weight: Tensor = value[0] if isinstance(value, list) else value
        target = self.groups[full_layer_name][0]
        try:
            self.layers[full_layer_name] = quantize_dense(weight.t() if target.transposed else weight, self.config)
        except FP4Error as error:  # transformers would print it and go on
            self.failed.append((full_layer_name, error))
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        target.module.get_parameter("weight")._is_hf_initialized = True  # type: ignore[attr-defined]
        return {}

    def finish(self, model: PreTrainedModel) -> list[LayerReport]:
        """Put the layers into the model, now that their biases are there too."""
        if self.failed:
            name, error = self.failed[0]
            raise NonFiniteError(
                f"{name} cannot be quantized, and {len(self.failed) - 1} others: {error.what}",
                value=error.value,
                limit=error.limit,
                remedy=f"Repair the weight, or name its layer in ignore=[{name.removesuffix('.weight')!r}].",
            )
        rows: list[LayerReport] = []
        for name, (layer, relative) in self.layers.items():
            rows += install_group(model, self.groups[name], layer, relative)[1]
        return rows
