"""The structs of csrc/common/call.h and their copies in kernels/params.py; what the C functions refuse. No GPU, no nvcc."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.kernels import build, params
from fp4_inductor.kernels.csrc import LIBRARIES
from fp4_inductor.kernels.params import AttentionParams, CacheParams, ChainParams, ExpertParams, LinearParams, MoeParams, PagedParams, RouterParams
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated

needs_emulator = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SOURCES = sorted({kernel.source for kernel in LIBRARIES.values()})
STRUCTS = {
    "moe/router.cu": RouterParams,
    "moe": MoeParams,
    "attention": AttentionParams,
    "attention/paged_attention.cu": PagedParams,
    "attention/paged_attention_fp8.cu": PagedParams,
    "gemm/linear_chain.cu": ChainParams,
}  # by folder or source; LinearParams elsewhere


def struct_of(source: str) -> type:
    return STRUCTS.get(source) or STRUCTS.get(source.partition("/")[0], LinearParams)


@pytest.mark.skipif(build.cxx() is None, reason="no C++ compiler")
@pytest.mark.parametrize("struct", [LinearParams, ChainParams, ExpertParams, MoeParams, RouterParams, CacheParams, AttentionParams, PagedParams])
def test_c_and_python_agree(struct, tmp_path):
    """Sizes and offsets of all fields; nothing lies between two of them or behind the last that only C knows."""
    name = f"fp4::{struct.__name__}"
    fields = [field for field, *_ in struct._fields_]
    numbers = [f"offsetof({name}, {field}), sizeof({name}::{field})" for field in fields]
    print_all = "".join(f'std::printf("%zu %zu\\n", {n});' for n in (*numbers, f"sizeof({name}), alignof({name})"))
    source = tmp_path / "layout.cpp"
    source.write_text(f'#include "common/call.h"\n#include <cstddef>\n#include <cstdio>\nint main() {{ {print_all} }}\n')
    subprocess.run([build.cxx(), f"-I{csrc_dir()}", "-std=c++17", source, "-o", tmp_path / "layout"], check=True)
    *found, (size, alignment) = [
        tuple(map(int, line.split())) for line in subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    assert dict(zip(fields, found, strict=True)) == {field: (getattr(struct, field).offset, getattr(struct, field).size) for field in fields}
    ends = [offset + bytes_ for offset, bytes_ in found]
    assert [offset for offset, _ in found] == [0, *ends[:-1]], "no gaps"
    assert size == ctypes.sizeof(struct) and ends[-1] + alignment > size


def test_a_field_that_is_not_there():
    with pytest.raises(TypeError, match="LinearParams has no field rows"):
        LinearParams.of(M=1, rows=1)


def test_fields_by_name():
    t = torch.zeros(4)
    call = MoeParams.of(x=t, map=None, gate_up=dict(codes=t), alpha=0.5, tile=(1, 2))
    assert call.size == ctypes.sizeof(MoeParams) and call.x == call.gate_up.codes == t.data_ptr()
    assert call.map is None and call.y is None and call.alpha == 0.5 and list(call.tile) == [1, 2, 0, 0, 0, 0, 0]


@needs_emulator
@pytest.mark.parametrize("source", SOURCES)
def test_a_struct_of_another_size_is_refused(source):
    """As a caller that was built with another call.h has it; and a null pointer."""
    kernel = emulated(source, 120 if "w4a4" in source else 90)
    function = getattr(kernel.library, kernel.function)
    struct = struct_of(source)
    invalid_value = 1
    assert function(None) == invalid_value
    for size in (0, ctypes.sizeof(struct) - 8, ctypes.sizeof(struct) + 8):
        call = struct.of()
        call.size = size
        assert function(ctypes.byref(call)) == invalid_value
        assert params.scratch_bytes(kernel.library, kernel.function, call) == 0


@needs_emulator
@pytest.mark.parametrize(
    ("source", "size", "tile", "blocks"),
    [
        ("gemm/linear_wide.cu", (5, 70, 512), (256, 32, 1, 0), 132 * 256 * 32),
        ("gemm/linear_wide.cu", (5, 70, 512), (128, 32, 2, 2), 0),
        ("gemm/linear_wide_fp8.cu", (5, 70, 512), (64, 0), 132 * 128 * 64),
        ("gemm/linear_wide_fp8.cu", (5, 70, 512), (64, 1), 0),
        ("gemm/linear_wide_fp8.cu", (5, 70, 512), (), 132 * 128 * 256),
        ("sparse/sparse_linear_wide_fp8.cu", (5, 70, 512), (64, 2), 132 * 128 * 64),
        ("gemm/linear_table.cu", (5, 70, 512), (), 0),
    ],
)
def test_scratch_memory(source, size, tile, blocks):
    """A float32 sum for each of a block's rows and tokens, and flags, where blocks share sums; a byte less is refused."""
    kernel, (m, n, k) = emulated(source), size
    fields = dict(M=m, N=n, K=k, tile=tile)
    asked = params.scratch_bytes(kernel.library, kernel.function, LinearParams.of(**fields))
    assert asked == (blocks * 4 + 640 if blocks else 0)
    assert params.scratch_bytes(kernel.library, kernel.function, LinearParams.of(**fields | dict(M=0))) == 0
    if asked:
        with pytest.raises(EmulatorError, match="status 1$"):
            kernel.run(LinearParams, fields, torch.empty(1), scratch=asked - 1)


@needs_emulator
@pytest.mark.parametrize(
    ("source", "tile", "asked"),
    [
        ("moe/decode_table.cu", (), 8 * 8 * 3 * 512),  # eight tokens at a time, of up to 24 experts
        # x and h as tiles of 8, of which there are 33 / 8 and one an expert; results of 33 pairs; tiles, order, place and total of the routing
        ("moe/grouped_wide.cu", (8,), 2 * 9 * 8 * 512 + 33 * 264 * 2 + 9 * 16 + 2 * 144 + 16),
        ("moe/grouped_wide.cu", (8, 1), (11 + 9 * 8) * 512 + 33 * 264 * 2 + 9 * 16 + 2 * 144 + 16),  # x once a token
        # rows of either product and their scales, h, tiles, order, place and total of the routing, results
        ("moe/grouped_wide_fp8.cu", (64,), 33 * 256 + 144 + 33 * 256 * 2 + 5 * 16 + 2 * 144 + 16 + 33 * 264 * 2),
    ],
)
def test_scratch_memory_of_moe(source, tile, asked):
    kernel, fields = emulated(source), dict(tokens=11, top_k=3, E=5, K=256, I=256, N=264, alpha=1.0, tile=tile)
    assert params.scratch_bytes(kernel.library, kernel.function, MoeParams.of(**fields)) == asked
    assert params.scratch_bytes(kernel.library, kernel.function, MoeParams.of(**fields | dict(tokens=0))) == 0
    with pytest.raises(EmulatorError, match="status 1$"):
        kernel.run(MoeParams, fields, torch.empty(1), scratch=asked - 1)


@needs_emulator
@pytest.mark.parametrize("source", [source for source in SOURCES if struct_of(source) is LinearParams])
def test_a_norm_is_refused_by_a_kernel_that_applies_none(source):
    """Zeros for all that a call reads: without the norm each of them takes it."""
    kernel, zeros = emulated(source, 120 if "w4a4" in source else 90), torch.zeros(1 << 16, dtype=torch.uint8)
    names = ["x", "x_scale", "row_scale", "codes", "meta", "scale", "global_scale"]
    fields = dict.fromkeys(names, zeros) | dict(meta=torch.full_like(zeros, 0x44), eps=1.0, M=1, N=16, K=256)  # metadata: the first two of four are kept
    out = torch.ones(16, dtype=torch.bfloat16)
    assert not kernel.run(LinearParams, fields, out).any()
    if source in {library.source for library in LIBRARIES.values() if library.norm}:
        assert not kernel.run(LinearParams, fields | dict(norm_weight=zeros), out).any()
    else:
        with pytest.raises(EmulatorError, match="status 1$"):
            kernel.run(LinearParams, fields | dict(norm_weight=zeros), out, scratch=1 << 25)
