"""Transformers' Trainer: full fine-tuning of a quantized model is refused, context parallelism is not. Importing this imports it.

Packed weights are buffers, so an optimizer would be given the norms and the embeddings only, and say nothing. Transformers has a
check for quantized models, ``validate_quantization_for_training``, which goes by ``model.is_quantized``; that attribute also makes
``.half()`` and ``.float()`` fail, which packed layers allow. So the check is extended instead.

Context parallelism wants an attention implementation named ``"sdpa"``. That is what ``"fp4_inductor"`` runs in training, so the
model is given that name.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import trainer

from ..decoding.attention import NAME, implementations, without_ours
from ..errors import ConfigError, list_names
from ..models.training import Training
from ..modules import FP4Experts, FP4Linear

_NAME = "validate_quantization_for_training"
_CONTEXT_PARALLEL = "_prepare_context_parallel_inputs"


def check_trainable(model: Any) -> None:
    """Raise if training ``model`` would train what happens to be left over.

    Accepted: adapters are there, or some of the remaining Parameters were frozen, so that somebody chose what is trained.

    Raises:
        ConfigError: ``model`` has quantized layers, no adapter, and all its Parameters require a gradient.
    """
    packed = [m for m in model.modules() if isinstance(m, (FP4Linear, FP4Experts))]
    if not packed or Training.of(model).reasons:
        return
    left = [(n, p) for n, p in model.named_parameters() if p.numel()]
    trained = [n for n, p in left if p.requires_grad]
    if len(trained) < len(left):
        return
    raise ConfigError(
        "the quantized weights of this model cannot be trained, and nothing says what else should be",
        value=f"{len(packed)} quantized layers; trainable: {len(trained)} tensors, {list_names(trained)}",
        limit="adapters, or a choice of what is trained",
        remedy="Add adapters: peft.get_peft_model(model, LoraConfig(...)). To train only norms or embeddings, freeze the rest with requires_grad_(False).",
    )


def register() -> None:
    """Extend the check, and what prepares context parallelism, of ``transformers.trainer``. May be called again."""
    check, prepare = getattr(trainer, _NAME), getattr(trainer.Trainer, _CONTEXT_PARALLEL)
    if hasattr(check, "_fp4_inductor"):
        return

    @functools.wraps(check)
    def validate(model: Any) -> None:
        check_trainable(model)
        check(model)

    @functools.wraps(prepare)
    def prepare_with_sdpa(self: Any, model: Any, inputs: Any) -> Any:
        parallel = getattr(self.accelerator, "parallelism_config", None)
        if parallel is not None and parallel.cp_enabled and getattr(getattr(model, "config", None), "_attn_implementation", None) == NAME:
            model.set_attn_implementation(without_ours(implementations(model)))
        return prepare(self, model, inputs)

    validate._fp4_inductor = True  # type: ignore[attr-defined]
    setattr(trainer, _NAME, validate)
    setattr(trainer.Trainer, _CONTEXT_PARALLEL, prepare_with_sdpa)


register()
