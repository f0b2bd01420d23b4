"""Every Triton kernel compiled for every architecture it serves, and its machine code read: no spills, the intended instructions.

Tiles come from the kernels, architectures from the dispatch table, so a new tile or row is held to the same rules.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels.dequantize import launch as launch_dequantize
from fp4_inductor.kernels.dequantize.triton_rows import decompress_rows, dequantize_rows
from fp4_inductor.kernels.forms import Problem, Triton
from fp4_inductor.kernels.linear import gemv as dense_gemv
from fp4_inductor.kernels.linear import mid as dense_mid
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_fp8 import gemv as fp8_gemv
from fp4_inductor.kernels.linear_fp8.triton_gemv_fp8 import linear_fp8_gemv
from fp4_inductor.kernels.linear_glu import gemv as glu_gemv
from fp4_inductor.kernels.quantize_rows_fp8.launch import glu_tile
from fp4_inductor.kernels.quantize_rows_fp8.launch import tile as quantize_tile
from fp4_inductor.kernels.quantize_rows_fp8.triton_glu_rows import quantize_glu_rows
from fp4_inductor.kernels.quantize_rows_fp8.triton_rows import quantize_rows
from fp4_inductor.kernels.router.triton_router import router_choice, router_scores
from fp4_inductor.kernels.router.two_launches import scores_tile
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.kernels.sparse_linear import gemv as sparse_gemv_kernel
from fp4_inductor.kernels.sparse_linear import mid as sparse_mid_kernel
from fp4_inductor.kernels.topk.launch import tile as topk_tile
from fp4_inductor.kernels.topk.triton_rows import topk_rows
from fp4_inductor.ops.activation import ActivationCode
from lowering_tests.kernels import aot

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}  # KiB a block may have (CUDA C Programming Guide, table of capabilities)
TENSOR_CORE = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 103: "UTCHMMA", 120: "HMMA", 121: "HMMA"}
# A word or two on the stack (an address, once a K step) is the assembler's choice and costs nothing; more is a tile that does
# not fit. On the architecture that is measured, and with a current ptxas, there are none.
A_FEW_SPILLS = 4
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNPACK = "F2FP.F16.E4M3.UNPACK_B"


def compile_linear(kernel, constants: dict, cc: int, m: int, n: int, k: int, dtype: str, warps: int, stages: int) -> aot.Compiled:
    """As the launcher would: pointers aligned, sizes that are multiples of 16 known to be."""
    types = {"X": f"*{dtype}", "BIAS": f"*{dtype}", "QDATA": "*u8", "VALUES": "*u8", "META": "*u8", "SCALE": "*u8", "GLOBAL_SCALE": "*fp32", "Y": f"*{dtype}"}
    sizes = {"M": m, "N": n, "K": k, "K8": k // 8, "B": k // 16}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    unknown = set(signature) - set(types) - set(sizes)
    assert not unknown, unknown
    aligned = tuple(name for name in signature if name in types or (name != "M" and sizes[name] % 16 == 0))
    return aot.compile_kernel(kernel, signature, constants, cc, warps, stages, aligned)


def compiled(form: Triton, cc: int, m: int, n: int, k: int, dtype: str = "bf16", bounds: tuple[int, ...] = ()) -> tuple[aot.Compiled, Any]:
    """A kernel with its own tile, and the tile."""
    p = Problem(m, n, k, cc, DTYPES[dtype], bounds)
    c = form.tile(p)
    constants = form.constants(c, p) | dict.fromkeys(form.absent)
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return compile_linear(form.source(), constants, cc, m, n, k, dtype, warps, stages), c


def gemv(cc: int, m: int, n: int, k: int, dtype: str = "bf16") -> tuple[aot.Compiled, int]:
    done, c = compiled(dense_gemv.FORM, cc, m, n, k, dtype)
    return done, c.num_warps


def mid(cc: int, m: int, n: int, k: int, dtype: str = "bf16") -> tuple[aot.Compiled, MidConfig]:
    return compiled(dense_mid.FORM, cc, m, n, k, dtype)


def tensor_core(cc: int, tile: MidConfig) -> str:
    """The weight's rows are the MMA's M: wgmma and tcgen05 want 64 of them; a narrower tile uses mma.sync."""
    return TENSOR_CORE[cc] if tile.block_n >= 64 else "HMMA"


def assert_fits(done: aot.Compiled, warps: int, cc: int, blocks: int = 1, older: int = A_FEW_SPILLS) -> None:
    """``older``: spills allowed where Triton is older or the architecture is not measured."""
    allowed = 0 if cc == 90 and aot.VERSION >= (3, 7) else older
    assert done.spills <= allowed
    assert done.stack <= 4 * allowed
    assert done.registers <= 255
    # registers are handed out to warps in units of 8 per thread
    assert blocks * warps * 32 * -(-done.registers // 8) * 8 <= 65536, f"{done.registers} registers: {blocks} blocks do not fit an SM"
    assert done.shared <= SHARED[cc] * 1024


def loads_of_weights(done: aot.Compiled) -> dict[str, int]:
    """Global loads that are marked evict-first: the streamed weights and scales."""
    return {op: count for op, count in done.opcodes().items() if op.startswith("LDG") and ".EF" in op}


def tensor_core_instructions(done: aot.Compiled) -> int:
    return sum(done.count(name) for name in ("HMMA", "HGMMA", "UTCHMMA", "QGMMA", "QMMA"))


def global_atomics(done: aot.Compiled) -> set[str]:
    """Sums in no fixed order: not deterministic. (ATOMS is shared memory: tcgen05 allocates with it.)"""
    return {op for op in done.opcodes() if op.split(".")[0] in ("RED", "REDG", "ATOM", "ATOMG")}


GEMV = [(80, 1), (89, 1), (90, 1), (90, 4), (100, 1), (120, 4), (aot.GB10, 1), *(pytest.param(cc, 2, marks=pytest.mark.slow) for cc in (80, 90))]


@pytest.mark.parametrize(("cc", "m"), GEMV)
def test_gemv(cc, m):
    done, warps = gemv(cc, m, 4096, 4096)
    assert_fits(done, warps, cc, blocks=2)
    assert tensor_core_instructions(done) == 0
    assert (done.count(UNPACK) > 0) == (cc >= 89)
    wide = {op for op in loads_of_weights(done) if op.endswith(".128")}
    assert wide, loads_of_weights(done)
    assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "n", "k", "dtype"), [(90, 4095, 1040, "bf16"), (90, 4096, 4096, "fp16"), (80, 33, 48, "fp16")])
def test_gemv_off_the_tile(cc, n, k, dtype):
    done, warps = gemv(cc, 1, n, k, dtype)
    assert_fits(done, warps, cc)
    assert (done.count(UNPACK) > 0) == (cc >= 89)


def glu(cc: int, n: int, k: int, dtype: str = "bf16", bias: bool = False, scales: int = 2, act: str = "silu") -> tuple[aot.Compiled, int]:
    done, c = compiled(glu_gemv.form(act, bias, scales), cc, 1, n, k, dtype)
    return done, c.num_warps


@pytest.mark.parametrize("cc", [80, 89, 90, 100, 120, aot.GB10])
def test_glu(cc):
    done, warps = glu(cc, 12288, 4096)
    assert_fits(done, warps, cc, blocks=2)
    assert (done.count(UNPACK) > 0) == (cc >= 89)
    assert any(op.endswith(".128") for op in loads_of_weights(done)), loads_of_weights(done)
    assert not global_atomics(done)


def test_glu_is_the_gemv_with_other_rows():
    """As many registers, and instructions a weight within 5%, as the GEMV that was measured, over a weight of the same size."""
    fused, plain = glu(90, 4096, 4096)[0], gemv(90, 1, 8192, 4096)[0]
    assert fused.registers <= plain.registers + 8
    products = [done.count("HFMA2") + done.count("HMUL2") for done in (fused, plain)]
    assert abs(products[0] - products[1]) <= 2  # ptxas also sets a constant by one
    assert sum(fused.opcodes().values()) <= 1.05 * sum(plain.opcodes().values()) + 150


@pytest.mark.parametrize(("cc", "n", "k", "dtype", "bias", "act"), [(90, 4095, 1040, "bf16", True, "gelu_tanh"), (80, 33, 48, "fp16", True, "gelu")])
def test_glu_off_the_tile(cc, n, k, dtype, bias, act):
    done, warps = glu(cc, n, k, dtype, bias, 1, act)
    assert_fits(done, warps, cc)


@pytest.mark.parametrize("cc", [80, 90, 120])
def test_siblings_cost_no_registers(cc):
    """Global scales by row: the measured kernel with another last line."""
    (one, _), (three, c) = (compiled(dense_gemv.FORM, cc, 1, 6144, 4096, bounds=bounds) for bounds in ((), (4096, 5120)))
    assert_fits(three, c.num_warps, cc, blocks=2)
    assert three.registers <= one.registers + 8


@pytest.mark.parametrize(("kind", "cc"), [("gemv", 80), ("gemv", 90), ("mid", 90)])
def test_several_scales_of_a_sparse_weight_cost_no_registers(kind, cc):
    """By row, as of a dense one: another last line."""
    form, m = (sparse_gemv_kernel.FORM, 1) if kind == "gemv" else (sparse_mid_kernel.FORM, 32)
    (one, _), (three, c) = (compiled(form, cc, m, 6144, 4096, bounds=bounds) for bounds in ((), (4096, 5120)))
    assert_fits(three, c.num_warps, cc)
    assert three.registers <= one.registers + 16


@pytest.mark.parametrize(("cc", "n", "k"), [(80, 151936, 4096), (90, 151936, 4096), (100, 151936, 4096), (120, 151936, 4096), (90, 49153, 576)])
def test_fp8_head(cc, n, k):
    p = Problem(1, n, k, cc, torch.bfloat16)
    c = fp8_gemv.tile(p)
    constants = fp8_gemv.constants(c, p)
    del constants["num_warps"], constants["num_stages"]
    signature = {"X": "*bf16", "WEIGHT": "*u8", "WEIGHT_SCALE": "*fp32", "Y": "*bf16", "M": "i32", "N": "i32", "K": "i32"}
    aligned = ("X", "WEIGHT", "WEIGHT_SCALE", "Y", *(("K",) if k % 16 == 0 else ()))
    done = aot.compile_kernel(linear_fp8_gemv, signature, constants, cc, c.num_warps, 2, aligned)
    assert_fits(done, c.num_warps, cc, blocks=2)
    assert (done.count(UNPACK) > 0) == (cc >= 89)


SPARSE_GEMV = [(cc, 4096, 4096, "bf16") for cc in (80, 89, 90, 100, aot.GB10)] + [(90, 28672, 8192, "fp16"), (90, 4095, 1056, "bf16"), (120, 33, 96, "fp16")]


@pytest.mark.parametrize(("cc", "n", "k", "dtype"), SPARSE_GEMV)
def test_sparse_gemv(cc, n, k, dtype):
    done, c = compiled(sparse_gemv_kernel.FORM, cc, 1, n, k, dtype)
    assert_fits(done, c.num_warps, cc, blocks=2 if n % 16 == 0 else 1)
    assert tensor_core_instructions(done) == 0
    assert (done.count(UNPACK) > 0) == (cc >= 89)
    assert n % 16 or any(op.endswith(".128") for op in loads_of_weights(done)), loads_of_weights(done)
    assert not global_atomics(done)


def mid_cases():
    """One M per distinct tile, up to the last M that the architecture's row serves. Without --slow that last one alone where sm_90 is not compiled for,
    and none of an architecture that runs the code of another."""
    for cc, shapes in ((80, (4096, 16384)), (89, (4096,)), (90, (4096, 16384)), (100, (4096, 16384)), (120, (16384,)), (aot.GB10, (4096,))):
        spans = plan(Call("linear", cc, torch.bfloat16, 4096, 4096, csrc="no nvcc"), DispatchConfig()).rows
        last = max(row.max_m for row in spans if row.regime == "mid")
        tiles = {}
        for n in shapes:
            for m in (16, 32, 64, 256) if cc in (80, 90) else (16, 64):
                if m <= last:
                    tiles.setdefault(dense_mid.tile(Problem(m, n, 4096, cc, torch.bfloat16)), (m, n))
        for m, n in tiles.values():
            yield pytest.param(cc, m, n, marks=[] if cc == 90 or (cc in (80, 100, 120) and (m, n) == max(tiles.values())) else [pytest.mark.slow])


@pytest.mark.parametrize(("cc", "m", "n"), list(mid_cases()))
def test_mid(cc, m, n):
    done, tile = mid(cc, m, n, 4096)
    assert_fits(done, tile.num_warps, cc)
    assert done.count(tensor_core(cc, tile)) > 0, done.opcodes()
    assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "m", "n", "k", "dtype"), [(90, 64, 4095, 1040, "bf16"), (90, 16, 16384, 4096, "fp16"), (80, 16, 33, 48, "fp16")])
def test_mid_off_the_tile(cc, m, n, k, dtype):
    done, tile = mid(cc, m, n, k, dtype)
    assert_fits(done, tile.num_warps, cc, older=24)  # Triton 3.6 spills 20 words of masks at (64, 4095, 1040)
    assert done.count(tensor_core(cc, tile)) > 0


SPARSE_MID = [(90, m, n) for m, n in ((16, 8192), (32, 4096), (64, 8192))]
SPARSE_MID += [(80, 64, 8192), (100, 64, 8192), (120, 64, 8192)]
SPARSE_MID += [pytest.param(90, m, n, marks=pytest.mark.slow) for m, n in ((16, 16384), (32, 8192), (64, 4096))]
SPARSE_MID += [pytest.param(*case, marks=pytest.mark.slow) for case in ((89, 64, 8192), (100, 16, 8192), (aot.GB10, 32, 8192))]  # as sm_80, 100 and 120


@pytest.mark.parametrize(("cc", "m", "n"), SPARSE_MID)
def test_sparse_mid(cc, m, n):
    done, c = compiled(sparse_mid_kernel.FORM, cc, m, n, 4096)
    assert_fits(done, c.num_warps, cc)
    assert done.count(tensor_core(cc, c)) > 0, done.opcodes()
    assert not global_atomics(done)


UNITS = {"fp8e4nv": 16, "bf16": 8, "fp16": 8, "fp32": 4}


def dequantize(cc: int, out: str, batched: bool = False, sparse: bool = False, ends: bool = False) -> tuple[aot.Compiled, float]:
    """The kernel, and its instructions a weight: all of a program's, loads, stores and addresses included."""
    units = "i64" if batched else "i32"  # i64: more than 2**31 of them
    types = {
        "QDATA": "*u8",
        "SCALE": "*u8",
        "GLOBAL_SCALE": "*fp32",
        "OUT": f"*{out}",
        "UNITS": units,
        "UNITS_PER_MATRIX": "i32",
        "META": "*u8",
        "ENDS": "*i32",
    }
    absent = [name for name, there in (("GLOBAL_SCALE", out != "fp8e4nv"), ("META", sparse), ("ENDS", ends)) if not there]
    constants = {"BATCHED": batched, "PARTS": 1, **launch_dequantize.constants(UNITS[out], 1 << 20), **dict.fromkeys(absent)}
    signature = {name: kind for name, kind in types.items() if name not in absent}
    done = aot.compile_kernel(dequantize_rows, signature, constants, cc, 4, 2, tuple(name for name, kind in signature.items() if kind[0] == "*"))
    count = sum(n for op, n in done.opcodes().items() if op != "NOP")
    return done, count / (constants["STEPS"] * constants["UNIT"])


def stays_in_its_thread(done: aot.Compiled) -> bool:
    """Stores of 16 bytes, and nothing goes through shared memory."""
    return all(op.endswith(".128") for op in done.opcodes() if op.startswith("STG")) and done.shared == 0 and not done.count("STS") and not done.count("SHFL")


@pytest.mark.parametrize(
    ("cc", "out", "batched"),
    [
        (80, "bf16", False),
        pytest.param(80, "fp32", True, marks=pytest.mark.slow),
        pytest.param(90, "bf16", False, marks=pytest.mark.slow),
        (90, "bf16", True),
        (100, "fp16", True),
        (aot.GB10, "bf16", False),
        (89, "fp8e4nv", False),
        (90, "fp8e4nv", False),
        pytest.param(90, "fp8e4nv", True, marks=pytest.mark.slow),
        (120, "fp8e4nv", False),
    ],
)
def test_dequantize(cc, out, batched):
    done, each = dequantize(cc, out, batched, ends=batched)
    assert_fits(done, 4, cc, blocks=12)
    assert stays_in_its_thread(done), done.opcodes()
    if out == "fp8e4nv":
        assert done.count("F2FP.SATFINITE.E4M3") > 0, done.opcodes()
        assert done.count("LDG.E.64") == 4
    if not batched:  # else: and a 64-bit division, once a program, whose slow branch is not taken
        assert each <= {"fp8e4nv": 3.3, "bf16": 8.75}[out]


@pytest.mark.parametrize(("cc", "out"), [(80, "bf16"), (90, "bf16"), (90, "fp8e4nv"), (aot.GB10, "fp32")])
def test_sparse_dequantize(cc, out):
    done, each = dequantize(cc, out, sparse=True)
    assert_fits(done, 4, cc, blocks=12)
    assert stays_in_its_thread(done), done.opcodes()
    assert out != "fp8e4nv" or each <= 6.5


@pytest.mark.parametrize("cc", [80, 90, aot.GB10])
def test_sparse_decompress(cc):
    signature = {"VALUES": "*u8", "META": "*u8", "OUT": "*i16", "GROUPS": "i32"}
    done = aot.compile_kernel(decompress_rows, signature, {"BLOCK": 1024}, cc, 4, 2, ("VALUES", "META", "OUT", "GROUPS"))
    assert_fits(done, 4, cc, blocks=8)
    assert all(op.endswith(".128") for op in done.opcodes() if op.startswith("STG"))


def on_each(shapes, widest):
    """All on sm_90; elsewhere, without --slow, the one of which most is in registers."""
    return [pytest.param(cc, x, marks=[] if cc == 90 or x == widest else [pytest.mark.slow]) for cc in (89, 90, 100, 120) for x in shapes]


@pytest.mark.parametrize(("cc", "shape"), on_each(((128, 4096), (2048, 14336), (128, 32768), (128, 33024)), (128, 32768)))
def test_quantize_rows(cc, shape):
    signature = {"X": "*bf16", "OUT": "*fp8e4nv", "ROW_SCALE": "*fp32", "K": "i32", "LIMIT": "fp32"}
    constants = quantize_tile(*shape) | {"LANE_ORDER": cc == 90, "PDL": cc >= 90}
    warps = constants.pop("num_warps")
    done = aot.compile_kernel(quantize_rows, signature, constants, cc, warps, 2, ("X", "OUT", "ROW_SCALE", "K"))
    assert_fits(done, warps, cc)
    assert done.count("F2FP.SATFINITE.E4M3") > 0
    assert ("griddepcontrol.wait" in done.ptx) == (cc >= 90)


@pytest.mark.parametrize(("cc", "inner"), on_each((1536, 12288, 28672), 12288))
def test_quantize_glu_rows(cc, inner):
    signature = {"GATE_UP": "*bf16", "OUT": "*fp8e4nv", "ROW_SCALE": "*fp32", "INNER": "i32", "LIMIT": "fp32"}
    constants = dict(glu_tile(inner), ACT=ActivationCode.SILU.value, LANE_ORDER=cc == 90 and inner % 256 == 0, PDL=cc >= 90)
    warps = constants.pop("num_warps")
    done = aot.compile_kernel(quantize_glu_rows, signature, constants, cc, warps, 2, ("GATE_UP", "OUT", "ROW_SCALE", "INNER"))
    assert_fits(done, warps, cc)
    assert done.count("F2FP.SATFINITE.E4M3") > 0
    wide = ".64" if constants["LANE_ORDER"] else ".128"  # four numbers lie side by side
    assert any(op.startswith("LDG") and op.endswith(wide) for op in done.opcodes())
    assert ("griddepcontrol.wait" in done.ptx) == (cc >= 90)


@pytest.mark.parametrize("cc", [80, 90, 120])
def test_topk(cc):
    signature = {"X": "*fp32", "VALUES": "*fp32", "INDICES": "*i64", "E": "i32"}
    for e, k in ((128, 8), (512, 10)):
        constants = topk_tile(e, k) | {"K": k}
        warps = constants.pop("num_warps")
        assert_fits(aot.compile_kernel(topk_rows, signature, constants, cc, warps, 2, ("X", "VALUES", "INDICES")), warps, cc)


@pytest.mark.parametrize("cc", [80, 90, 120])
def test_router(cc):
    for t, h, e, k in ((1, 2048, 128, 8), (8, 4096, 512, 10)):
        constants = {**scores_tile(t, h), "HAS_BIAS": True, "PDL": cc >= 90}
        warps = constants.pop("num_warps")
        signature = {"X": "*bf16", "WEIGHT": "*bf16", "BIAS": "*bf16", "SCORES": "*bf16", "T": "i32", "H": "i32"}
        done = aot.compile_kernel(router_scores, signature, constants, cc, warps, 2, ("X", "WEIGHT", "BIAS", "SCORES", "H"))
        assert_fits(done, warps, cc)
        assert any(op.startswith("LDG") and ".128" in op for op in done.opcodes())
        constants = {**topk_tile(e, k), "K": k, "FORM": 1, "PDL": cc >= 90}
        warps = constants.pop("num_warps")
        signature = {"SCORES": "*bf16", "WEIGHTS": "*bf16", "IDS": "*i64", "E": "i32"}
        assert_fits(aot.compile_kernel(router_choice, signature, constants, cc, warps, 2, ("SCORES", "WEIGHTS", "IDS")), warps, cc)


def test_the_table_names_no_architecture_that_is_not_compiled_here():
    """Rows that are served by Triton kernels lie on architectures of this file's lists."""
    compiled = set(SHARED)
    for arch in range(80, 130):
        rows = plan(Call("linear", arch, torch.bfloat16, 4096, 4096), DispatchConfig()).rows
        if any(row.kernel.startswith("triton") for row in rows):
            nearest = max(cc for cc in compiled if cc <= arch)
            assert arch // 10 == nearest // 10 or arch // 10 == 11, arch
