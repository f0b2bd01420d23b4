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
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import csrc, params
from fp4_inductor.kernels.cached_attention import cuda_step
from fp4_inductor.kernels.cached_attention.cuda import ALONE
from fp4_inductor.kernels.cached_attention.step import arguments
from fp4_inductor.kernels.linear import wide_fp8
from fp4_inductor.kernels.moe import decode_table, grouped_wide
from fp4_inductor.kernels.paged_attention import cuda as pages
from fp4_inductor.kernels.params import AttentionParams, LinearParams, MoeParams, PagedParams
from fp4_inductor.kernels.sparse_linear import small, table, wide
from fp4_inductor.kernels.sparse_linear import wide_fp8 as sparse_wide_fp8
from fp4_inductor.ops import paged_attention
from lowering_tests.kernels import emulator, quantized_calls

ARCH = 90
WIDE_FP8 = wide_fp8.LIBRARY.name
SPARSE_SMALL, SPARSE_TABLE, SPARSE_WIDE, SPARSE_WIDE_FP8 = (kernel.LIBRARY.name for kernel in (small, table, wide, sparse_wide_fp8))


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

    def placed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With addresses of copies where there are tensors."""
        place = {Tensor: lambda t: self.of(t).value, dict: self.placed}
        return {name: place[type(value)](value) if type(value) in place else value for name, value in fields.items()}

    def of(self, tensor: Tensor) -> ctypes.c_void_p:
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


def run(name: str, label: str, fields: dict[str, Any], m: int, n: int, struct: type[params.Struct] = LinearParams) -> None:
    """``fields`` of the ``struct`` that the C function takes, tensors on the CPU."""
    memory = Memory()
    y = memory.empty(2 * m * n)
    call = struct.of(**memory.placed(fields), y=y.value)
    library, function = csrc.library(name, ARCH), csrc.LIBRARIES[name].function
    if size := params.scratch_bytes(library, function, call):
        call.scratch_bytes, call.scratch = size, memory.empty(size).value
    checked(getattr(library, function)(ctypes.byref(call)), f"{name} {label}")
    checked(cudart().cudaDeviceSynchronize(), f"{name} {label}")
    result = memory.read(y, m, n)
    memory.free()
    if not bool(result.isfinite().all()):
        raise SystemExit(f"{name} {label}: not finite")
    print(f"  {name} {label}", flush=True)


def activations(name: str, m: int, k: int) -> dict[str, Tensor]:
    if len(csrc.LIBRARIES[name].activations) == 1:
        return dict(x=torch.randn(m, k).bfloat16())
    return dict(x=torch.randn(m, k).clamp(-4, 4).to(torch.float8_e4m3fn), x_scale=torch.rand(m, 1))


class Numbers(NamedTuple):
    """Arguments of a call besides its tensors. ``starts``: the rows at which the second and the third global scale begin, 0: there is none."""

    m: int
    n: int
    k: int
    tile: tuple[int, ...]
    act: int = 0
    starts: tuple[int, int] = (0, 0)
    early: int = 0


def linear(name: str, weight: dict[str, Tensor], numbers: Numbers) -> None:
    m, n, k, tile, act, starts, early = numbers
    finish = csrc.LIBRARIES[name].finish
    columns = n // (2 if finish == "glu" else 1)
    fields = activations(name, m, k) | weight
    fields |= dict(scale=scales(n, k // 16), global_scale=torch.rand(3), bias=torch.randn(n).bfloat16())
    if finish == "pointwise":
        fields |= dict(mul=torch.randn(m, columns).bfloat16(), residual=torch.randn(m, columns).bfloat16())
    fields |= dict(M=m, N=n, K=k, second=starts[0], third=starts[1], act=act, early=early, tile=tile)
    run(name, f"M={m} N={n} K={k} tile={tile} act={act} starts={starts}", fields, m, columns)


def dense(name: str, *numbers: Any, **more: Any) -> None:
    """``numbers``, ``more``: of :class:`Numbers`."""
    c = Numbers(*numbers, **more)
    linear(name, dict(codes=codes(c.n, c.k // 2)), c)


def metadata(*shape: int) -> torch.Tensor:
    legal = torch.tensor([a | b << 4 for a in sparse24.NIBBLES for b in sparse24.NIBBLES], dtype=torch.uint8)
    return legal[codes(*shape).int() % len(legal)]


def sparse(name: str, *numbers: Any, **more: Any) -> None:
    """As :func:`dense`."""
    c = Numbers(*numbers, **more)
    linear(name, dict(codes=codes(c.n, c.k // 4), meta=metadata(c.n, c.k // 8)), c)


class Layer(NamedTuple):
    """Sizes of an MoE layer: x is ``[tokens, k]``, the result ``[tokens, n]``, and ``inner`` lies between the two products."""

    tokens: int
    top_k: int
    experts: int
    k: int
    inner: int
    n: int


def moe(name: str, layer: Layer, tile: tuple[int, ...], interleaved: int, biased: bool, kept: bool = False) -> None:
    """``kept``: the experts are 2:4-sparse."""
    tokens, top_k, experts, k, inner, n = layer

    def weight(rows: int, columns: int, each: int) -> dict[str, Any]:
        return dict(
            codes=codes(experts, rows, columns // (4 if kept else 2)),
            meta=metadata(experts, rows, columns // 8) if kept else None,
            scale=scales(experts, rows, columns // 16),
            global_scale=torch.rand(experts, each) / 64,
            bias=torch.randn(experts, rows).bfloat16() if biased else None,
        )

    each = 2 if name.endswith(csrc.SEVERAL_SCALES) else 1  # global scales of an expert's first weight
    fields = dict(
        x=torch.randn(tokens, k).bfloat16(),
        ids=torch.rand(tokens, experts - 1).topk(top_k).indices.int(),  # the last expert has no tokens
        weights=torch.rand(tokens, top_k).bfloat16(),
        gate_up=weight(2 * inner, k, each),
        down=weight(n, inner, 1),
    )
    sizes = dict(tokens=tokens, top_k=top_k, E=experts, K=k, I=inner, N=n)
    form = dict(alpha=1.702 if biased else 1.0, limit=7.0 if biased else 0.0, more=int(biased), interleaved=interleaved, tile=tile)
    run(name, f"T={tokens} E={experts} K={k} I={inner} N={n} tile={tile} interleaved={interleaved} sparse={kept}", fields | sizes | form, tokens, n, MoeParams)


def over_pages(name: str, lengths: tuple[int, ...], page: int, group: int, d: int, tile: pages.Tile, window: int | None = None) -> None:
    """What lies behind a sequence is NaN, and so must not be a part of any result."""
    codes = 2 if name == pages.LIBRARY_OF_FP8.name else 0
    c = paged_attention.call(torch.device("cpu"), lengths, page, 2 * group, 2, d, torch.bfloat16, early=True, window=window, codes=codes)
    label = f"lengths={lengths} page={page} group={group} D={d} tile={tile} window={window}"
    run(name, label, pages.fields(c, tile), len(lengths) * 2 * group, d, PagedParams)


def over_slots(name: str, format: str, at: int, slots: int, group: int, d: int, tile: cuda_step.Tile) -> None:
    """One token behind ``at`` of each of two sequences, with norms and rotation."""
    sizes, options = (2, 2 * group, 2, 1, slots, d, at), dict(dtype=torch.bfloat16, prologue=quantized_calls.turning(2, 1, d, torch.bfloat16))
    c = quantized_calls.call(format, *sizes, **options) if format else quantized_calls.plain_call(*sizes, **options)
    fields = cuda_step.fields(c, arguments(ALONE, c), tile)
    run(name, f"{format} at={at} of {slots} group={group} D={d} tile={tile}", fields, 2 * 2 * group, d, AttentionParams)


def tiles_of(name: str, macro: str = "TILE") -> list[tuple[int, ...]]:
    return emulator.tiles_of(csrc.LIBRARIES[name].source, macro)


def cases() -> Iterator[tuple[str, functools.partial]]:
    def case(f, name: str, *arguments, **more):
        return name, functools.partial(f, name, *arguments, **more)

    for m, k in ((1, 1024), (3, 1040), (16, 1088), (32, 2048)):
        yield case(dense, "linear_small", m, 330, k, ())
    for m, tile, early in itertools.product((1, 8, 13, 21, 30), ((), (2, 2, 7, 1), (7, 1, 2, 1), (4, 2, 4, 1)), (0, 1)):
        yield case(dense, "linear_table", m, 1034, 2304, tile, early=early)
    for m, early in itertools.product((1, 8, 13), (0, 1)):
        yield case(dense, "linear_table", m, 1034, 7168, (2, 2, 8, 4), early=early)
    for rows, tokens, groups in tiles_of("linear_wide"):
        for m, splits in ((tokens - 3, 1), (tokens + 5, 2), (tokens, 4)):
            yield case(dense, "linear_wide", m, 650, 1280, (rows, tokens, groups, splits), early=1)
    for macro, k, rest in (("SHARED", 1280, (-1,)), ("STREAMED", 1280, (1, 0)), ("ANY_K", 1344, (1,))):
        for tile in tiles_of("linear_wide", macro):
            yield case(dense, "linear_wide", 2 * tile[1] + 1, 650, k, (*tile, *rest))
    for tile in emulator.fp8_tiles():
        yield case(dense, WIDE_FP8, tile[0] - 3, 650, 1280, tile, early=1)
    yield case(dense, WIDE_FP8, 700, 1290, 1280, (), starts=(512, 768))
    for name, m in (("linear_table", 5), ("linear_wide", 50), ("linear_small", 20)):
        yield case(dense, f"{name}_pointwise", m, 1032, 1280, (), act=1, starts=(512, 768))
        yield case(dense, f"{name}_glu", m, 1032, 1280, (), act=1)
    for m, k in ((1, 1024), (7, 1056), (16, 1280), (30, 2048)):
        yield case(sparse, SPARSE_SMALL, m, 330, k, ())
    for m, tile in itertools.product((1, 8, 13), ((), *((2 * r, r, 4, sub) for r, sub in tiles_of(SPARSE_TABLE)))):
        yield case(sparse, SPARSE_TABLE, m, 1034, 2048, tile)
    for (rows, tokens, groups), splits in itertools.product(tiles_of(SPARSE_WIDE), (0, 1, 4)):
        yield case(sparse, SPARSE_WIDE, tokens + 3, 650, 1280, (rows, tokens, groups, splits))
    for tile in ((), *emulator.fp8_tiles()):
        yield case(sparse, SPARSE_WIDE_FP8, (*tile, 700)[0] - 3, 650, 1280, tile, early=1)
    yield case(sparse, SPARSE_WIDE_FP8, 700, 1290, 1280, (), starts=(512, 768))
    for name, m in ((SPARSE_SMALL, 20), (SPARSE_TABLE, 8), (SPARSE_WIDE, 50)):
        yield case(sparse, name + csrc.SEVERAL_SCALES, m, 650, 1280, (), starts=(512, 600))
    for name in (grouped_wide.NAME, grouped_wide.FP8, decode_table.NAME):
        tile = () if name == decode_table.NAME else (64,) if name == grouped_wide.FP8 else (32,)
        yield case(moe, name + csrc.SEVERAL_SCALES, Layer(8, 3, 9, 512, 256, 264), tile, 0, False)
        yield case(moe, name + csrc.SEVERAL_SCALES, Layer(8, 3, 9, 320, 192, 264), tile, 1, True)
    for name in (grouped_wide.NAME, grouped_wide.FP8):
        tiles = [tile[:1] for tile in tiles_of(name)] if name == grouped_wide.FP8 else emulator.grouped_tiles()
        for tile, (k, inner, form) in itertools.product(tiles, ((512, 256, 0), (320, 192, 1))):
            yield case(moe, name, Layer(150, 3, 9, k, inner, 264), tile, form, bool(form))
    for tokens, tile in itertools.product((1, 3, 8, 11), ((), (4, 2, 4, 6, 2, 4, 4), (2, 1, 8, 2, 1, 8, 2))):
        yield case(moe, decode_table.NAME, Layer(tokens, 3, 9, 512, 256, 264), tile, 0, False)
        yield case(moe, decode_table.NAME, Layer(tokens, 3, 9, 320, 192, 264), tile, 1, True)
        yield case(moe, decode_table.NAME, Layer(tokens, 3, 9, 512, 256, 264), tile, 0, False, kept=True)
    lengths = (1, 40, 0, 17), (15, 16, 33, 700)
    for name, (group, d), own in itertools.product((pages.LIBRARY.name, pages.LIBRARY_OF_FP8.name), ((4, 128), (8, 64), (16, 128)), lengths):
        for tile, window in (((0, 0), None), ((1, 3), None), ((7, 4), 30), ((16, 3), None)):
            yield case(over_pages, name, own, 16 if d == 128 else 48, group, d, tile, window)
    for format, (group, d), at in itertools.product(("", *cuda_step.FORMATS), ((4, 128), (8, 64), (16, 128)), (0, 15, 130, 703)):
        for tile in ((0, 0), (1, 3), (7, 4), (16, 3)):
            name = cuda_step.LIBRARY_OF_CODES.name if format else cuda_step.LIBRARY.name
            yield case(over_slots, name, format, at, 704, group, d, tile)


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
