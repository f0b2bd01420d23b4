"""Every CUDA kernel on small tensors in allocations of their exact size: ``compute-sanitizer --tool memcheck python benchmarks/sanitize.py``.

Also for ``racecheck`` and ``initcheck``. Kernels are called through their C functions, on memory of cudaMalloc's, so that nothing of torch's
allocator or kernels hides an access. Every tile, M and N that no tile divides, splits of K, epilogues, siblings, routings with an empty expert.
Results are checked for being finite only: lowering_tests compares them. ``--only linear_wide``: kernels whose name begins so.

racecheck does not follow what a warp wrote through the arrival of one of its lanes behind ``__syncwarp()``: it reports the sums of ``table_up`` (moe_decode_table), and
none where every lane arrives (H200, 36 calls, 0 hazards), which takes up to 10% longer. Of the other kernels it reported nothing when each was last run.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import csrc
from fp4_inductor.kernels.moe import decode_table, grouped_wide
from lowering_tests.kernels import emulator

ARCH = 90


@functools.cache
def cudart() -> ctypes.CDLL:
    for name in ("libcudart.so.13", "libcudart.so", "libcudart.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise SystemExit("no libcudart: this needs a CUDA build of torch and a GPU")


def checked(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"{what}: cudaError {status}")


class Memory:
    """Allocations of one call, each of its tensor's exact size, on the device."""

    def __init__(self) -> None:
        self.held: list[ctypes.c_void_p] = []

    def empty(self, size: int) -> ctypes.c_void_p:
        at = ctypes.c_void_p()
        checked(cudart().cudaMalloc(ctypes.byref(at), ctypes.c_size_t(max(size, 1))), "cudaMalloc")
        self.held.append(at)
        return at

    def of(self, tensor: Tensor | None) -> ctypes.c_void_p | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        at = self.empty(tensor.nbytes)
        checked(cudart().cudaMemcpy(at, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), 1), "cudaMemcpy")
        return at

    def read(self, at: ctypes.c_void_p, *shape: int) -> Tensor:
        out = torch.empty(shape, dtype=torch.bfloat16)
        checked(cudart().cudaMemcpy(ctypes.c_void_p(out.data_ptr()), at, ctypes.c_size_t(out.nbytes), 2), "cudaMemcpy")
        return out

    def free(self) -> None:
        for at in self.held:
            checked(cudart().cudaFree(at), "cudaFree")


def scales(*shape: int) -> Tensor:
    return torch.randint(0x28, 0x40, shape, dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)


def codes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def run(name: str, label: str, arguments, m: int, n: int) -> None:
    """``arguments(memory, y)``: the C function's, without the stream."""
    memory = Memory()
    y = memory.empty(2 * m * n)
    status = getattr(csrc.library(name, ARCH), csrc.KERNELS[name].function)(*arguments(memory, y), None)
    checked(status, f"{name} {label}")
    checked(cudart().cudaDeviceSynchronize(), f"{name} {label}")
    result = memory.read(y, m, n)
    memory.free()
    if not bool(result.isfinite().all()):
        raise SystemExit(f"{name} {label}: not finite")
    print(f"  {name} {label}", flush=True)


def activations(memory: Memory, name: str, m: int, k: int) -> tuple:
    if len(csrc.KERNELS[name].activations) == 1:
        return (memory.of(torch.randn(m, k).bfloat16()),)
    return memory.of(torch.randn(m, k).clamp(-4, 4).to(torch.float8_e4m3fn)), memory.of(torch.rand(m, 1))


def dense(name: str, m: int, n: int, k: int, tile: tuple[int, ...], act: int = 0, starts: tuple[int, int] = (0, 0), early: int = 0) -> None:
    kernel = csrc.KERNELS[name]
    halves = 2 if kernel.finish == "glu" else 1
    columns = n // halves
    then = kernel.finish == "pointwise"

    def arguments(memory: Memory, y):
        x = activations(memory, name, m, k)
        weight = memory.of(codes(n, k // 2)), memory.of(scales(n, k // 16)), memory.of(torch.rand(3))
        more = (memory.of(torch.randn(m, columns).bfloat16() if then else None) for _ in range(2)) if kernel.finish else ()
        flags = (*starts, act) if kernel.finish else starts if kernel.siblings else ()
        rest = (early,) if kernel.early else ()
        scratch = (memory.empty(csrc.scratch_bytes(name)),) if kernel.scratch else ()
        return *x, *weight, memory.of(torch.randn(n).bfloat16()), *more, y, m, n, k, 0, *flags, *rest, *(tile or (0,) * len(kernel.tile)), *scratch

    run(name, f"M={m} N={n} K={k} tile={tile} act={act} starts={starts}", arguments, m, columns)


def metadata(*shape: int) -> torch.Tensor:
    legal = torch.tensor([a | b << 4 for a in sparse24.NIBBLES for b in sparse24.NIBBLES], dtype=torch.uint8)
    return legal[codes(*shape).int() % len(legal)]


def sparse(name: str, m: int, n: int, k: int, tile: tuple[int, ...], early: int = 0, starts: tuple[int, int] = (0, 0)) -> None:
    kernel = csrc.KERNELS[name]

    def arguments(memory: Memory, y):
        x, meta = activations(memory, name, m, k), metadata(n, k // 8)
        weight = memory.of(codes(n, k // 4)), memory.of(meta), memory.of(scales(n, k // 16)), memory.of(torch.rand(3))
        begins = (early,) if kernel.early else ()
        scratch = (memory.empty(csrc.scratch_bytes(name)),) if kernel.scratch else ()
        return *x, *weight, memory.of(torch.randn(n).bfloat16()), y, m, n, k, 0, *starts, *begins, *(tile or (0,) * len(kernel.tile)), *scratch

    run(name, f"M={m} N={n} K={k} tile={tile} starts={starts}", arguments, m, n)


def moe(
    name: str, tokens: int, top_k: int, experts: int, k: int, inner: int, n: int, tile: tuple[int, ...], interleaved: int, biased: bool, kept: bool = False
) -> None:
    ids = torch.rand(tokens, experts - 1).topk(top_k).indices.int()  # the last expert has no tokens
    one, two = name.removesuffix(csrc.SEVERAL_SCALES), name.endswith(csrc.SEVERAL_SCALES)  # global scales of an expert's first weight
    few = one == decode_table.NAME
    size = decode_table.workspace_bytes(tokens, top_k, inner) if few else grouped_wide.space(one, tokens, tokens * top_k, experts, k, inner, n, *tile)

    def arguments(memory: Memory, y):
        weights = [
            memory.of(t)
            for rows, columns, each in ((2 * inner, k, 1 + two), (n, inner, 1))
            for t in (codes(experts, rows, columns // (4 if kept else 2)), scales(experts, rows, columns // 16), torch.rand(experts, each) / 64)
        ]
        metas = [memory.of(metadata(experts, rows, columns // 8) if kept else None) for rows, columns in ((2 * inner, k), (n, inner))] if few else []
        biases = [memory.of(torch.randn(experts, rows).bfloat16() if biased else None) for rows in (2 * inner, n)]
        head = memory.of(torch.randn(tokens, k).bfloat16()), memory.of(ids), memory.of(torch.rand(tokens, top_k).bfloat16())
        sizes = tokens, top_k, experts, k, inner, n, 0, 0, 0, 0
        form = ctypes.c_float(1.702 if biased else 1.0), ctypes.c_float(7.0 if biased else 0.0), int(biased), interleaved
        return *head, *weights, *biases, None, *metas, y, *sizes, *form, *tile, ctypes.c_int64(size), memory.empty(size)

    run(name, f"T={tokens} E={experts} K={k} I={inner} N={n} tile={tile} interleaved={interleaved} sparse={kept}", arguments, tokens, n)


def tiles_of(name: str, macro: str = "TILE") -> list[tuple[int, ...]]:
    return emulator.tiles_of(csrc.KERNELS[name].source, macro)


def cases() -> Iterator[tuple[str, functools.partial]]:
    def case(f, name: str, *arguments, **more):
        return name, functools.partial(f, name, *arguments, **more)

    for m, k in ((1, 1024), (3, 1040), (16, 1088), (32, 2048)):
        yield case(dense, "linear_small", m, 330, k, ())
    for m, tile, early in itertools.product((1, 8, 13, 21), ((), (2, 2, 8, 1), (7, 1, 2, 1), (4, 2, 4, 1)), (0, 1)):
        yield case(dense, "linear_table", m, 1034, 2304, tile, early=early)
    for m, early in itertools.product((1, 8, 13), (0, 1)):
        yield case(dense, "linear_table", m, 1034, 7168, (2, 2, 8, 4), early=early)
    for rows, tokens, groups in tiles_of("linear_wide"):
        for m, splits in ((tokens - 3, 1), (tokens + 5, 2), (tokens, 4)):
            yield case(dense, "linear_wide", m, 650, 1280, (rows, tokens, groups, splits), early=1)
    for macro, k, rest in (("SHARED", 1280, (-1,)), ("STREAMED", 1280, (1, 0)), ("ANY_K", 1344, (1,))):
        for tile in tiles_of("linear_wide", macro):
            yield case(dense, "linear_wide", 2 * tile[1] + 1, 650, k, (*tile, *rest))
    for tile in (*tiles_of("linear_wide_fp8"), *((t, 0) for (t,) in tiles_of("linear_wide_fp8", "STREAMED"))):
        yield case(dense, "linear_wide_fp8", tile[0] - 3, 650, 1280, tile, early=1)
    yield case(dense, "linear_wide_fp8", 700, 1290, 1280, (), starts=(512, 768))
    for name, m in (("linear_table", 5), ("linear_wide", 50), ("linear_small", 20)):
        yield case(dense, f"{name}_pointwise", m, 1032, 1280, (), act=1, starts=(512, 768))
        yield case(dense, f"{name}_glu", m, 1032, 1280, (), act=1)
    for m, k in ((1, 1024), (7, 1056), (16, 1280), (30, 2048)):
        yield case(sparse, "sparse_linear_small", m, 330, k, ())
    for m, tile in itertools.product((1, 8, 13), ((), *((2 * r, r, 4, sub) for r, sub in tiles_of("sparse_linear_table")))):
        yield case(sparse, "sparse_linear_table", m, 1034, 2048, tile)
    for (rows, tokens, groups), splits in itertools.product(tiles_of("sparse_linear_wide"), (0, 1, 4)):
        yield case(sparse, "sparse_linear_wide", tokens + 3, 650, 1280, (rows, tokens, groups, splits))
    for tile in ((), *tiles_of("sparse_linear_wide_fp8"), *((t, 0) for (t,) in tiles_of("sparse_linear_wide_fp8", "STREAMED"))):
        yield case(sparse, "sparse_linear_wide_fp8", (*tile, 700)[0] - 3, 650, 1280, tile, early=1)
    yield case(sparse, "sparse_linear_wide_fp8", 700, 1290, 1280, (), starts=(512, 768))
    for name, m in (("sparse_linear_small", 20), ("sparse_linear_table", 8), ("sparse_linear_wide", 50)):
        yield case(sparse, name + csrc.SEVERAL_SCALES, m, 650, 1280, (), starts=(512, 600))
    for name in (grouped_wide.NAME, grouped_wide.FP8, decode_table.NAME):
        tile = decode_table.OWN_TILES if name == decode_table.NAME else (64,) if name == grouped_wide.FP8 else (32,)
        yield case(moe, name + csrc.SEVERAL_SCALES, 8, 3, 9, 512, 256, 264, tile, 0, False)
        yield case(moe, name + csrc.SEVERAL_SCALES, 8, 3, 9, 320, 192, 264, tile, 1, True)
    for name in (grouped_wide.NAME, grouped_wide.FP8):
        tiles = [tile[0] for tile in tiles_of(name)] if name == grouped_wide.FP8 else emulator.grouped_tiles()
        for tile, (k, inner, form) in itertools.product(tiles, ((512, 256, 0), (320, 192, 1))):
            yield case(moe, name, 150, 3, 9, k, inner, 264, (tile,), form, bool(form))
    for tokens, tile in itertools.product((1, 3, 8, 11), (decode_table.OWN_TILES, (4, 2, 4, 6, 2, 4, 4), (2, 1, 8, 2, 1, 8, 2))):
        yield case(moe, decode_table.NAME, tokens, 3, 9, 512, 256, 264, tile, 0, False)
        yield case(moe, decode_table.NAME, tokens, 3, 9, 320, 192, 264, tile, 1, True)
        yield case(moe, decode_table.NAME, tokens, 3, 9, 512, 256, 264, tile, 0, False, kept=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="kernels whose name begins so")
    args = parser.parse_args()
    torch.manual_seed(0)
    count = 0
    for name, call in cases():
        if name.startswith(tuple(args.only)):
            call()
            count += 1
    if not count:
        raise SystemExit(f"no kernel's name begins with {' or '.join(args.only)}")
    print(f"{count} calls: nothing refused, all finite")


if __name__ == "__main__":
    main()
