"""Which Parameters a model's own constructor freezes: BLT its patcher, Idefics its language model. Nobody chose those for training."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


def buildable(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost models of Transformers in ``model``, which say how they are built, and the prefix of the names in each."""
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is None:
        return
    if isinstance(model, base):
        yield prefix, model
        return
    for name, child in model.named_children():
        yield from buildable(child, f"{prefix}{name}.")


def requires_grad_as_built(model: Any) -> dict[str, bool] | None:
    """``requires_grad`` of every Parameter of a new Transformers model of this class and configuration, by name; None if it cannot be built.

    The new model is on the meta device and is dropped; no random numbers are drawn.
    """
    config = copy.deepcopy(model.config)
    with contextlib.suppress(AttributeError):
        del config.quantization_config
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            new: nn.Module = type(model)._from_config(config)
    except Exception as error:  # of any kind: the constructor is the model's own
        log.debug("%s cannot be built again: %s", type(model).__name__, error)
        return None
    return {name: p.requires_grad for name, p in new.named_parameters(remove_duplicate=False)}
