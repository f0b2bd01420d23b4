"""A checkpoint that another library writes file by file into a folder: whole, or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.aside import publish, written_aside
from ..models.plan import model_bytes
from ..modules import FP4Experts, FP4Linear
from ..tensors.base import FP4Tensor


def is_packed(model: nn.Module) -> bool:
    """Does ``model`` hold weights that this package packed?"""
    return any(isinstance(m, (FP4Linear, FP4Experts)) for m in model.modules()) or any(isinstance(p, FP4Tensor) for p in model.parameters())


def prefill_of(model: nn.Module) -> str:
    """The ``prefill`` of the model's linear layers; experts and heads cannot have every one of its values."""
    options = [m.prefill for m in model.modules() if isinstance(m, (FP4Linear, FP4Experts))]
    return "nvfp4" if "nvfp4" in options else options[0] if options else "auto"


def write_whole(
    model: nn.Module, directory: Path, write: Callable[[Path], Any], check: Callable[[Path], None], last: str, is_stale: Callable[[str], bool]
) -> None:
    """Let ``write(folder)`` write into a folder aside, ``check(folder)`` what is there, and rename the files into ``directory``.

    Args:
        last, is_stale: as in :func:`fp4_inductor.checkpoint.aside.publish`.

    Raises:
        CheckpointError: ``directory`` cannot be written; whatever ``check`` raises. ``directory`` holds what it held before.
    """
    with written_aside(directory, model_bytes(model)) as aside:
        write(aside)
        if (aside / last).exists():  # if not, this is another process than the main one
            check(aside)
            publish(aside, directory, last, is_stale)
