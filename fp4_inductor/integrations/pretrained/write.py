"""``write_model``: one call for every format that a quantized model can be written in; the folder is complete, or it is not there."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from ...checkpoint import manifest as mf
from ...checkpoint.aside import as_path, publish, written_aside
from ...checkpoint.identify import HF_QUANT_CONFIG, NATIVE, TRANSFORMERS
from ...checkpoint.save import save
from ...checkpoint.shards import CONFIG
from ...checkpoint.writers import LAYOUTS
from ...errors import CheckpointError, ConfigError
from ...models.plan import model_bytes
from .export import export_pretrained
from .text import copy_companions, is_companion

FORMATS = (NATIVE, TRANSFORMERS, *LAYOUTS)
_OWN = ("*.safetensors", "*.safetensors.index.json", CONFIG, "generation_config.json", HF_QUANT_CONFIG, mf.FILE)


def write_model(
    model: nn.Module,
    dir: str | os.PathLike,
    format: str = NATIVE,
    *,
    source: str | os.PathLike | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    **hub: Any,
) -> None:
    """Write a quantized model of Transformers, its configs, and the tokenizer of the checkpoint that it came from.

    All files are written aside and renamed when they are complete: after an error or Ctrl-C the folder is as it was.

    Args:
        model: quantized with :func:`fp4_inductor.quantize_model`, or loaded here.
        dir: created if needed.
        format: ``"native"`` (:func:`fp4_inductor.save`), ``"transformers"`` (``save_pretrained``), or a format of
            :func:`fp4_inductor.export_pretrained`.
        source: the checkpoint whose tokenizer and processor files are copied; None copies none.
        overwrite: replace a checkpoint that is there. Files that belong to no checkpoint stay.
        max_shard_size: bytes, or text like ``"5GB"``.
        hub: options of ``from_pretrained`` about the hub, for ``source``.

    Raises:
        ConfigError: an unknown format, or one that cannot hold this model. CheckpointError: ``dir`` is a file, or holds something and
            ``overwrite`` is False; the files cannot be written; or as the function of the format.
    """
    directory = check_target(dir, format, source=source, overwrite=overwrite)
    if format != NATIVE and not isinstance(model, PreTrainedModel):
        limit = "a model of Transformers (PreTrainedModel)"
        raise ConfigError(f"{format} cannot hold this module", value=type(model).__name__, limit=limit, remedy='Write it with format="native".')
    with written_aside(directory, model_bytes(model)) as aside:
        if format == NATIVE:
            save(model, aside, max_shard_size)
        elif format == TRANSFORMERS:
            cast(PreTrainedModel, model).save_pretrained(aside, max_shard_size=max_shard_size)
        else:
            export_pretrained(model, aside, format, max_shard_size)
        if source is not None:
            copy_companions(source, aside, **hub)
        publish(aside, directory, mf.FILE if format == NATIVE else CONFIG, _is_stale)


def check_target(dir: str | os.PathLike, format: str = NATIVE, *, source: str | os.PathLike | None = None, overwrite: bool = False) -> Path:
    """``dir`` as a path, if :func:`write_model` may write there; for a caller who is about to spend an hour first.

    Raises:
        ConfigError: an unknown format, no path, or ``dir`` is ``source``. CheckpointError: ``dir`` is a file, or holds something and ``overwrite`` is False.
    """
    directory = as_path(dir, "dir")
    if format not in FORMATS:
        raise ConfigError("unknown format", value=repr(format), limit=list(FORMATS), remedy="Choose one of them.")
    if directory.exists() and not directory.is_dir():
        raise CheckpointError("there is a file of this name", value=str(directory), limit="a folder, or a new name", remedy="Choose another name.")
    there = next(p for p in (directory, *Path(os.path.abspath(directory)).parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError("nothing can be written there", value=str(there), limit="a folder that you may write to", remedy="Choose another folder.")
    if source is not None and directory.exists() and Path(source).exists() and os.path.samefile(directory, source):
        raise ConfigError("the model would be written over itself", value=str(directory), limit="another folder", remedy="Choose another folder.")
    if directory.exists() and not overwrite and (inside := sorted(p.name for p in directory.iterdir())):
        raise CheckpointError(
            "the folder is not empty",
            value=f"{directory}: {', '.join(inside[:4])}{', ...' if len(inside) > 4 else ''}",
            limit="an empty folder, or a new name",
            remedy="Choose another folder, or pass overwrite=True to replace the checkpoint in it.",
        )
    return directory


def _is_stale(name: str) -> bool:
    """Files of an earlier checkpoint, which would be read beside the new one."""
    return is_companion(name) or any(fnmatch.fnmatch(name, pattern) for pattern in _OWN)
