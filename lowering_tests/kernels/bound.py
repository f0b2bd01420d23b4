"""torch.ops.fp4_csrc with emulated kernels behind it, for tests of the binding."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import pytest
import torch

from fp4_inductor.errors import DeviceError
from fp4_inductor.kernels import build, csrc, params
from fp4_inductor.kernels.csrc import LIBRARIES
from lowering_tests.kernels.emulator import emulated

ARCH = 90


def library_of(kernel: csrc.Library) -> ctypes.CDLL:
    return emulated(kernel.source, 120 if kernel.codes else ARCH, kernel.defines).library


STANDINS: dict[tuple[str, int], int] = {}  # addresses of C functions that a test gives in the place of a kernel's, by its name and an architecture


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
def resolve(name: bytes, arch: int, scratch: int):
    if (name.decode(), arch) in STANDINS:
        return None if scratch else STANDINS[name.decode(), arch]
    kernel = LIBRARIES[name.decode()]
    library = library_of(kernel) if arch == (120 if kernel.codes else ARCH) else None
    return None if library is None else params.address(library, kernel.function, bool(scratch))


@functools.cache
def operators() -> Any:
    """``torch.ops.fp4_csrc`` on CPU tensors, set up as ``csrc.binding`` sets it up for CUDA ones. A process registers them once and cannot take them back."""
    with pytest.raises(DeviceError, match="cuda"):
        torch.ops.fp4_csrc.linear_small(torch.zeros(1, 64), torch.zeros(8, 32), torch.zeros(8, 4), torch.zeros(()), None, ARCH)
    torch.ops.load_library(str(build.binding_library(("-DFP4_EMULATED",))))
    binding().fp4_csrc_bind(resolve, None)
    return torch.ops.fp4_csrc


def binding() -> ctypes.CDLL:
    """What :func:`operators` has loaded."""
    return ctypes.CDLL(str(build.binding_library(("-DFP4_EMULATED",))))
