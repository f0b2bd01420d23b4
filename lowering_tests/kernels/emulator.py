"""CUDA kernels of csrc/ on a CPU: the sources compiled by the C++ compiler against ``emulated/``, called through ctypes.

Every launch is checked as compute-sanitizer would check it (bounds, alignment, initialisation, races, asynchronous copies
that nobody waited for, barriers that not all threads reach); :class:`EmulatorError` carries what was found.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp4_inductor._sources import csrc_dir
from fp4_inductor.kernels import csrc

FOLDER = Path(__file__).parent / "emulated"
COMMON = ("-std=c++17", "-fPIC", f"-I{FOLDER}")
# Every access is reported to runtime.cpp (which is linked in place of the sanitizers' own libraries), and so is undefined behaviour.
INSTRUMENTED = ("-fsanitize=thread,alignment,shift,signed-integer-overflow,bounds", "-Wno-unknown-pragmas")
FAST = ("-O3", "-march=native", "-ffp-contract=off")  # of the emulator itself; a product and a sum stay two roundings


def tiles_of(source: str, macro: str = "TILE") -> list[tuple[int, ...]]:
    """Those that ``csrc/<source>`` compiles."""
    return [tuple(map(int, found.split(","))) for found in re.findall(rf"\b{macro}\(([\d, ]+)\)", (csrc_dir() / source).read_text())]


def grouped_tiles() -> list[int]:
    """The tiles that ``csrc/moe/grouped_wide.cu`` compiles: a number of tokens, and one more where the first product gathers them."""
    rows = re.findall(r"\{(\d+), (true|false), \{", (csrc_dir() / "moe/grouped_wide.cu").read_text())
    return [int(tokens) + gathers for tokens, only in rows for gathers in ((1,) if only == "true" else (0, 1))]


class EmulatorError(Exception):
    """What the emulator found wrong in a launch."""


def check_caught(kernel: Emulated, fault: str, words: str | None, run: Callable[[], float], least: float = 0.1) -> None:
    """``run()`` calls ``kernel`` with one line broken: the emulator says ``words``, a pattern; if None, it says nothing, and the result is wrong.

    Args:
        fault: ``NAME`` of an ``FP4_FAULT(NAME)`` of the source.
        run: returns the relative error of the result.
        least: the error that shows that a result is wrong.
    """
    with kernel.fault(fault):
        if words is None:
            assert not run() <= least
        else:
            with pytest.raises(EmulatorError, match=words):
                run()


def compiler() -> str | None:
    """GCC: the accesses reported and the fibers are its own and glibc's."""
    return shutil.which("g++")


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fp4_emulated_")


def _made(source: Path, suffix: str, command: Iterable[str]) -> Path:
    """What ``command`` makes of ``source``, once for all workers of a session (conftest.py), whose files do not change."""
    command = ("g++", *command)
    folder = Path(os.environ.get("FP4_EMULATED_CACHE") or _own_folder().name)
    target = folder / f"{source.stem}_{hashlib.sha256(repr(command).encode()).hexdigest()[:16]}{suffix}"
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            run = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True, check=False)
            if run.returncode:
                raise RuntimeError(run.stderr[-4000:])
            partial.rename(target)
    return target


def _compile(source: Path, flags: Iterable[str] = ()) -> Path:
    options = (*COMMON, "-Og", "-DFP4_EMULATED", *flags)
    return _made(source, ".o", ("-x", "c++", *options, "-include", str(_headers(options)), "-c", str(source)))


def _headers(options: Iterable[str]) -> Path:
    """Those that every source begins with, precompiled: a third of the time of what is compiled once. Where GCC cannot use that it reads the header."""
    header = _made(FOLDER / "cuda.h", ".h.gch", ("-x", "c++-header", *options, str(FOLDER / "cuda.h"))).with_suffix("")
    with contextlib.suppress(FileExistsError):
        header.symlink_to(FOLDER / "cuda.h")
    return header


@functools.cache
def _runtime() -> tuple[Path, ...]:
    return tuple(_made(FOLDER / name, ".o", (*COMMON, *FAST, "-c", str(FOLDER / name))) for name in ("runtime.cpp", "device.cpp"))


class Emulated:
    """One source of csrc/ as a library whose kernels run here.

    Args:
        source: path below csrc/, or an absolute one.
        arch: what the source is told it is compiled for.
        defines: further flags of the compiler.
    """

    def __init__(self, source: str | Path, arch: int = 90, defines: tuple[str, ...] = ()):
        compiled = _compile(csrc_dir() / source, (*INSTRUMENTED, f"-DFP4_ARCH={arch}", *defines))
        library = _made(compiled, ".so", ("-shared", str(compiled), *map(str, _runtime())))
        self.path, self.name = library, Path(source).stem
        self.library = ctypes.CDLL(str(library))
        self.library.emulator_allocate.restype = ctypes.c_void_p
        self.library.emulator_allocate.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self.library.emulator_message.restype = ctypes.c_char_p

    @property
    def function(self) -> str:
        """The C function of the source."""
        return f"fp4_{self.name}"

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """The line of the source that ``FP4_FAULT(name)`` guards is broken."""
        self.library.emulator_fault(name.encode())
        try:
            yield
        finally:
            self.library.emulator_fault(b"")

    @property
    def scratch(self) -> int:
        """Bytes that a call takes besides."""
        return csrc.scratch_bytes(self.name)

    def begin(self, early: bool = False) -> tuple[int, ...]:
        """The argument before the tile that says whether the kernel begins early, where it can."""
        return (int(early),) if csrc.KERNELS[self.name].early else ()

    def put(self, t: Tensor | None, offset: int = 0) -> ctypes.c_void_p:
        """A copy of ``t`` in device memory, ``offset`` bytes past an aligned place."""
        if t is None:
            return ctypes.c_void_p(None)
        t = t.detach().contiguous()
        size = t.numel() * t.element_size()
        place = self.library.emulator_allocate(size, offset)
        if place is None:
            raise MemoryError("the emulated device is full")
        ctypes.memmove(place, t.data_ptr(), size)
        return ctypes.c_void_p(place)

    def call(
        self, name: str, tensors: Iterable[Tensor | None], out: Tensor, *rest: int, seed: int = 0, constants: Iterable[int] = (), scratch: int = 0
    ) -> Tensor:
        """``name(tensors..., out, rest..., [scratch,] stream)``; returns what was written to a copy of ``out``.

        ``constants``: which of ``tensors`` a kernel that begins early may read before it has waited.
        ``scratch``: bytes of memory that the kernel takes besides.

        Raises:
            EmulatorError: a check of the emulator, or the status the function returned.
        """
        self.library.emulator_seed(seed)
        try:
            tensors = list(tensors)
            pointers = [self.put(t) for t in tensors]
            for i in constants:
                t = tensors[i]
                if t is not None:
                    self.library.emulator_constant(pointers[i], ctypes.c_size_t(t.numel() * t.element_size()))
            place = self.put(out)
            more = [self.put(torch.full((scratch,), 0xFF, dtype=torch.uint8))] if scratch else []
            status = getattr(self.library, name)(*pointers, place, *rest, *more, ctypes.c_void_p(None))
            message = self.library.emulator_message().decode()
            if status or message:
                raise EmulatorError(message or f"status {status}")
            written = torch.empty_like(out)
            ctypes.memmove(written.data_ptr(), place.value, out.numel() * out.element_size())
            return written
        finally:
            self.library.emulator_free_all()


@functools.cache
def emulated(source: str, arch: int = 90, defines: tuple[str, ...] = ()) -> Emulated:
    """:class:`Emulated`, compiled once in a process."""
    return Emulated(source, arch, defines)
