"""``save_pretrained`` of a Transformers model that holds packed layers: complete, described, proved to be readable, or not at all.

Transformers writes file by file into the folder, and describes as quantized only what its own quantizer quantized. So
``PreTrainedModel.save_pretrained`` is extended, for models with packed layers only:

* it writes into a folder aside, from which the files are renamed when all are there: after Ctrl-C, or on a full disk, the
  folder holds what it held before;
* a model that holds a quantized one, or is a part of one, is described in config.json like the quantized one itself;
* what was written is matched with the model's architecture, by the rules by which ``from_pretrained`` will read it;
* a README.md says what to install.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...checkpoint.aside import as_path
from ...checkpoint.manifest import FILE as NATIVE
from ...checkpoint.shards import CONFIG, INDEX, SINGLE, open_shards, variant_of
from ...errors import CheckpointError, ConfigError, FP4Error
from ..whole import is_packed, prefill_of, write_whole
from .card import FILE as CARD
from .card import card_of
from .config import FP4InductorConfig
from .plan import make_load_plan
from .quantizer import FP4InductorQuantizer, check_saveable, describe_for_saving

_SELF = ("hf_quantizer", "quantization_method", "is_quantized", "model_tags", "_weight_conversions")
_MISSING: Any = object()


def register() -> None:
    """Extend ``PreTrainedModel.save_pretrained``. May be called again."""
    original = PreTrainedModel.save_pretrained
    if hasattr(original, "_fp4_inductor"):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        packed = is_packed(self)
        adapters_only = getattr(self, "_hf_peft_config_loaded", False)
        if adapters_only or not (packed or isinstance(getattr(self, "hf_quantizer", None), FP4InductorQuantizer)):
            return original(self, save_directory, *args, **kwargs)
        options = dict(signature.bind(self, save_directory, *args, **kwargs).arguments)
        options |= options.pop("kwargs", {})
        del options["self"], options["save_directory"]
        with _described(self, packed):
            return _save(self, functools.partial(original, self), as_path(save_directory, "save_directory"), packed, options)

    save_pretrained._fp4_inductor = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


@contextmanager
def _described(model: PreTrainedModel, packed: bool) -> Iterator[None]:
    """Inside, the model and its config say that it is quantized by this package, or, if nothing in it is packed, that it is not."""
    config, own = model.config, vars(model)
    before = {name: own.get(name, _MISSING) for name in _SELF}
    said = getattr(config, "quantization_config", _MISSING)
    other = own.get("hf_quantizer")
    if other is not None and not isinstance(other, FP4InductorQuantizer):
        raise ConfigError(
            "the model has a quantizer of another library besides FP4 layers",
            value=type(other).__name__,
            limit="one quantizer",
            remedy="Quantize the dense model, or write this one with fp4_inductor.save.",
        )
    try:
        if not packed:
            for name in ("hf_quantizer", "quantization_method"):
                own.pop(name, None)
            if said is not _MISSING:
                del config.quantization_config
        elif other is None:
            describe_for_saving(model, prefill_of(model), _attention(model))
        else:
            config.quantization_config = other.quantization_config
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                own.pop(name, None)
            else:
                own[name] = value
        if said is not _MISSING:
            config.quantization_config = said
        elif hasattr(config, "quantization_config"):
            del config.quantization_config


def _attention(model: PreTrainedModel) -> str:
    """What the quantized model inside was quantized with."""
    said = (getattr(getattr(m, "hf_quantizer", None), "quantization_config", None) for m in model.modules())
    return next((config.attention for config in said if isinstance(config, FP4InductorConfig)), "auto")


def _save(model: PreTrainedModel, write: Any, directory: Path, packed: bool, options: dict[str, Any]) -> None:
    if options.get("distributed_checkpoint"):
        raise ConfigError(
            "save_pretrained of a model with FP4 layers writes no distributed checkpoint",
            value="distributed_checkpoint=True",
            limit="False",
            remedy="Leave it out: rank 0 writes the whole model. To resume training, save the adapters.",
        )
    if packed:
        check_saveable(model)
    if (directory / NATIVE).exists():
        raise CheckpointError(
            "the folder holds a checkpoint of fp4_inductor.save",
            value=str(directory),
            limit=f"a folder without {NATIVE}",
            remedy="Choose another folder, or remove that checkpoint.",
        )
    if options.get("push_to_hub"):  # transformers compares the folder's files before and after
        return write(directory, **options)

    def check(aside: Path) -> None:
        if packed:
            _check_readable(model, aside, options.get("variant"))
            if not (directory / CARD).exists():
                (aside / CARD).write_text(card_of(model))

    write_whole(model, directory, functools.partial(write, **options), check, CONFIG, _is_weights_of(options.get("variant")))


def _is_weights_of(variant: str | None) -> Any:
    """Is a file one of the weights or the index that an earlier call wrote with the same ``variant``?"""
    stem = variant_of(SINGLE, variant).removesuffix(".safetensors")
    ours = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(variant_of(INDEX, variant))}")
    return lambda name: ours.fullmatch(name) is not None


def _check_readable(model: PreTrainedModel, folder: Path, variant: str | None) -> None:
    """Match the files in ``folder`` with the model that ``from_pretrained`` will build.

    Raises:
        CheckpointError: they do not fit it.
    """
    config = copy.deepcopy(model.config)
    said = config.quantization_config.to_dict()
    del config.quantization_config
    try:
        with torch.device("meta"):
            dense = type(model)._from_config(config, dtype=model.dtype)
    except Exception:  # a constructor of somebody's own, which may need more than a config: nothing can be proved then
        return
    try:
        make_load_plan(dense, open_shards(folder, variant), said, model.dtype, strict=True)
    except FP4Error as error:
        raise CheckpointError(
            f"from_pretrained could not read back what save_pretrained would write; nothing was written. {error.what}",
            value=error.value,
            limit=f"what {type(model).__name__}(config) can hold",
            remedy="Write the model with fp4_inductor.save(model, folder), and read it with fp4_inductor.load(function_that_builds_it, folder).",
        ) from error
