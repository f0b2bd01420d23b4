"""The C kernels of ``csrc/cpu/nvfp4.c`` through ctypes, compiled at first use."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ...errors import KernelError
from ...formats.sparse24 import validate_meta
from ..build import shared_library

MAX_M = 8
_ADDRESS = ctypes.c_void_p


def openmp() -> tuple[str, ...]:
    """The compiler's flags for OpenMP."""
    # Torch brings its own libgomp; a second OpenMP runtime in the process would spin against its threads.
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return ("-fopenmp", f"-L{bundled[0].parent}", f"-l:{bundled[0].name}", f"-Wl,-rpath,{bundled[0].parent}") if bundled else ("-fopenmp",)


def opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions' arguments: plain ints are addresses then, and a call costs half."""
    library = ctypes.CDLL(str(path))
    library.fp4_isa.restype = ctypes.c_char_p
    library.fp4_gemv.argtypes = (*[_ADDRESS] * 4, ctypes.c_float, _ADDRESS, *[ctypes.c_int64] * 3, ctypes.c_int)
    library.fp4_dequantize_rows.argtypes = (*[_ADDRESS] * 3, ctypes.c_float, _ADDRESS, *[ctypes.c_int64] * 2, *[ctypes.c_int] * 2)
    return library


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    reasons = []
    for flags in (("-march=native", *openmp()), ("-march=native", "-fopenmp"), ("-fopenmp",)):
        try:
            library = opened(shared_library("cpu/nvfp4.c", flags))
        except (KernelError, OSError) as error:
            reasons.append(str(error))
            continue
        return library, library.fp4_isa().decode()
    return None, reasons[-1]


def status() -> tuple[bool, str]:
    """``(True, instruction set)`` if the C kernels run here, else ``(False, why not)``."""
    library, text = _library()
    return library is not None, text


def dequantize_rows(codes: Tensor, scale: Tensor, global_scale: float, out: Tensor, meta: Tensor | None = None) -> None:
    """Decode contiguous rows into contiguous ``out [R, K]`` (float32 or bfloat16).

    ``codes`` is qdata ``[R, K/2]``, or values ``[R, K/4]`` with ``meta [R, K/8]``; ``scale [R, K/16]``.
    """
    rows, k = out.shape
    bad = _library()[0].fp4_dequantize_rows(  # type: ignore[union-attr]
        codes.data_ptr(), None if meta is None else meta.data_ptr(), scale.data_ptr(), global_scale, out.data_ptr(), rows, k,
        out.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    if bad and meta is not None:
        validate_meta(meta)


def gemv(x: Tensor, codes: Tensor, scale: Tensor, global_scale: float, meta: Tensor | None = None) -> Tensor:
    """float32 ``[M, N]`` from contiguous float32 ``x [M, K]`` with M in 1..8; the weight as in :func:`dequantize_rows`."""
    (m, k), n = x.shape, codes.shape[0]
    out = torch.empty(m, n, dtype=torch.float32)
    bad = _library()[0].fp4_gemv(  # type: ignore[union-attr]
        x.data_ptr(), codes.data_ptr(), None if meta is None else meta.data_ptr(), scale.data_ptr(), global_scale, out.data_ptr(), m, n, k,
        torch.get_num_threads(),
    )  # fmt: skip
    if bad and 1 <= m <= MAX_M and meta is not None:
        validate_meta(meta)
    elif bad:
        raise KernelError("the C GEMV takes few rows", value=m, limit=f"1 to {MAX_M}", remedy="Call torch.ops.fp4.linear, which takes any number.")
    return out
