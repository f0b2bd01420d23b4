"""Compile every CUDA kernel for a wheel: ``setup.py`` calls :func:`make`.

The libraries know no Python and no torch. They take the CUDA 13 runtime that torch has loaded and need no glibc newer than
2.17, so one wheel serves every Python and every torch from 2.11 on that is built for CUDA 13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..errors import KernelError
from . import build, csrc, prebuilt

ARCHITECTURES = (80, 86, 89, 90, 100, 103, 120, 121)
RUNTIME = "libcudart.so.13"


def make(folder: Path, architectures: Sequence[int] = ARCHITECTURES, shared_runtime: bool = True) -> list[str]:
    """Compile the binding and the kernels of these architectures into ``folder``, with a manifest; returns the files' names.

    Args:
        architectures: compute capabilities times ten.
        shared_runtime: leave the CUDA runtime to the one that torch brings; else each library holds its own.

    Raises:
        KernelError: as :func:`build.cuda_library` and :func:`build.binding_library`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    link = _shared_runtime() if shared_runtime else build.library_folders()
    jobs: list[tuple[str, str, Callable[[Path], None]]] = [("binding.so", build.binding_identity(), build.compile_binding)]
    for arch in architectures:
        for name, library in csrc.libraries_for(arch).items():
            jobs.append((f"{name}.sm_{arch}.so", build.cuda_identity(*library), partial(_compile_cuda, library, link)))

    def run(job: tuple[str, str, Callable[[Path], None]]) -> tuple[str, prebuilt.Entry]:
        name, identity, compile_ = job
        compile_(folder / name)
        return name, prebuilt.entry(folder / name, identity)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        entries = dict(pool.map(run, jobs))
    prebuilt.write_manifest(folder, entries)
    return sorted(entries)


def _compile_cuda(library: tuple[str, int, tuple[str, ...]], link: tuple[str, ...], target: Path) -> None:
    build.compile_cuda(target, *library, link)


def _shared_runtime() -> tuple[str, ...]:
    """nvcc's flags to compress device code and to link the runtime by its name, of the folder that holds it."""
    folders = build.library_folders()
    if not any((Path(folder.removeprefix("-L")) / RUNTIME).exists() for folder in folders):
        raise KernelError("the CUDA runtime is not beside nvcc", value=list(folders), limit=RUNTIME, remedy="Compile wheels with CUDA 13.")
    return ("--compress-mode=size", "-cudart", "none", *folders, "-Xlinker", f"-l:{RUNTIME}")
