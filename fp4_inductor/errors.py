"""Every error this package raises on purpose: one class per kind of failure.

Each message carries three things: the value that was met, the limit it broke, and what to do about it.
All of them derive from :class:`FP4Error`, and also from the builtin a caller would expect to catch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._text import join_names, merge_alike

SHOWN = 20  # of a list in a message
_VALUES = 4  # of one kind of error


def bullets(items: Sequence[object]) -> str:
    """The first ``SHOWN`` of ``items``, one a line, and how many more there are."""
    more = f"\n  - ... and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return "\n".join(f"  - {i}" for i in items[:SHOWN]) + more


def bullet_names(items: Iterable[str]) -> str:
    """Of ``"name"`` or ``"name: what is wrong with it"``, a line for each thing that is wrong, repeated layers grouped."""
    names: dict[str, list[str]] = {}
    for item in items:
        name, colon, problem = item.partition(": ")
        names.setdefault(colon + problem, []).append(name)
    return bullets([list_names(n for problem in same for n in names[problem]) + text for text, same in merge_alike(names, figures=False).items()])


def list_names(names: Iterable[str]) -> str:
    """Names for a message: repeated layers grouped, at most ``SHOWN`` groups, then how many names more there are."""
    return join_names(names, SHOWN)


class FP4Error(Exception):
    """Base of every typed error.

    Args:
        what: one clause saying what is wrong, naming the tensor, layer or field; with ``name`` only what follows the name.
        value: the offending value.
        limit: what would have been accepted.
        remedy: what the caller can do.
        name: the tensor or layer that ``what`` is said of. An error that lists several says what they have in common once.
    """

    def __init__(self, what: str, *, value: object = None, limit: object = None, remedy: str | None = None, name: str = ""):
        self.name, self.clause = name, what
        what = f"{name} {what}" if name else what
        self.what, self.value, self.limit, self.remedy = what, value, limit, remedy
        self.problems: list[FP4Error] = []
        # After a list of problems, one a line, the clauses start a line.
        text = "; ".join([what, *_clauses(value, limit)]) if not what.endswith("\n") else what + "; ".join(_clauses(value, limit))
        super().__init__(text if remedy is None else f"{text}. {remedy}")


def _clauses(value: object, limit: object) -> list[str]:
    return ([f"got {value}"] if value is not None else []) + ([f"accepted: {limit}"] if limit is not None else [])


def bullet_errors(errors: Iterable[FP4Error]) -> str:
    """A line for each kind of error: what is wrong, what would be accepted and the remedy once, for all layers that it is said of."""
    kinds: dict[tuple, list[FP4Error]] = {}
    for error in errors:
        said = (type(error), error.clause, str(error.limit), error.remedy) if error.name else (id(error),)
        kinds.setdefault(said, []).append(error)
    return bullets([same[0] if len(same) == 1 else _of_each(same) for same in kinds.values()])


def _of_each(errors: list[FP4Error]) -> str:
    """``errors`` that differ in the layer, and perhaps in the value, as one."""
    names: dict[str, list[str]] = {}
    for error in errors:
        names.setdefault(str(error.value), []).append(error.name)
    subject, value = list_names(e.name for e in errors), next(iter(names))
    if len(names) > _VALUES:
        value = f"{', '.join(list(names)[:_VALUES])}, ... ({len(names)} in all)"
    elif len(names) > 1:
        subject, value = f"{len(errors)} layers", ", ".join(f"{got} ({list_names(named)})" for got, named in names.items())
    return "; ".join([f"{subject}: each {errors[0].clause}", *_clauses(value, errors[0].limit)]) + f". {errors[0].remedy}"


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


class CacheInUseError(FP4Error, RuntimeError):
    """A second ``generate()`` on a cache whose first one has not returned."""


class UnsupportedOpError(FP4Error, NotImplementedError):
    """An operation on a quantized tensor that has no faithful meaning."""


class CheckpointError(FP4Error, ValueError):
    """A checkpoint on disk is truncated, corrupt, incomplete or of another model."""


class KernelError(FP4Error, RuntimeError):
    """No kernel row accepts a call; the message lists every row and why it was refused."""


class RowsError(FP4Error, ValueError):
    """A compiled graph, or a kernel, got a number of activation rows M outside of the range that it serves.

    A graph is compiled for a range of M where Dynamo guards one or :func:`fp4_inductor.compile_range` promises one. This is raised if it is called
    with another M all the same, because its guards were dropped or the promise was broken. A C++ wrapper raises RuntimeError with the same words.
    """

    @classmethod
    def outside(cls, m: int, low: int, high: int | None, what: str) -> RowsError:
        """Of a graph that was compiled for ``low <= m <= high``, because of the kernels named in ``what``. Generated code calls it."""
        return cls(
            f"this graph was compiled for another number of activation rows ({what})",
            value=f"M = {m}",
            limit=f"M >= {low}" if high is None else f"M = {low} to {high}" if low else f"M <= {high}",
            remedy="Nothing checks its guards. Compile it again for this M: with guards, in fp4_inductor.compile_range(low, high) with the M that it "
            'will get, or with fp4_inductor.set_dispatch(unproven="runtime"), where one graph serves every M.',
        )


class QualityWarning(UserWarning):
    """Quantization or pruning cost a model more than a user may expect; the report has the figure."""
