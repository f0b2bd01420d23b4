"""fp4.quantize on a CPU by the C routine ``csrc/cpu/quantize.c``, compiled at first use; bit for bit what :mod:`...formats.nvfp4` defines.

The definition reads and writes a weight about ten times for every candidate of a scale; the routine keeps sixteen blocks in
registers while all their candidates are tried. Where there is no C compiler the definition itself runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ...errors import KernelError
from ...formats import nvfp4
from ...ops import quantize as contract
from ..build import shared_library
from ..linear.cpu_native import openmp

SOURCE = "cpu/quantize.c"
# The definition rounds every product and every sum, and raises no floating-point exceptions that anyone would read.
FLAGS = ("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno")
_ADDRESS = ctypes.c_void_p
_SEARCHES = {"amax": 0, "four_over_six": 1, "mse": 2, "activation": 2}


def opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions' arguments."""
    library = ctypes.CDLL(str(path))
    library.fp4_quantize_isa.restype = ctypes.c_char_p
    library.fp4_quantize.restype = None
    library.fp4_quantize.argtypes = (
        _ADDRESS, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, _ADDRESS, ctypes.c_int, _ADDRESS, _ADDRESS, _ADDRESS, ctypes.c_int,
    )  # fmt: skip
    library.fp4_rounding_error.restype = None
    library.fp4_rounding_error.argtypes = (
        _ADDRESS, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, _ADDRESS, _ADDRESS, ctypes.c_float, _ADDRESS, ctypes.c_int,
    )  # fmt: skip
    return library


def compiled(source: str, open_: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL | None:
    """``source`` for this CPU, opened by ``open_``, with the best flags that its compiler takes; None: there is none."""
    for flags in (("-march=native", *openmp()), ("-march=native", "-fopenmp"), ("-fopenmp",)):
        try:
            return open_(shared_library(source, (*FLAGS, *flags)))
        except (KernelError, OSError):
            continue
    return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    return compiled(SOURCE, opened)


def quantize(w: Tensor, scale_search: str = "amax", global_scale: Tensor | None = None, channel_weight: Tensor | None = None):
    """:func:`fp4_inductor.formats.nvfp4.quantize`; the returned global scale never aliases the given one."""
    library = _library() if w.numel() else None
    if library is None:
        return contract.reference(w, scale_search, global_scale, channel_weight)
    g, weight = nvfp4.checked_options(w, scale_search, global_scale, channel_weight)
    lead, (n, k) = tuple(w.shape[:-2]), w.shape[-2:]
    rows, row_scale = w.flatten(0, -2), nvfp4.scale_of_rows(g, n).contiguous()
    qdata = torch.empty(rows.shape[0], k // 2, dtype=torch.uint8)
    scale = torch.empty(rows.shape[0], k // nvfp4.GROUP, dtype=torch.uint8)
    weight = None if weight is None else weight.contiguous()
    # What the routine does not read as it lies (float16, a transposed weight) is copied, some rows at a time.
    direct = rows.is_contiguous() and rows.dtype != torch.float16
    for part in (slice(0, rows.shape[0]),) if direct else nvfp4.row_chunks(rows.shape[0], k):
        read = rows[part].float() if rows.dtype == torch.float16 else rows[part]
        read = read.contiguous()
        library.fp4_quantize(
            read.data_ptr(), read.dtype == torch.bfloat16, len(read), k, row_scale[part].data_ptr(), _SEARCHES[scale_search],
            None if weight is None else weight.data_ptr(), qdata[part].data_ptr(), scale[part].data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
    g = g.clone() if global_scale is not None else g
    return qdata.view(*lead, n, k // 2), scale.view(nvfp4.SCALE_DTYPE).view(*lead, n, k // nvfp4.GROUP), g


def rounding_error(w: Tensor, qdata: Tensor, scale: Tensor, global_scale: Tensor) -> tuple[float, float] | None:
    """``(|w - dequantized|^2, |w|^2)`` of a matrix ``[N, K]`` on the CPU, summed in float64; None if the C routine cannot read these tensors."""
    tensors = (w, qdata, scale)
    library = _library() if w.dtype in (torch.bfloat16, torch.float32) and w.numel() and w.shape == (len(qdata), 2 * qdata.shape[1]) else None
    if library is None or any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return None
    sums = torch.empty(w.shape[0], 2, dtype=torch.float64)
    library.fp4_rounding_error(
        w.data_ptr(), w.dtype == torch.bfloat16, *w.shape, qdata.data_ptr(), scale.data_ptr(), float(global_scale), sums.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    error, norm = sums.sum(0).tolist()
    return error, norm
