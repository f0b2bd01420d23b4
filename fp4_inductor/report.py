"""``fp4_inductor.report(model)``: what became of every parameter."""

from __future__ import annotations

from torch import nn

from .models.coverage import LayerReport, Report, Skipped, recorded
from .models.plan import inspect

__all__ = ["LayerReport", "Report", "Skipped", "report"]


def report(model: nn.Module) -> Report:
    """The :class:`Report` of a model; ``str()`` of it is a table.

    For a model quantized or loaded in this process: what was recorded then. Otherwise (a copy, or FP4Linear installed
    by hand) it is worked out from the modules, and relative errors, which need the original weights, are None.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    found = recorded(model)
    return inspect(model) if found is None else found
