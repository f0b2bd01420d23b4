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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4_inductor._sources import csrc_dir
from fp4_inductor.kernels import params
from fp4_inductor.kernels.moe.grouped_wide import Tile
from fp4_inductor.ops.activation import Activation

FOLDER = Path(__file__).parent / "emulated"
COMMON = ("-std=c++17", "-fPIC", f"-I{FOLDER}")
# Every access is reported to memory.cpp (which is linked in place of the sanitizers' own libraries), and so is undefined behaviour.
INSTRUMENTED = ("-fsanitize=thread,alignment,shift,signed-integer-overflow,bounds", "-Wno-unknown-pragmas")
# Of the emulator itself, whose functions call each other as they are; a product and a sum stay two roundings.
FAST = ("-O3", "-march=native", "-ffp-contract=off", "-fno-semantic-interposition")


FP8_TILES_IN = "gemm/multiply_fp8.cuh"


def tiles_of(source: str, macro: str = "TILE") -> list[tuple[int, ...]]:
    """Those that ``csrc/<source>`` compiles."""
    return [tuple(map(int, found.split(","))) for found in re.findall(rf"\b{macro}\(([\d, ]+)\)", (csrc_dir() / source).read_text())]


def fp8_tiles() -> list[tuple[int, ...]]:
    """(tokens, splits) of linear_wide_fp8.cu and sparse_linear_wide_fp8.cu, which ``csrc/gemm/multiply_fp8.cuh`` names; splits 0: equal shares."""
    return [*tiles_of(FP8_TILES_IN), *((tokens, 0) for (tokens,) in tiles_of(FP8_TILES_IN, "STREAMED"))]


def grouped_tiles() -> list[Tile]:
    """The tiles that ``csrc/moe/grouped_wide.cu`` compiles."""
    rows = re.findall(r"\{(\d+), (true|false), \{", (csrc_dir() / "moe/grouped_wide.cu").read_text())
    return [Tile(int(tokens), gathers) for tokens, only in rows for gathers in ((True,) if only == "true" else (False, True))]


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


def _compile(source: Path, arch: int, defines: Iterable[str] = ()) -> Path:
    """A library with more behind its products runs a few cases, so that to optimise it takes longer than they do; so do the 36 kernels of attention."""
    few = bool(defines) or source.parent.name == "attention"
    options = (*COMMON, "-O0" if few else "-Og", "-DFP4_EMULATED", *INSTRUMENTED, f"-DFP4_ARCH={arch}", *defines)
    header = FOLDER / "cuda.h" if defines else _headers(options)
    return _made(source, ".o", ("-x", "c++", *options, "-include", str(header), "-c", str(source)))


def _headers(options: Iterable[str]) -> Path:
    """Those that every source begins with, precompiled, which takes as long as three sources save. Where GCC cannot use that it reads the header."""
    header = _made(FOLDER / "cuda.h", ".h.gch", ("-x", "c++-header", *options, str(FOLDER / "cuda.h"))).with_suffix("")
    with contextlib.suppress(FileExistsError):
        header.symlink_to(FOLDER / "cuda.h")
    return header


@functools.cache
def _runtime() -> tuple[Path, ...]:
    return tuple(_made(FOLDER / name, ".o", (*COMMON, *FAST, "-c", str(FOLDER / name))) for name in ("runtime.cpp", "memory.cpp", "copies.cpp", "device.cpp"))


class Emulated:
    """One source of csrc/ as a library whose kernels run here.

    Args:
        source: path below csrc/, or an absolute one.
        arch: what the source is told it is compiled for.
        defines: further flags of the compiler.
    """

    def __init__(self, source: str | Path, arch: int = 90, defines: tuple[str, ...] = ()):
        compiled = _compile(csrc_dir() / source, arch, defines)
        library = _made(compiled, ".so", ("-shared", "-Wl,-Bsymbolic", str(compiled), *map(str, _runtime())))
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

    def run(
        self, kind: type[params.Struct], fields: Mapping[str, Any], out: Tensor, *, seed: int = 0, constants: Iterable[str] = (), scratch: int | None = None,
        changed: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """A call of the source's C function; returns what was written to a copy of ``out``, its y.

        Args:
            kind: the struct that it takes.
            fields: of the struct, by name; tensors where it has pointers.
            constants: which of ``fields`` a kernel may read before its PDL wait.
            scratch: bytes of scratch memory; None: as many as the source says.
            changed: those of the tensors, contiguous, that get what the kernel wrote to them.

        Raises:
            EmulatorError: a check of the emulator, or the status the function returned.
        """

        def placed(fields: Mapping[str, Any]) -> dict[str, Any]:
            given = {}
            for name, value in fields.items():
                given[name] = placed(value) if isinstance(value, dict) else self.put(value).value if isinstance(value, Tensor) else value
                back.extend((t, given[name]) for t in changed if t is value)
                if name in constants and isinstance(value, Tensor):
                    self.library.emulator_constant(ctypes.c_void_p(given[name]), ctypes.c_size_t(value.nbytes))
            return given

        back: list[tuple[Tensor, Any]] = []

        def launch(place: ctypes.c_void_p) -> int:
            given = kind.of(**placed(fields), y=place.value)
            size = params.scratch_bytes(self.library, self.function, given) if scratch is None else scratch
            if size > 0:
                given.scratch, given.scratch_bytes = self.put(torch.full((size,), 0xFF, dtype=torch.uint8)).value, size
            status = getattr(self.library, self.function)(ctypes.byref(given))
            for t, place_of_it in back:
                ctypes.memmove(t.data_ptr(), place_of_it, t.nbytes)
            return status

        return self._written(out, seed, launch)

    def call(self, name: str, tensors: Iterable[Tensor | None], out: Tensor, *rest: int, seed: int = 0) -> Tensor:
        """As :meth:`run`, of a function of a test's own source: ``name(tensors..., out, rest..., stream)``."""
        return self._written(out, seed, lambda place: getattr(self.library, name)(*[self.put(t) for t in tensors], place, *rest, ctypes.c_void_p(None)))

    def _written(self, out: Tensor, seed: int, launch: Callable[[ctypes.c_void_p], int]) -> Tensor:
        """What ``launch`` writes to the place of a copy of ``out``."""
        self.library.emulator_seed(seed)
        try:
            place = self.put(out)
            status = launch(place)
            message = self.library.emulator_message().decode()
            if status or message:
                raise EmulatorError(message or f"status {status}")
            written = torch.empty_like(out)
            ctypes.memmove(written.data_ptr(), place.value, out.numel() * out.element_size())
            return written
        finally:
            self.library.emulator_free_all()


def linear_fields(x: Tensor, w: Sequence[Tensor], bias: Tensor | None, tile: tuple[int, ...], starts: tuple[int, ...] = ()) -> dict[str, Any]:
    """Of :class:`params.LinearParams`. ``w``: the parts of a weight, dense or 2:4-sparse, and its global scales, which begin at row 0 and at ``starts``."""
    names = ("codes", "scale", "global_scale") if len(w) == 3 else ("codes", "meta", "scale", "global_scale")
    numbers = dict(zip(("second", "third"), starts, strict=False), tile=tile, dtype=int(x.dtype == torch.float16))
    return dict(zip(names, w, strict=True), x=x, bias=bias, M=x.shape[0], N=w[0].shape[0], K=x.shape[1], **numbers)


_TYPES = {torch.int32: 0, torch.int64: 1, torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def moe_fields(x: Tensor, ids: Tensor, w: Tensor, parts: Sequence[Tensor | None], act: Activation, expert_map: Tensor | None, tile: Any) -> dict[str, Any]:
    """Of :class:`params.MoeParams`. ``parts``: codes, scales and global scales of gate_up, then of down, both biases, and both weights' metadata, if any."""
    *first, bias, down_bias, meta, down_meta = (*parts, None, None)[:10]
    gate_up, down = (dict(zip(("codes", "scale", "global_scale"), three, strict=True)) for three in (first[:3], first[3:]))
    (e, width, columns), types = first[3].shape, dict(ids_type=_TYPES[ids.dtype], weights_type=_TYPES[w.dtype])
    sizes = dict(tokens=x.shape[0], top_k=ids.shape[1], E=e, K=x.shape[1], I=columns * (2 if down_meta is None else 4), N=width)
    if expert_map is not None:
        types |= dict(map_type=_TYPES[expert_map.dtype], map_size=expert_map.numel())
    form = dict(alpha=act.alpha, limit=act.limit or 0.0, more=int(act.name == "swiglu_oai"), interleaved=int(act.interleaved))
    weights = dict(gate_up=dict(gate_up, bias=bias, meta=meta), down=dict(down, bias=down_bias, meta=down_meta))
    return dict(x=x, ids=ids, weights=w, map=expert_map, tile=tile if isinstance(tile, tuple) else (tile,), **weights, **sizes, **types, **form)


@functools.cache
def emulated(source: str, arch: int = 90, defines: tuple[str, ...] = ()) -> Emulated:
    """:class:`Emulated`, compiled once in a process."""
    return Emulated(source, arch, defines)
