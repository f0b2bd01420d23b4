"""Compile csrc/ sources: when the package is installed where that is possible, else at first use into a private, atomic cache.

The cache lies in ``$FP4_INDUCTOR_CACHE`` (default ``~/.cache/fp4_inductor``), mode 0700. A library's name holds the hash
of its sources, flags, compiler, torch (for the binding) and processor (for C), so a changed byte never meets an old binary; it is
written under a temporary name and renamed, so that concurrent processes never load half a file, and its length and
hash are checked before it is loaded (``intact.py``). What ``pip install`` built lies in
``fp4_inductor/_lib`` under the hash of sources and flags, and needs no compiler at run time.
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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .._sources import csrc_dir, prebuilt_dir
from ..errors import KernelError
from .intact import is_intact, publish


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


@functools.cache
def cxx() -> str | None:
    """The C++ compiler: ``$CXX``, else the first of c++, g++, clang++; None if there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def aligned(t: Tensor) -> Tensor:
    """A contiguous tensor whose address is a multiple of 16: the kernels read 16 bytes at once."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


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


def cuda_flags(arch: int) -> tuple[str, ...]:
    """nvcc's flags for one architecture (compute capability times ten)."""
    # From Hopper on, the architecture-specific target: wgmma and block-scaled MMA exist only there.
    name = f"{arch}a" if arch >= 90 else str(arch)
    return ("-O3", "-std=c++17", f"-gencode=arch=compute_{name},code=sm_{name}", f"-DFP4_ARCH={arch}", "-shared", "-Xcompiler", "-fPIC")


def _with_headers(source: str, pattern: str) -> tuple[Path, ...]:
    return (csrc_dir() / source, *sorted(csrc_dir().rglob(pattern)))


def cuda_library(source: str, arch: int, defines: tuple[str, ...] = ()) -> Path:
    """Path of the CUDA file ``csrc/<source>`` compiled for ``arch`` (compute capability times ten) with ``defines``, building it if needed.

    Raises:
        KernelError: no nvcc, or the compiler's own message.
    """
    inputs, flags = _with_headers(source, "*.cuh"), (*cuda_flags(arch), *defines)
    ready = _prebuilt(source, inputs, flags)
    return ready or _build(_nvcc(), source, inputs, flags, (), "")


def _nvcc() -> str:
    found = nvcc()
    if found is None:
        raise KernelError(
            "no CUDA compiler", value="nvcc not found", limit="nvcc of CUDACXX, CUDA_HOME or the PATH", remedy="Install the CUDA toolkit, or set CUDA_HOME."
        )
    return found


BINDING = "binding/ops.cpp"
# The stable ABI of torch 2.11: a binding built with any later torch uses nothing newer.
_STABLE_ABI = "0x020b000000000000"


def binding_flags() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The C++ compiler's flags for the torch that is installed, and what to link."""
    root = Path(torch.__file__).parent
    flags = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={_STABLE_ABI}", f"-DFP4_TORCH={torch.__version__}")
    libraries = ["-Wl,--no-as-needed", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    if (root / "lib" / "libtorch_cuda.so").exists():
        libraries.append("-ltorch_cuda")
    return flags, (f"-I{root / 'include'}", *libraries)


def binding_library(extra: tuple[str, ...] = ()) -> Path:
    """Path of ``torch.ops.fp4_csrc`` compiled for the torch that is installed, building it if needed (a few seconds).

    Raises:
        KernelError: no C++ compiler, or the compiler's own message.
    """
    flags, libraries = binding_flags()
    flags = (*flags, *extra)
    inputs = _with_headers(BINDING, "*.h")
    ready = _prebuilt(BINDING, inputs, flags)
    if ready is not None:
        return ready
    compiler = cxx()
    if compiler is None:
        raise KernelError(
            "no C++ compiler", value="CXX, c++, g++ and clang++ not found", limit="g++, clang++ or what CXX names", remedy="Install one, or set CXX."
        )
    return _build(compiler, BINDING, inputs, flags, libraries, "")


def prebuild(folder: Path, sources: Iterable[tuple[str, int, tuple[str, ...]]]) -> list[Path]:
    """Compile the binding, and every source for its architecture with its defines, into ``folder``, in parallel. For ``setup.py``.

    Raises:
        KernelError: as :func:`cuda_library` and :func:`binding_library`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple] = [
        (source, _with_headers(source, "*.cuh"), (*cuda_flags(arch), *defines), cuda_library, (source, arch, defines)) for source, arch, defines in sources
    ]
    jobs.append((BINDING, _with_headers(BINDING, "*.h"), binding_flags()[0], binding_library, ()))

    def run(job) -> Path:
        source, inputs, flags, make, arguments = job
        return Path(shutil.copy2(make(*arguments), folder / _prebuilt_name(source, inputs, flags)))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, jobs))


def _prebuilt_name(source: str, inputs: tuple[Path, ...], flags: tuple[str, ...]) -> str:
    return f"{Path(source).stem}-{_hash(inputs, flags)}.so"


def _prebuilt(source: str, inputs: tuple[Path, ...], flags: tuple[str, ...]) -> Path | None:
    folder = prebuilt_dir()
    path = folder / _prebuilt_name(source, inputs, flags) if folder else None
    return path if path is not None and path.exists() else None


def _hash(inputs: tuple[Path, ...], flags: tuple[str, ...], *more: bytes) -> str:
    return hashlib.sha256(b"\0".join((*(p.read_bytes() for p in inputs), " ".join(flags).encode(), *more))).hexdigest()[:24]


def _build(compiler: str, source: str, inputs: tuple[Path, ...], flags: tuple[str, ...], libraries: tuple[str, ...], machine: str) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    target = cache_dir() / f"{Path(source).stem}-{_hash(inputs, flags, version, machine.encode())}.so"
    if is_intact(target):
        return target
    handle, partial = tempfile.mkstemp(suffix=".so", dir=cache_dir())
    os.close(handle)
    try:
        run = subprocess.run([compiler, *flags, str(csrc_dir() / source), "-o", partial, *libraries], capture_output=True, text=True, check=False)
        if run.returncode:
            variable = {".cu": "CUDACXX", ".cpp": "CXX"}.get(Path(source).suffix, "CC")
            raise KernelError(
                f"{compiler} failed on csrc/{source}",
                value=f"exit status {run.returncode}: {run.stderr.strip()[-800:]}",
                limit="exit status 0",
                remedy=f"Set {variable} to a newer compiler.",
            )
        publish(Path(partial), target)
    finally:
        Path(partial).unlink(missing_ok=True)
    return target
