"""Every error this package raises on purpose: one class per kind of failure.

Each message carries three things: the value that was met, the limit it broke, and what to do about it.
All of them derive from :class:`FP4Error`, and also from the builtin a caller would expect to catch.
"""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 20  # of a list in a message


def bullets(items: Sequence[object]) -> str:
    """The first ``SHOWN`` of ``items``, one a line, and how many more there are."""
    more = f"\n  - ... and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "\n".join(f"  - {i}" for i in items[:SHOWN]) + more


class FP4Error(Exception):
    """Base of every typed error.

    Args:
        what: one clause saying what is wrong, naming the tensor, layer or field.
        value: the offending value.
        limit: what would have been accepted.
        remedy: what the caller can do.
    """

    def __init__(self, what: str, *, value: object = None, limit: object = None, remedy: str | None = None):
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        self.problems: list[FP4Error] = []
        clauses = [f"got {value}"] if value is not None else []
        clauses += [f"accepted: {limit}"] if limit is not None else []
        # After a list of problems, one a line, the clauses start a line.
        text = "; ".join([what, *clauses]) if not what.endswith("\n") else what + "; ".join(clauses)
        if remedy is not None:
            text += f". {remedy}"
        super().__init__(text)


class ShapeError(FP4Error, ValueError):
    """A tensor has a shape this format, op or layer cannot take."""


class DTypeError(FP4Error, TypeError):
    """A tensor has a dtype this format, op or layer cannot take."""


class DeviceError(FP4Error, RuntimeError):
    """Tensors of one call lie on different devices, or the device cannot run what was asked for."""


class NonFiniteError(FP4Error, ValueError):
    """A weight or a calibration statistic holds NaN or Inf."""


class SparsityError(FP4Error, ValueError):
    """A weight, a mask or metadata is not the 2:4 pattern it has to be."""


class ConfigError(FP4Error, ValueError):
    """An option does not exist or its value is not one of the accepted ones."""


class PreflightError(FP4Error, ValueError):
    """Several layers of a model cannot be quantized, for several kinds of reasons; ``problems`` holds the typed errors."""


class CoverageError(FP4Error, ValueError):
    """``strict=True`` and some parameters that should have been quantized cannot be."""


class GatingError(FP4Error, ValueError):
    """Expert weights of a module whose computation (activation, gating, interface) is not known: never assumed."""


class CalibrationError(FP4Error, ValueError):
    """Calibration data is missing, empty, or never reached a layer."""


class UnsupportedOpError(FP4Error, NotImplementedError):
    """An operation on a quantized tensor that has no faithful meaning."""


class CheckpointError(FP4Error, ValueError):
    """A checkpoint on disk is truncated, corrupt, incomplete or of another model."""


class KernelError(FP4Error, RuntimeError):
    """No kernel row accepts a call; the message lists every row and why it was refused."""


class QualityWarning(UserWarning):
    """Quantization or pruning cost a model more than a user may expect; the report has the figure."""
