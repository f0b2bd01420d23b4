"""Decoder layers of one kind are traced, lowered and generated once, however many a model has (``torch.compiler.nested_compile_region``).

``quantize_model`` and the loaders mark the decoder layers of a Transformers model. A marked layer is a region only while
``torch.compile`` traces a call without gradients whose cache, if it has one, is a static one: there every family in
``lowering_tests/integrations/test_regions.py`` compiles to the same kernels as without. All else runs the layer's own forward:
eager calls, training, ``torch.export``, and a cache that grows, because a region may not replace a tensor that Python holds.
``FP4_INDUCTOR_REGIONS=0`` marks nothing. Products of two layers can meet in one launch only if the layers are in one graph: see :func:`undivided`.

Source: torch.compiler.nested_compile_region (torch 2.11 to 2.13); figures: benchmarks/results/first_use.csv.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from .._torch.export import is_exporting
from ..config import dispatch_config
from ..formats import nvfp4
from ..kernels import select
from ..modules import FP4Experts, FP4Linear
from .naming import name_in

LEAST = 4  # with fewer layers there is little to gain
_UNDIVIDED = "_fp4_undivided"  # an attribute of a cache, which a compiled function guards on
_CALLER = "_fp4_caller"  # an attribute of a cache: who calls the layers of an eager model


def use_regions(model: nn.Module) -> int:
    """Mark the decoder layers of a Transformers model; returns how many are marked. May be called again."""
    layers = decoder_layers(model) if os.environ.get("FP4_INDUCTOR_REGIONS") != "0" else []
    kinds = Counter(map(type, layers))
    chosen = [layer for layer in layers if kinds[type(layer)] >= LEAST]
    for layer in chosen:
        if "forward" not in layer.__dict__:  # else somebody else has wrapped it (accelerate's hooks)
            layer.forward = MethodType(_forward_of(type(layer)), layer)  # type: ignore[method-assign, arg-type]
    return len(chosen)


@contextlib.contextmanager
def undivided(cache: Any) -> Iterator[None]:
    """Calls of a model over ``cache`` are traced as one graph in here, not a layer at a time. A compiled function is called either always in here or never."""
    setattr(cache, _UNDIVIDED, True)
    try:
        yield
    finally:
        setattr(cache, _UNDIVIDED, False)


@contextlib.contextmanager
def called_by(cache: Any, caller: Callable[[nn.Module, tuple, dict[str, Any]], Any]) -> Iterator[None]:
    """In an eager call of a model over ``cache``, each marked layer is ``caller(layer, args, kwargs)`` in here."""
    setattr(cache, _CALLER, caller)
    try:
        yield
    finally:
        setattr(cache, _CALLER, None)


def pays_undivided(model: nn.Module, rows: int) -> bool:
    """Does a decode step of ``rows`` tokens take less time as one graph?

    There what joins products belongs to one graph: q/k/v of the next layer stand behind down. One row: the products between two attentions are one launch, if
    there is a kernel for it; experts with biases, or 2:4-sparse ones, are no part of it. More rows: the norm between down and q/k/v is halves of their kernels.
    A step of 12 layers of an 8B model takes 1.17 ms on an H100 as one graph, 1.22 as regions; of 8 rows 1.30 ms and 1.34.
    """
    layers = [m for m in model.modules() if isinstance(m, FP4Linear)]
    experts = [m for m in model.modules() if isinstance(m, FP4Experts)]
    apart = bool(experts) if rows > 1 else any(w.bias is not None or w.storage() is not nvfp4.STORAGE for m in experts for w in (m.first, m.down_proj))
    if rows < 1 or not layers or apart:
        return False
    one: Any = layers[0]
    op = "linear_chain" if rows == 1 else "linear_residual_squares"
    call = select.describe(op, one.qdata.device, one.dtype, one.out_features, one.in_features, one.prefill)
    return select.plan(call, dispatch_config()).pick(rows).library is not None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that a Transformers model calls its layers, as ``device_map`` knows them; empty for other modules."""
    if "transformers.modeling_utils" not in sys.modules:
        return []
    model_class = sys.modules["transformers.modeling_utils"].PreTrainedModel
    names = {name for m in model.modules() if isinstance(m, model_class) for name in m._no_split_modules or ()}
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return [layer for modules in lists for layer in modules if type(layer).__name__ in names]


def plain_forward(layer: nn.Module) -> Any:
    """The forward of the class of a layer, marked or not; None: somebody else has wrapped it."""
    return type(layer).forward if "forward" not in vars(layer) or is_marked(layer) else None


def is_marked(layer: nn.Module) -> bool:
    """Is it one of those that :func:`use_regions` chose?"""
    return getattr(vars(layer).get("forward"), "__func__", None) is _forward_of(type(layer))  # type: ignore[arg-type]


def call_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of its class."""
    return type(layer).forward(layer, *args, **kwargs)


@functools.cache
def _forward_of(cls: type[nn.Module]) -> Any:
    region = torch.compiler.nested_compile_region(call_layer)

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(name_in(kwargs))
        if torch.compiler.is_compiling():
            if _is_region(cache):
                return region(self, *args, **kwargs)
        elif (caller := getattr(cache, _CALLER, None)) is not None:
            return caller(self, args, kwargs)
        return cls.forward(self, *args, **kwargs)

    return forward


def _is_region(cache: Any) -> bool:
    if is_exporting() or torch.is_grad_enabled() or getattr(cache, _UNDIVIDED, False):
        return False
    return cache is None or bool(getattr(cache, "is_compileable", False))
