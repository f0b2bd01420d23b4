"""The RMSNorm in front of a linear layer whose kernel takes none: plain operations, which Inductor fuses with what makes their input."""

from __future__ import annotations

from collections.abc import Callable

from .._torch import lowering as inductor
from ..kernels.forms import Norm
from ..kernels.kernel import Span
from ..ops.norm_linear import rms_norm


def applied(x, norm: Norm | None):
    """IR of the norm of each row of ``x``; ``x``, if there is none."""
    if norm is None:
        return x

    def normalized(x, weight):
        return rms_norm(x, weight, norm.eps, norm.offset)

    return inductor.inline(normalized, (x, norm.weight))


def in_front_of(lower: Callable) -> Callable:
    """The lowering of ``fp4.norm_<op>`` from that of ``fp4.<op>``, which takes ``norm=``."""

    def lower_with_norm(x, norm_weight, eps, norm_offset, *rest, **options):
        return lower(x, *rest, norm=Norm(norm_weight, eps, norm_offset), **options)

    return lower_with_norm


def takes_norm(row: Span | None) -> bool:
    """Does the kernel of ``row`` compute the norm of its activations?"""
    return row is not None and row.library is not None and row.library.norm


def remark(norm: Norm | None) -> str:
    """For explain(), of a call whose kernel computes ``norm``."""
    return "" if norm is None else "the RMSNorm of its input is in the kernel"
