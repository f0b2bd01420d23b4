"""The W4A4 kernels without a GPU: numerics in Triton's interpreter, block-scaled FP4 MMA in PTX and machine code, the launchers' arguments."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.formats import e2m1
from fp4_inductor.kernels import host
from fp4_inductor.kernels.forms import Problem
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_w4a4 import block_scaled
from fp4_inductor.kernels.linear_w4a4.triton_block_scaled import linear_w4a4
from fp4_inductor.kernels.quantize_rows_nvfp4 import launch as launch_rows
from fp4_inductor.kernels.quantize_rows_nvfp4 import triton_blocks
from fp4_inductor.ops import quantize_rows_nvfp4
from lowering_tests.kernels import aot
from lowering_tests.kernels.test_aot import assert_fits, global_atomics
from lowering_tests.own_process import cases_of

NATIVE = (100, 120) if aot.VERSION < (3, 8) else (100, 120, 121)  # Triton 3.6 has no FP4 MMA for sm_121: its row says so
PTX = {100: r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)"}
MMA_SYNC = r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.f32\.e2m1\.e2m1\.f32\.ue4m3"
SASS = {100: "UTCOMMA"}


def test_in_the_interpreter():
    cases = cases_of(Path(__file__).with_name("interpreted_w4a4.py"))
    assert Counter(c["case"].split()[0] for c in cases) == {"quantize_nvfp4": 17, "w4a4": 12}


def tiles(cc: int) -> list[MidConfig]:
    """Those that max-autotune times, the default first."""
    p = Problem(4096, 4096, 4096, cc, torch.bfloat16)
    default = block_scaled.tile(p)
    return [default, *(t for t in block_scaled.others(p) if t != default)]


def compiled(cc: int, tile: MidConfig, k: int, dtype: str = "bf16", bounds: tuple[int, ...] = ()) -> aot.Compiled:
    constants = block_scaled.constants(tile, Problem(4096, 4096, k, cc, torch.bfloat16, bounds))
    del constants["num_warps"], constants["num_stages"]
    pointers = {"X": "*u8", "X_SCALE": "*u8", "ROW_SCALE": "*fp32", "QDATA": "*u8", "SCALE": "*u8", "GLOBAL_SCALE": "*fp32", "Y": f"*{dtype}"}
    aligned = (*pointers, "N", *(["K"] if k % 16 == 0 else []))
    return aot.compile_kernel(linear_w4a4, {**pointers, "M": "i32", "N": "i32", "K": "i32"}, constants, cc, tile.num_warps, tile.num_stages, aligned)


def check(cc: int, tile: MidConfig, done: aot.Compiled) -> None:
    assert_fits(done, tile.num_warps, cc, older=0)
    assert re.search(PTX.get(cc, MMA_SYNC), done.ptx)
    assert done.count(SASS.get(cc, "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X")) > 0
    assert all(op.startswith(("UTCOMMA", "OMMA")) for op in done.opcodes() if "MMA" in op), "no operand is decoded"
    assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "i"), [(100, 0), (100, 1), (120, 0), (120, 3), *((cc, 0) for cc in NATIVE[2:])])
def test_block_scaled_mma(cc, i):
    tile = tiles(cc)[i]
    done = compiled(cc, tile, 4096)
    check(cc, tile, done)
    copies = {op: n for op, n in done.opcodes().items() if op.startswith("LDG")}
    assert any(op.startswith("LDGSTS.E.BYPASS.128") for op in copies), "codes are copied asynchronously, 16 bytes at once"
    assert "LDG.E.U8" not in copies, "scales too, in words"


@pytest.mark.parametrize(
    ("cc", "k", "dtype", "bounds"), [(100, 4112, "bf16", ()), (120, 4112, "fp16", ()), (100, 4096, "fp16", (4096,)), (120, 4096, "bf16", (4096, 5120))]
)
def test_off_the_tile_and_siblings(cc, k, dtype, bounds):
    tile = tiles(cc)[0]
    check(cc, tile, compiled(cc, tile, k, dtype, bounds))


@pytest.mark.parametrize("cc", [80, 90, 100, 120])
def test_quantize(cc):
    types = {"X": "*bf16", "ROW_SCALE": "*fp32", "QDATA": "*u8", "SCALE": "*u8"}
    size = launch_rows.block(256)
    done = aot.compile_kernel(
        triton_blocks.quantize_blocks, {**types, "BLOCKS": "i32"}, {"BLOCK": size, "CVT": cc >= 100}, cc, launch_rows.WARPS, 2, (*types, "BLOCKS")
    )
    assert_fits(done, launch_rows.WARPS, cc, blocks=4, older=0)
    assert (done.count("F2FP.SATFINITE.E2M1") > 0) == (cc >= 100)
    assert any(op.startswith("LDG.E.128") for op in done.opcodes())


def test_the_conversion_instruction_gives_the_bytes_of_the_comparisons():
    """``cvt.rn.satfinite.e2m1x2.f32 d, a, b``: a becomes the upper four bits, b the lower (PTX ISA); four bytes, the first operand's lowest."""
    (text,) = re.findall(r'"""\{(.*?)\}"""', inspect.getsource(triton_blocks.pack_e2m1.fn), re.DOTALL)
    lo, hi = torch.randn(64, 4) * 4, torch.randn(64, 4) * 4
    registers = {f"${1 + i}": lo[:, i] for i in range(4)} | {f"${5 + i}": hi[:, i] for i in range(4)}
    for d, a, b in re.findall(r"cvt\.rn\.satfinite\.e2m1x2\.f32 (\w+), (\$\d), (\$\d);", text):
        registers[d] = e2m1.encode(registers[b]) | e2m1.encode(registers[a]) << 4
    (order,) = re.findall(r"mov\.b32 \$0, \{(.*?)\};", text)
    got = torch.stack([registers[name.strip()] for name in order.split(",")], 1)
    assert torch.equal(got, e2m1.pack(e2m1.encode(torch.stack((lo, hi), -1).flatten(1))))


def test_the_quantizing_kernel_is_given_every_argument_and_no_other():
    x = torch.randn(70, 96)
    spy, names = mock.MagicMock(), launch_rows.quantize_blocks.arg_names
    with mock.patch.object(launch_rows, "quantize_blocks", spy), mock.patch.object(host, "arch", return_value=120), mock.patch("torch.cuda.device"):
        launch_rows.quantize_rows_nvfp4(x, quantize_rows_nvfp4.row_scales(x))
    positional, keywords = spy.__getitem__.return_value.call_args
    assert {*names[: len(positional)], *keywords} - {"num_warps", "num_stages"} == set(names)
    assert spy.__getitem__.call_args.args[0] == (70, 1)
