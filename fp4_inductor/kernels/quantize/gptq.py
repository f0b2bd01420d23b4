"""The loops over columns of :mod:`...formats.gptq` for a weight's device: Triton kernels on a GPU, on a CPU the C routines of ``csrc/cpu/gptq.c``,
compiled at first use.

They give the bits of the torch operators, which run everywhere else and where there is no C compiler: 2.3 s for a layer of 576 x 1536 on two
cores, against 0.4 s with the routines.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ...formats import gptq, nvfp4
from ...formats.sparse24 import Sparse24Parts
from .cpu import compiled

SOURCE = "cpu/gptq.c"
_ADDRESS = ctypes.c_void_p


def quantize(w: Tensor, hessian: Tensor, global_scale: Tensor | None = None, outputs: gptq.Outputs | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`fp4_inductor.formats.gptq.quantize` with the fastest loops that run where ``w`` is."""
    return gptq.quantize(w, hessian, global_scale, _panels(w), outputs)


def quantize_sparse24(w: Tensor, hessian: Tensor, start: Sparse24Parts) -> Sparse24Parts:
    """:func:`fp4_inductor.formats.gptq.quantize_sparse24` with the fastest loops that run where ``w`` is."""
    return gptq.quantize_sparse24(w, hessian, start, _panels(w))


def _panels(w: Tensor) -> gptq.Panels:
    if w.device.type == "cuda":
        from . import gpu  # only where Triton can run

        return gpu.PANELS
    return gptq.Panels(_rounded, _refined) if w.device.type == "cpu" and _library() is not None else gptq.TORCH


def opened(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions' arguments."""
    library = ctypes.CDLL(str(path))
    for name, inputs, outputs in (("fp4_gptq_round", 4, 3), ("fp4_gptq_refine", 6, 1)):
        function = getattr(library, name)
        function.restype = None
        function.argtypes = (*[_ADDRESS] * inputs, ctypes.c_float, *[ctypes.c_int64] * 2, *[_ADDRESS] * outputs, ctypes.c_int)
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    return compiled(SOURCE, opened)


def _rounded(w: Tensor, u: Tensor, g: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    q, error = torch.empty_like(w), torch.empty_like(w)
    codes = torch.empty(w.shape[0], w.shape[1] // nvfp4.GROUP, dtype=torch.uint8)
    inverse = u.diagonal().reciprocal()
    _library().fp4_gptq_round(  # type: ignore[union-attr]
        w.data_ptr(),
        u.data_ptr(),
        inverse.data_ptr(),
        _address(keep),
        float(g),
        *w.shape,
        q.data_ptr(),
        error.data_ptr(),
        codes.data_ptr(),
        torch.get_num_threads(),
    )
    return q, codes, error


def _refined(pull: Tensor, q: Tensor, codes: Tensor, h: Tensor, g: Tensor, keep: Tensor | None) -> Tensor:
    change = torch.empty_like(q)
    inverse = h.diagonal().reciprocal()
    _library().fp4_gptq_refine(  # type: ignore[union-attr]
        pull.data_ptr(),
        q.data_ptr(),
        codes.data_ptr(),
        h.data_ptr(),
        inverse.data_ptr(),
        _address(keep),
        float(g),
        *q.shape,
        change.data_ptr(),
        torch.get_num_threads(),
    )
    return change


def _address(keep: Tensor | None) -> int | None:
    return None if keep is None else keep.data_ptr()
