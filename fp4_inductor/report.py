"""``fp4_inductor.report(model)``: what became of every parameter."""

from __future__ import annotations

from torch import nn

from .errors import ConfigError
from .models.coverage import LayerReport, Report, Skipped, recorded
from .models.plan import inspect
from .models.siblings import annotated

__all__ = ["LayerReport", "Report", "Skipped", "report"]


def report(model: nn.Module) -> Report:
    """The :class:`Report` of a model; ``str()`` of it is a table.

    For a model quantized or loaded in this process: what was recorded then. Otherwise (a copy, or FP4Linear installed
    by hand) it is worked out from the modules, and relative errors, which need the original weights, are None.

    Raises:
        ConfigError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "report() takes a module",
            value=type(model).__name__,
            limit="torch.nn.Module",
            remedy="Pass the model that quantize_model or load returned.",
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    found = recorded(model)
    return annotated(inspect(model), model) if found is None else found
