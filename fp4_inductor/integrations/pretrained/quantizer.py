"""The quantizer that transformers calls while it loads a model: for ModelOpt checkpoints, for ours, and on the fly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.quantizers.base import HfQuantizer

from ...checkpoint.shards import Shards, shards_of
from ...config import Prefill
from ...decoding.attention import use_attention_backend
from ...decoding.ranks import ranks_of
from ...decoding.regions import use_regions
from ...errors import CheckpointError, ConfigError, DeviceError, list_names
from ...models import siblings
from ...models.compile_ahead import compile_ahead
from ...models.coverage import Report, record
from ...models.plan import inspect
from ...tensors.base import FP4Tensor
from ..transformers import use_experts_backend
from .fill import fill
from .on_the_fly import QuantizeOnLoad
from .parallel import is_parallel
from .plan import LoadPlan, install_empty, make_load_plan


class FP4InductorQuantizer(HfQuantizer):
    """``source`` (the checkpoint's own ``quantization_config``) given: read packed weights. Else quantize dense ones as they come in."""

    requires_calibration = False
    requires_parameters_quantization = False

    def __init__(self, quantization_config: Any, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        config = quantization_config
        source = getattr(config, "source", None)
        self.source: dict[str, Any] | None = source if source is not None else config.to_dict() if self.pre_quantized else None
        self.pre_quantized = self.source is not None
        self.prefill: Prefill = getattr(config, "prefill", "auto")
        self.attention: str = getattr(config, "attention", "auto")
        self.strict: bool | None = getattr(config, "strict", None)  # of what is read; QuantizeOnLoad has its own limit
        self.progress = True
        self.plan: LoadPlan | None = None
        self.on_load: QuantizeOnLoad | None = None
        self.dtype: torch.dtype = torch.bfloat16

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
        if any(str(place) == "disk" for place in places):
            raise DeviceError(
                "packed weights cannot stay on disk", value=device_map, limit="devices with memory", remedy="Leave out the disk: FP4 weights are a quarter."
            )

    def _process_model_before_weight_loading(self, model: PreTrainedModel, checkpoint_files=None, dtype=None, **kwargs: Any) -> None:
        self.dtype = dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
        if self.source is None:
            if is_parallel(model):
                raise ConfigError(
                    "quantizing while loading does not divide weights among ranks",
                    value=getattr(model.config, "distributed_config", None),
                    limit="one process",
                    remedy="Quantize and save_pretrained in one process, then load that with tp_plan.",
                )
            self.on_load = QuantizeOnLoad(model, self.quantization_config)
            return
        named = model.config._name_or_path
        base = Path(named) if named and Path(named).is_dir() else None
        shards = self.source.get("shards") or self._shards(checkpoint_files or [], base)
        self.plan = make_load_plan(model, shards, self.source, self.dtype, self.strict)
        install_empty(model, self.plan, self.dtype, self.prefill)
        # Everything on disk was accounted for above; the packed tensors are not transformers' to place.
        model._keys_to_ignore_on_load_unexpected = {"."}

    def _shards(self, files: list[str], base: Path | None) -> Shards:
        if not files or not all(str(f).endswith(".safetensors") for f in files):
            raise CheckpointError(
                "packed weights are read from safetensors files",
                value=[Path(f).name for f in files][:4],
                limit="*.safetensors",
                remedy="Pickled weights are never read: convert them to safetensors first.",
            )
        return shards_of(files, base)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        notes: list[str] = []
        errors: dict[str, float] = {}
        kept: dict[str, str] = {}
        if self.on_load is not None:
            errors = {row.name: row.relative_error for row in self.on_load.finish(model) if row.relative_error is not None}
        elif self.plan is not None:
            kept = dict.fromkeys(self.plan.dense, "in high precision in the checkpoint")
            notes = self.plan.notes + fill(model, self.plan, self.dtype, strict=self.strict is not False, progress=self.progress)
        finish(model, self, notes, errors, kept)
        self.plan = self.on_load = None
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        return self.on_load is not None and self.on_load.wants(param_name)

    def get_quantize_ops(self) -> Any:
        return self.on_load

    def get_weight_conversions(self) -> list:
        return []

    def update_weight_conversions(self, weight_conversions: list, model: PreTrainedModel | None = None) -> list:
        return weight_conversions

    @property
    def is_compileable(self) -> bool:
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True  # the model at hand may still be refused, in words: get_state_dict_and_metadata is given it

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """What ``save_pretrained`` writes besides the model's own state_dict.

        Raises:
            CheckpointError: nothing could read back what would be written.
        """
        if not getattr(model, "_hf_peft_config_loaded", False):  # then only adapters are written
            check_saveable(model)
        return None, {}

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside packed weights are; integrations/trainer.py refuses to train without


def finish(model: PreTrainedModel, quantizer: FP4InductorQuantizer, notes: list[str], errors: dict[str, float], kept: dict[str, str]) -> None:
    """What is done after every kind of loading."""
    use_experts_backend(model)
    notes = [*notes, *use_attention_backend(model, quantizer.attention)]
    compile_ahead(model)
    use_regions(model)
    if len(set(getattr(model, "hf_device_map", {}).values())) < 2:
        siblings.pack_model(model)
    describe_for_saving(model, quantizer.prefill, quantizer.attention, quantizer)
    report = siblings.annotated(inspect(model, errors, kept), model)
    record(model, Report(**{**vars(report), "notes": [*report.notes, *notes]}))


def describe_for_saving(model: PreTrainedModel, prefill: str, attention: str = "auto", quantizer: FP4InductorQuantizer | None = None) -> None:
    """Make ``save_pretrained`` write what is in memory: our tensors, under the model's own names, with our config."""
    from .config import FP4InductorConfig

    config = FP4InductorConfig(prefill=prefill, attention=attention)
    if quantizer is None:
        quantizer = FP4InductorQuantizer(config, pre_quantized=True)
        model.hf_quantizer, model.quantization_method = quantizer, config.quant_method  # type: ignore[assignment]
    model.is_quantized = False  # type: ignore[assignment]  # transformers would refuse .half() and .float(), which leave packed weights alone
    quantizer.quantization_config = config
    model.config.quantization_config = config
    model.model_tags = [*(model.model_tags or []), *({config.quant_method} - set(model.model_tags or []))]  # of the card that push_to_hub makes
    model._weight_conversions = []  # type: ignore[assignment]  # transformers would split what its rules joined, packed buffers included


def check_saveable(model: PreTrainedModel) -> None:
    """Raise CheckpointError for a model that ``save_pretrained`` has no form for."""
    if (ranks := ranks_of(model)) is not None:
        raise CheckpointError(
            "each process holds a part of the packed weights, and save_pretrained cannot put them together",
            value=f"{ranks.size} ranks of tensor parallelism",
            limit="one process",
            remedy="Load the checkpoint without tp_plan in one process, and save it there.",
        )
    if tensors := [name for name, p in model.named_parameters() if isinstance(p, FP4Tensor)]:
        raise CheckpointError(
            "save_pretrained cannot write weights that are tensors of this package in modules of the model's own",
            value=f"{list_names(tensors)} ({len(tensors)} in all)",
            limit="FP4Linear, Sparse24Linear, FP8Linear, FP4Experts",
            remedy="Write the model with fp4_inductor.save(model, folder); fp4_inductor.load_pretrained(folder) reads that.",
        )
