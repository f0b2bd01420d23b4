"""The compilers of this machine: C, C++ and CUDA.

nvcc may come from a CUDA toolkit or from NVIDIA's own pip packages (``pip install "fp4_inductor[nvcc]"``). NVRTC, which torch
brings along, is not used: it compiles device code only, and the sources of ``csrc/`` hold the host code that launches it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from pathlib import Path

PIP = 'pip install "fp4_inductor[nvcc]"'


def _named_or_found(variable: str, names: tuple[str, ...]) -> str | None:
    named = os.environ.get(variable)
    return shutil.which(named) if named else next(filter(None, map(shutil.which, names)), None)


@functools.cache
def compiler() -> str | None:
    """The C compiler: ``$CC``, else the first of cc, gcc, clang; None if there is none."""
    return _named_or_found("CC", ("cc", "gcc", "clang"))


@functools.cache
def cxx() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of c++, g++, clang++; None if there is none."""
    return _named_or_found("CXX", ("c++", "g++", "clang++"))


@functools.cache
def nvcc() -> str | None:
    """The CUDA compiler: ``$CUDACXX``, nvcc on the PATH, ``$CUDA_HOME/bin/nvcc``, or that of the pip packages; None if there is none."""
    named = os.environ.get("CUDACXX")
    if named:
        return shutil.which(named)
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc")) or nvcc_of_pip()


def nvcc_of_pip() -> str | None:
    """nvcc of the pip package nvidia-cuda-nvcc, if the headers and NVVM that it needs are beside it; the newest CUDA first."""
    found = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (found.submodule_search_locations or ())] if found else []
    for cuda in sorted((folder for root in roots for folder in root.glob("cu[0-9]*")), reverse=True):
        needed = (cuda / "include" / "cuda_runtime.h", cuda / "include" / "crt" / "host_config.h", cuda / "nvvm" / "bin" / "cicc")
        if os.access(cuda / "bin" / "nvcc", os.X_OK) and all(path.exists() for path in needed):
            return str(cuda / "bin" / "nvcc")
    return None
