"""Compile the sources of ``csrc/`` at first use, into a private, atomic cache, unless this installation brought them compiled (``prebuilt.py``).

The cache lies in ``$FP4_INDUCTOR_CACHE`` (default ``~/.cache/fp4_inductor``), mode 0700. A library's name holds the hash of its
sources, flags, compiler and, for C, processor, so that a changed byte never meets an old binary. It is written under a
temporary name and renamed, so that concurrent processes never load half a file. Its length and hash are checked before it is
loaded (``intact.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import signal
import stat
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._sources import csrc_dir
from ..errors import KernelError
from . import compilers, prebuilt
from .compilers import compiler, cxx, nvcc
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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    except OSError:
        return platform.processor()


def aligned(t: Tensor) -> Tensor:
    """A contiguous tensor whose address is a multiple of 16: the kernels read 16 bytes at once."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def shared_library(source: str, flags: tuple[str, ...]) -> Path:
    """Path of the C file ``csrc/<source>`` compiled to a shared library with ``flags``, building it if needed (about a second).

    Raises:
        KernelError: no compiler, or the compiler's own message.
    """
    cc = compiler()
    if cc is None:
        raise KernelError("no C compiler", value="CC, cc, gcc and clang not found", limit="gcc, clang or what CC names", remedy="Install one, or set CC.")
    return _build(cc, source, _with_headers(source, "cpu/*.h"), ("-O3", "-shared", "-fPIC", *flags), ("-lm",), _processor())


def cuda_target(arch: int) -> str:
    """nvcc's name of an architecture (compute capability times ten)."""
    # From Hopper on, the architecture-specific target: wgmma and block-scaled MMA exist only there.
    return f"{arch}a" if arch >= 90 else str(arch)


def cuda_flags(arch: int) -> tuple[str, ...]:
    """nvcc's flags for one architecture (compute capability times ten)."""
    name = cuda_target(arch)
    return ("-O3", "-std=c++17", f"-gencode=arch=compute_{name},code=sm_{name}", f"-DFP4_ARCH={arch}", "-shared", "-Xcompiler", "-fPIC")


def _with_headers(source: str, *patterns: str) -> tuple[Path, ...]:
    return (csrc_dir() / source, *(header for pattern in patterns for header in sorted(csrc_dir().rglob(pattern))))


def _cuda(source: str, arch: int, defines: tuple[str, ...]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    return _with_headers(source, "*.cuh", "common/*.h"), (*cuda_flags(arch), *defines)


def cuda_identity(source: str, arch: int, defines: tuple[str, ...] = ()) -> str:
    """The hash of the sources and the flags of a CUDA library."""
    return _hash(*_cuda(source, arch, defines))


def cuda_ready(source: str, arch: int, defines: tuple[str, ...] = ()) -> Path | None:
    """The library if it needs no compiling: this installation brought it, or the cache holds it. None: it can be compiled.

    Raises:
        KernelError: it cannot: there is no nvcc, or no cache.
    """
    inputs, flags = _cuda(source, arch, defines)
    found = prebuilt.find(_hash(inputs, flags))
    return found or _intact(_cached(_nvcc(arch), source, inputs, flags, ""))


def _intact(cached: Path) -> Path | None:
    return cached if is_intact(cached) else None


def cuda_library(source: str, arch: int, defines: tuple[str, ...] = ()) -> Path:
    """Path of the CUDA file ``csrc/<source>`` compiled for ``arch`` (compute capability times ten) with ``defines``, building it if needed.

    Raises:
        KernelError: no nvcc, or the compiler's own message.
    """
    inputs, flags = _cuda(source, arch, defines)
    return prebuilt.find(_hash(inputs, flags)) or _build(_nvcc(arch), source, inputs, flags, library_folders(), "")


def compile_cuda(target: Path, source: str, arch: int, defines: tuple[str, ...], link: tuple[str, ...]) -> None:
    """Compile a CUDA library to ``target``, past the cache."""
    compile_to(target, _nvcc(), source, (*_cuda(source, arch, defines)[1], str(csrc_dir() / source), "-o", str(target), *link))


def library_folders() -> tuple[str, ...]:
    """Where the linker finds the CUDA runtime: nvcc's own settings do not name the folder that its pip packages use."""
    home = cuda_home(_nvcc())
    return tuple(f"-L{home / name}" for name in ("lib64", "lib") if (home / name).is_dir())


@functools.cache
def cuda_home(nvcc: str) -> Path:
    """The folder of the toolkit that ``nvcc``, perhaps a script that calls the real one, belongs to, as it says itself."""
    with _started([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], text=True, stdout=subprocess.PIPE) as process:
        _, said = process.communicate()
    top = next((line.split("TOP=")[1] for line in said.splitlines() if "TOP=" in line), None)
    return Path(top).resolve() if top else Path(nvcc).resolve().parent.parent


def _nvcc(arch: int | None = None) -> str:
    found = nvcc()
    if found is None:
        brought = prebuilt.architectures()
        without = f"; this installation has kernels for {', '.join(f'sm_{a}' for a in brought)}" if brought and arch not in brought else ""
        raise KernelError(
            "no CUDA compiler" if arch is None else f"no CUDA kernels for sm_{arch}",
            value=f"nvcc not found{without}",
            limit="nvcc of CUDACXX, the PATH, CUDA_HOME or pip",
            remedy=f"{compilers.PIP}, or install the CUDA toolkit.",
        )
    return found


BINDING = "binding/ops.cpp"
# The stable ABI of torch 2.11: a binding built with any later torch uses nothing newer, and one build serves them all.
_STABLE_ABI = "0x020b000000000000"
BINDING_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={_STABLE_ABI}")


def binding_identity(extra: tuple[str, ...] = ()) -> str:
    """The hash of the sources and the flags of the binding."""
    return _hash(_with_headers(BINDING, "*.h"), (*BINDING_FLAGS, *extra))


def _torch_libraries() -> tuple[str, ...]:
    root = Path(torch.__file__).parent
    return (f"-I{root / 'include'}", "-Wl,--no-as-needed", f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10")


def binding_library(extra: tuple[str, ...] = ()) -> Path:
    """Path of ``torch.ops.fp4_csrc`` compiled with the headers of the torch that is installed, building it if needed (10 to 20 seconds).

    Raises:
        KernelError: no C++ compiler, or the compiler's own message.
    """
    found = prebuilt.find(binding_identity(extra))
    return found or _build(_cxx(), BINDING, _with_headers(BINDING, "*.h"), (*BINDING_FLAGS, *extra), _torch_libraries(), "")


def compile_binding(target: Path) -> None:
    """Compile the binding to ``target``, past the cache."""
    compile_to(target, _cxx(), BINDING, (*BINDING_FLAGS, str(csrc_dir() / BINDING), "-o", str(target), *_torch_libraries()))


def binding_ready() -> Path | None:
    """As :func:`cuda_ready`."""
    found = prebuilt.find(binding_identity())
    return found or _intact(_cached(_cxx(), BINDING, _with_headers(BINDING, "*.h"), BINDING_FLAGS, ""))


def _cxx() -> str:
    compiler = cxx()
    if compiler is None:
        raise KernelError(
            "no C++ compiler", value="CXX, c++, g++ and clang++ not found", limit="g++, clang++ or what CXX names", remedy="Install one, or set CXX."
        )
    return compiler


def _hash(inputs: tuple[Path, ...], flags: tuple[str, ...], *more: bytes) -> str:
    return hashlib.sha256(b"\0".join((*(p.read_bytes() for p in inputs), " ".join(flags).encode(), *more))).hexdigest()[:24]


@functools.cache
def _version(compiler: str) -> bytes:
    with _started([compiler, "--version"], stdout=subprocess.PIPE) as process:
        return process.communicate()[0]


def _cached(compiler: str, source: str, inputs: tuple[Path, ...], flags: tuple[str, ...], machine: str) -> Path:
    return cache_dir() / f"{Path(source).stem}-{_hash(inputs, flags, _version(compiler), machine.encode())}.so"


def _build(compiler: str, source: str, inputs: tuple[Path, ...], flags: tuple[str, ...], libraries: tuple[str, ...], machine: str) -> Path:
    target = _cached(compiler, source, inputs, flags, machine)
    if not is_intact(target):
        with _alone(target) as waited:
            if not waited or not is_intact(target):  # who was waited for may have made it
                with _partial() as partial:
                    compile_to(partial, compiler, source, (*flags, str(csrc_dir() / source), "-o", str(partial), *libraries))
                    publish(partial, target)
    return target


@contextlib.contextmanager
def _alone(target: Path):
    """Only one process at a time, of the ranks of a model for example, is inside for ``target``; true if another one was waited for.

    A process that dies leaves it. Where files cannot be locked, or where one comes as another leaves, several may be inside and compile the same library.
    """
    file, waited = target.with_suffix(".lock"), False
    with _no_fork:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locked.add(handle)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield waited
    finally:
        file.unlink(missing_ok=True)
        _locked.discard(handle)
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


# Held while files are opened that a forked child must not keep: the end of a pipe for what a compiler says, which the parent reads until it is closed
# everywhere, and locks. A fork waits for it.
_no_fork = threading.Lock()
os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_no_fork.release)
_locked: set[int] = set()


def _leave_locks() -> None:
    """In a child process: a lock is held until every process that inherited its file has closed it."""
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_leave_locks)


@contextlib.contextmanager
def _partial():
    """A temporary file of the cache, removed unless it was renamed."""
    if _ending.is_set():
        raise KernelError("nothing is compiled any more", value="the program ends", limit="a running program", remedy="Start it again.")
    handle, name = tempfile.mkstemp(suffix=".so", dir=cache_dir())
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


_running: dict[subprocess.Popen, Path] = {}
os.register_at_fork(after_in_child=_running.clear)  # they are the parent's
_ending = threading.Event()


@atexit.register
def _stop_compilers() -> None:
    """A program that ends does not wait for the compilers that run in the background, and leaves none of their files."""
    _ending.set()
    for process, partial in list(_running.items()):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nvcc's own children, too
        partial.unlink(missing_ok=True)


def _started(command: list[str], **options: Any) -> subprocess.Popen:
    """A compiler, what it says in pipes that no child which is forked meanwhile keeps open."""
    with _no_fork:
        return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def compile_to(partial: Path, compiler: str, source: str, arguments: tuple[str, ...]) -> None:
    """Run a compiler.

    Raises:
        KernelError: its own message.
    """
    process = _started([compiler, *arguments], stdout=subprocess.DEVNULL, text=True, process_group=0)
    _running[process] = partial
    try:
        _, errors = process.communicate()
    finally:
        del _running[process]
    if process.returncode:
        variable = {".cu": "CUDACXX", ".cpp": "CXX"}.get(Path(source).suffix, "CC")
        raise KernelError(
            f"{compiler} failed on csrc/{source}",
            value=f"exit status {process.returncode}: {errors.strip()[-800:]}",
            limit="exit status 0",
            remedy=f"Set {variable} to a newer compiler.",
        )
