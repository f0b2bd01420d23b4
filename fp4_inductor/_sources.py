"""Where the C and CUDA sources lie: ``csrc/`` of a checkout, ``fp4_inductor/_csrc`` of an installed wheel."""

from __future__ import annotations

from pathlib import Path

from .errors import KernelError

_PACKAGE = Path(__file__).resolve().parent


def csrc_dir() -> Path:
    """The folder that holds ``cpu/``, ``common/``, ``gemm/`` ...; the layout below it is that of ``csrc/`` in the repository.

    Raises:
        KernelError: neither place exists (the package was copied without its sources).
    """
    places = (_PACKAGE / "_csrc", _PACKAGE.parent / "csrc")
    for place in places:
        if place.is_dir():
            return place
    raise KernelError(
        "the C and CUDA sources of this package are missing",
        value=_PACKAGE,
        limit=[str(p) for p in places],
        remedy="Reinstall fp4_inductor from a wheel or a complete checkout.",
    )


def prebuilt_dir() -> Path | None:
    """``fp4_inductor/_lib``: the libraries that ``pip install`` compiled; None if it compiled none."""
    place = _PACKAGE / "_lib"
    return place if place.is_dir() else None
