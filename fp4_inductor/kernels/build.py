"""Compile a csrc/ source at first use into a private, atomic cache.

The cache lies in ``$FP4_INDUCTOR_CACHE`` (default ``~/.cache/fp4_inductor``), mode 0700. A library's name holds the hash
of its sources, flags, compiler and processor, so a changed byte never meets an old binary; it is written under a
temporary name and renamed, so that concurrent processes never load half a file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

from .._sources import csrc_dir
from ..errors import KernelError


def cache_dir() -> Path:
    """The build cache, created with mode 0700; refuses one that another user could write to."""
    try:
        root = Path(os.environ.get("FP4_INDUCTOR_CACHE") or Path.home() / ".cache" / "fp4_inductor")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        raise KernelError(
            "the build cache cannot be made", value=str(error), limit="a directory you may write to", remedy="Set FP4_INDUCTOR_CACHE to one."
        ) from error
    if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelError(
            "the build cache could be written by another user",
            value=f"{root} uid {info.st_uid} mode {stat.S_IMODE(info.st_mode):o}",
            limit="owned by you, mode 0700",
            remedy="chmod 700 it, or set FP4_INDUCTOR_CACHE.",
        )
    return root


@functools.cache
def compiler() -> str | None:
    """The C compiler: ``$CC``, else the first of cc, gcc, clang; None if there is none."""
    named = os.environ.get("CC")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


@functools.cache
def nvcc() -> str | None:
    """The CUDA compiler: ``$CUDACXX``, ``$CUDA_HOME/bin/nvcc``, or nvcc on the PATH; None if there is none."""
    named = os.environ.get("CUDACXX")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which(named) if named else shutil.which("nvcc") or shutil.which(str(Path(home) / "bin" / "nvcc"))


def pointer(t: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor's data as a C argument; null for None."""
    return ctypes.c_void_p(None if t is None else t.data_ptr())


def shared_library(source: str, flags: tuple[str, ...]) -> Path:
    """Path of the C file ``csrc/<source>`` compiled to a shared library with ``flags``, building it if needed (about a second).

    Raises:
        KernelError: no compiler, or the compiler's own message.
    """
    cc = compiler()
    if cc is None:
        raise KernelError("no C compiler", value="CC, cc, gcc and clang not found", limit="gcc, clang or what CC names", remedy="Install one, or set CC.")
    return _build(cc, source, (csrc_dir() / source,), ("-O3", "-shared", "-fPIC", *flags), ("-lm",), _processor())


def cuda_library(source: str, arch: int) -> Path:
    """Path of the CUDA file ``csrc/<source>`` compiled for ``arch`` (compute capability times ten), building it if needed.

    Raises:
        KernelError: no nvcc, or the compiler's own message.
    """
    compiler = nvcc()
    if compiler is None:
        raise KernelError(
            "no CUDA compiler", value="nvcc not found", limit="nvcc of CUDACXX, CUDA_HOME or the PATH", remedy="Install the CUDA toolkit, or set CUDA_HOME."
        )
    # From Hopper on, the architecture-specific target: wgmma and block-scaled MMA exist only there.
    name = f"{arch}a" if arch >= 90 else str(arch)
    flags = ("-O3", "-std=c++17", f"-gencode=arch=compute_{name},code=sm_{name}", f"-DFP4_ARCH={arch}", "-shared", "-Xcompiler", "-fPIC")
    headers = tuple(sorted(csrc_dir().rglob("*.cuh")))
    return _build(compiler, source, (csrc_dir() / source, *headers), flags, (), "")


def _build(compiler: str, source: str, inputs: tuple[Path, ...], flags: tuple[str, ...], libraries: tuple[str, ...], machine: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = (*(p.read_bytes() for p in inputs), " ".join(flags).encode(), version, machine.encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]
    target = cache_dir() / f"{Path(source).stem}-{key}.so"
    if target.exists():
        return target
    handle, partial = tempfile.mkstemp(suffix=".so", dir=cache_dir())
    os.close(handle)
    try:
        run = subprocess.run([compiler, *flags, str(csrc_dir() / source), "-o", partial, *libraries], capture_output=True, text=True, check=False)
        if run.returncode:
            variable = "CUDACXX" if source.endswith(".cu") else "CC"
            raise KernelError(
                f"{compiler} failed on csrc/{source}",
                value=f"exit status {run.returncode}: {run.stderr.strip()[-800:]}",
                limit="exit status 0",
                remedy=f"Set {variable} to a newer compiler.",
            )
        os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target
