"""The CUDA sources compile for every architecture: no spills, the intended MMA, wide loads. Needs nvcc, no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from fp4_inductor.kernels import build, csrc
from lowering_tests.kernels import aot
from lowering_tests.kernels.emulator import FP8_TILES_IN, tiles_of

needs_nvcc = pytest.mark.skipif(build.nvcc() is None, reason="nvcc is not installed: the CUDA sources are compiled where it is")


# Words that no machine code may hold. A word's edge is looked for behind its first letter: that searches megabytes five times as fast.
SPILL = r"(?:S(?<!\wS)TL|L(?<!\wL)DL)\b"
UNORDERED = r"(?:R(?<!\wR)(?<!TRANS64\.R)ED|A(?<!\wA)(?<!TRANS64\.A)TOM)G?\b"  # not SYNCS.ARRIVE.TRANS64.RED, an arrival at another block's counter
# An integer by which a block learns that it is the last of its parts. Sums of integers do not depend on the order.
ARRIVAL = r"\bATOMG\.E\.ADD(?:\.S32)?\.STRONG\.GPU\b"
ARRIVAL_UNREAD = r"\bREDG\.E\.ADD(?:\.S32)?\.STRONG\.GPU\b"
FENCE = r"\bMEMBAR\b|\bERRBAR\b"
CHAIN = "gemm/linear_chain.cu"
ATTENTION = "attention/cached_attention.cu"
CLUSTERS = (
    "attention/paged_attention.cu", "attention/paged_attention_fp8.cu", "attention/step_attention.cu", "attention/step_attention_codes.cu",
)  # fmt: skip
COPY = r"LDGSTS\.E\.BYPASS\S*128"
# per source: instructions that must be there, and how many kernels an architecture has: dtypes x tiles of 8, 16 and 32 tokens, of any K
SOURCES = {
    "gemm/linear_small.cu": (
        ("HMMA.16816.F32.BF16", r"HMMA\.16816\.F32\s", COPY),
        lambda arch, *finish: 2 * (3 + 2 + (4 if arch == 90 else 0) + (3 if arch == 90 else 2)),
    ),
    "gemm/linear_gemv.cu": (("HFMA2", COPY), lambda arch, *finish: 2 * len(tiles_of("gemm/linear_gemv.cu"))),
    # dtypes, without experts and with them, without sums over ranks and with them, which write to other GPUs
    CHAIN: (("HFMA2", COPY, r"STG\.E\.U16\.STRONG\.SYS", r"LDG\.E\.128\.STRONG\.SYS"), lambda arch, *finish: 2 * 2 * 2),
    "gemm/linear_table.cu": (
        ("HMMA.16816.F32.BF16", r"HMMA\.16816\.F32\s", r"UTMALDG\.2D", r"UTMALDG\.3D"),
        lambda arch, *finish: 2 * (8 if "-DFP4_FINISH=2" in finish else 10),
    ),
    "sparse/sparse_linear_small.cu": (
        (r"HMMA\.SP\.16832\.F32\.BF16", r"HMMA\.SP\.16832\.F32\s", "LDSM", COPY),
        lambda arch, *finish: 2 * (7 + 3 if arch in (80, 90, 100) else 6 + 2),
    ),
    "sparse/sparse_linear_table.cu": (
        (r"HMMA\.SP\.16832\.F32\.BF16", r"HMMA\.SP\.16832\.F32\s", "LDSM", r"UTMALDG\.2D", r"UTMALDG\.3D"),
        lambda arch, *finish: 2 * 2 * len(tiles_of("sparse/sparse_linear_table.cu")),
    ),
    "sparse/sparse_linear_wide.cu": (
        (r"HGMMA\.SP\.64x128x32\.F32\.BF16", r"HGMMA\.SP\.64x16x32\.F32\s", r"UTMALDG\.2D \[", r"UTMALDG\.2D\.MULTICAST", "UTMACCTL.PF", "USETMAXREG"),
        lambda arch, *finish: 2 * 2 * len(tiles_of("sparse/sparse_linear_wide.cu")),
    ),
    "sparse/sparse_linear_wide_fp8.cu": (
        (r"QGMMA\.SP\.64x256x64\.F32\.E4M3\.E4M3", r"QGMMA\.SP\.64x192x64", "E4M3.F16.UNPACK_B_MERGE_C", "MULTICAST", "UTMALDG", "USETMAXREG", "STSM"),
        lambda arch, *finish: len(tiles_of(FP8_TILES_IN)),
    ),
    "gemm/linear_wide.cu": (
        (r"HGMMA\.64x128x16\.F32\.BF16", r"HGMMA\.64x32x16\.F32\s", r"UTMALDG\.2D \[", r"UTMALDG\.2D\.MULTICAST", "USETMAXREG"),
        lambda arch, *finish: 2 * sum(len(tiles_of("gemm/linear_wide.cu", kind)) for kind in ("TILE", "SHARED", "ANY_K", *(() if finish else ("STREAMED",)))),
    ),
    "gemm/linear_wide_fp8.cu": (
        (
            r"QGMMA\.64x256x32\.F32\.E4M3\.E4M3",
            r"QGMMA\.64x192x32",
            r"QGMMA\.64x128x32",
            "E4M3.F16.UNPACK_B_MERGE_C",
            "MULTICAST",
            "UTMALDG",
            "USETMAXREG",
            "STSM",
        ),
        lambda arch, *finish: len(tiles_of(FP8_TILES_IN)),
    ),
    "moe/grouped_wide.cu": (
        (r"HMMA\.16816\.F32\.BF16", r"HGMMA\.64x32x16", r"HGMMA\.64x96x16\.F32\.BF16", "UBLKCP", r"UTMALDG\.2D", r"UTMALDG\.3D", "USETMAXREG", "LDGSTS"),
        # tiles x ((the first product in both forms, the second) x (K of a multiple of 256 or any), gather), one that gathers only, two routes, combine
        lambda arch, *finish: 6 * (3 * 2 + 1) + 2 * 2 + 3,
    ),
    "moe/grouped_wide_fp8.cu": (
        (r"QGMMA\.64x64x32\.F32\.E4M3\.E4M3", r"QGMMA\.64x256x32", "E4M3.F32", r"UTMALDG\.3D", r"UTMALDG\.2D\.MULTICAST", "USETMAXREG", "LDGSTS", "STSM"),
        # tiles x both products x (K of a multiple of 256 or any), rounding of tokens and of sorted rows of four lengths, route, combine
        lambda arch, *finish: 4 * len(tiles_of("moe/grouped_wide_fp8.cu")) + 2 * 4 + 2,
    ),
    "moe/decode_table.cu": (
        (r"HMMA\.16816\.F32\.BF16", r"HMMA\.SP\.16832\.F32\.BF16", "LDSM", "UBLKCP", r"UTMALDG\.3D"),
        lambda arch, *finish: 2 * 2 * 3,  # one or two sets a warp x both products x (dense, of any K, 2:4-sparse)
    ),
    # dtypes x with a norm in front or without
    "moe/router.cu": ((r"HMMA\.16816\.F32\.BF16", r"HMMA\.16816\.F32\s", "CCTL", "UCGABAR_ARV"), lambda arch, *finish: 2 * 2),
    ATTENTION: (
        (r"HMMA\.16816\.F32\.BF16", r"HMMA\.16816\.F32\s", r"IMMA\.16832\.S8\.S8", r"LDG\.E\.128\.STRONG"),
        lambda arch, *finish: 2 * 3 * 3 * 2,  # dtypes x formats x heads of 64, 128, 256 x 8 or 16 rows of the query
    ),
    # dtypes x heads of 64 and 128 x 8 rows by few warps or by many, or 16 rows
    "attention/paged_attention.cu": ((r"HMMA\.16816\.F32\.BF16", r"HMMA\.16816\.F32\s", r"UTMALDG\.4D", "UCGABAR_ARV"), lambda arch, *finish: 2 * 2 * 3),
    "attention/paged_attention_fp8.cu": ((r"HMMA\.16816\.F32\s", r"F2FP\.F16\.E4M3", r"UTMALDG\.4D", "UCGABAR_ARV"), lambda arch, *finish: 2 * 2 * 3),
    # dtypes x widths x 8 rows by few warps or by many, or 16 rows; and formats
    "attention/step_attention.cu": ((r"HMMA\.16816\.F32\.BF16", r"HMMA\.16816\.F32\s", "UBLKCP", "UCGABAR_ARV"), lambda arch, *finish: 2 * 2 * 3),
    "attention/step_attention_codes.cu": ((r"HMMA\.16816\.F32\s", r"IMMA\.16832\.S8\.S8", "UBLKCP", "UCGABAR_ARV"), lambda arch, *finish: 2 * 2 * 3 * 2),
    "gemm/linear_w4a4.cu": ((r"OMMA\.SF\.16864\.F32\.E2M1\.E2M1\.UE4M3\.4X", COPY), lambda arch, *finish: 2),
}
NEW = pytest.mark.skipif(aot.VERSION < (3, 7), reason="the disassembler of Triton 3.6 does not know sm_121")
# Compiled for sm_90 alone.
HOPPER = ("moe/", CHAIN, "gemm/linear_table", "gemm/linear_wide", "sparse/sparse_linear_table", "sparse/sparse_linear_wide")
COMPILED = [
    *[("gemm/linear_small.cu", arch) for arch in (80, 90, 120)],
    pytest.param("gemm/linear_small.cu", 100, marks=pytest.mark.slow),  # takes the branches of sm_120
    pytest.param("gemm/linear_small.cu", 121, marks=[NEW, pytest.mark.slow]),
    *[("gemm/linear_gemv.cu", arch) for arch in (80, 90, 100, 120)],
    *[("sparse/sparse_linear_small.cu", arch) for arch in (80, 90, 120)],
    *[(source, 90) for source in SOURCES if source.startswith(HOPPER)],
    ("gemm/linear_w4a4.cu", 120),
    *[pytest.param(source, arch, marks=[] if arch == 90 else [pytest.mark.slow]) for source in CLUSTERS for arch in (90, 100, 120)],
    *[pytest.param(ATTENTION, arch, marks=[] if arch in (90, 120) else [pytest.mark.slow]) for arch in (80, 90, 100, 120)],
]
# The libraries with more behind their products.
VARIANTS = [
    pytest.param(name, arch, marks=[] if arch == 90 and not (kernel.several and name.startswith("moe_grouped")) else [pytest.mark.slow])
    for name, kernel in csrc.LIBRARIES.items()
    if kernel.defines
    for arch in (80, 90, 100, 120)
    if name in csrc.kernels_for(arch)
]
# nvcc takes ten seconds for a dozen instances, and the sources have 500. Without --slow, which compiles all of them, those of bfloat16 alone are compiled (an
# instance of float16 differs in its conversions), and of these the ones with the most sums of a thread and one for each branch of the source; a library for
# several global scales, which differs in one multiplication, has the branches that the one with one global scale leaves out. By source, or with what it is
# compiled for: the text that is left out of it, or what takes its place, and how many kernels remain.
SEVERAL = "-DFP4_SEVERAL_SCALES=1"
NOTHING = "cudaErrorInvalidValue"
SMALL_TILES = ("if (p.M <= 8) return by_tile<T, 1>(tile, p, stream);", "TILE(2, 16, 2)", "if constexpr (MT == 4) { TILE(2, 8, 4) TILE(4, 4, 3) }")
FP8_TILES = (
    "TILE(64, 1) TILE(64, 2) TILE(64, 4) TILE(128, 1) TILE(128, 2)",
    "TILE(192, 1) TILE(192, 2)",
    "TILE(256, 2)",
    "STREAMED(64) STREAMED(128) STREAMED(192)",
)
SPARSE_TILES = ("TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2)", "TILE(128, 16, 2) TILE(128, 32, 2) TILE(128, 64, 2)")
MOE_TILES = (
    "{8, false, {1, 2, 3, 4, 1, 2}, {1, 2, 3, 4, 1, 2}},",
    "{48, false, {2, 2, 4, 2, 1, 1}, {2, 2, 4, 2, 1, 1}},",
    "{80, true, {2, 2, 3, 2, 1, 1}, {2, 2, 3, 2, 1, 1}},",
    "{128, false, {2, 1, 4, 2, 1, 1}, {2, 1, 4, 2, 1, 1}},",
)
MOE_FP8_TILES = ("TILE(96, 6, 8, 64, 80)", "TILE(128, 4, 8, 64, 80, 96)", "TILE(192, 3, 6, 96, 128, 144, 160)")
MOE_FP8_FORMS = """mapped ? run<UP, true, W_STAGES, X_STAGES, SIZES>(l, space, stream)
                : run<UP, false, W_STAGES, X_STAGES, SIZES>(l, space, stream)"""
NO_PAGES_OF_64 = "c.D == 64 ? by_rows<T, KIND, 64>(c) : "
NO_64 = "p.D == 64 ? by_rows<T, KEYS, VALUES, 64>(p) : "
NO_FP8 = "call->format == 0 ? by_shape<T, kFP8, kFP8>(*call) : "
BY_ROWS = "few ? run<Form<T, KEYS, VALUES, d, 8>>(p) : run<Form<T, KEYS, VALUES, d, 16>>(p)"
LEFT_OUT = {
    "gemm/linear_small.cu": (SMALL_TILES, lambda arch, *finish: 2),
    ("gemm/linear_small.cu", 90): ((*SMALL_TILES, "if (p.M <= 16) return by_tile<T, 2>(tile, p, stream);"), lambda arch, *finish: 2),
    "gemm/linear_gemv.cu": (("TILE(2) ",), lambda arch, *finish: 1),
    "gemm/linear_table.cu": (
        ("M <= 8 ? by_tile<T, 8>(tile, p, at) : ", "M <= 24 ? by_tile<T, 24>(tile, p, at) : ", "TILE(1, 1)"),
        lambda arch, *finish: 2 if "-DFP4_FINISH=2" in finish else 3,
    ),
    "sparse/sparse_linear_small.cu": (
        (
            "if (c.M <= 8) return run<T, 1, 2, 8, 2, true>(c, tile.splits);",
            "TILE(1, 2, 8, 2) TILE(1, 2, 16, 2) TILE(1, 4, 8, 3) TILE(2, 2, 8, 2) TILE(2, 2, 8, 3)",
        ),
        lambda arch, *finish: 4 if arch in (80, 90, 100) else 2,
    ),
    "sparse/sparse_linear_table.cu": (("M <= 8 ? by_tile<T, 8>(tile, c) : ", "TILE(1, 2) TILE(2, 2)", "TILE(1, 4) TILE(2, 4)"), lambda arch, *finish: 2),
    "sparse/sparse_linear_wide.cu": (SPARSE_TILES, lambda arch, *finish: 2 * 2),
    ("sparse/sparse_linear_wide.cu", SEVERAL): ((*SPARSE_TILES, "TILE(64, 16, 4)"), lambda arch, *finish: 2),
    "sparse/sparse_linear_wide_fp8.cu": ((*FP8_TILES, "TILE(128, 4)"), lambda arch, *finish: 3),
    "gemm/linear_wide.cu": (
        ("TILE(64, 32, 4) TILE(64, 64, 2) TILE(64, 128, 2)", "TILE(128, 32, 2) TILE(128, 64, 2)", "ANY_K(128, 32, 2) ANY_K(128, 64, 2)", "STREAMED(192, 64)"),
        lambda arch, *finish: 3 if finish else 5,
    ),
    "gemm/linear_wide_fp8.cu": (FP8_TILES, lambda arch, *finish: 4),
    "moe/grouped_wide.cu": (
        dict.fromkeys(MOE_TILES, "") | {"run<UP, true, GATHERED, TILE>(l, space, stream)": NOTHING},
        lambda arch, *finish: 3 * (3 + 1) + 3,
    ),
    ("moe/grouped_wide.cu", SEVERAL): (
        dict.fromkeys(MOE_TILES, "") | {"run<UP, false, GATHERED, TILE>(l, space, stream)": NOTHING},
        lambda arch, *finish: 3 * (3 + 1) + 3,
    ),
    "moe/grouped_wide_fp8.cu": (
        dict.fromkeys(MOE_FP8_TILES, "") | {MOE_FP8_FORMS: "run<UP, UP, W_STAGES, X_STAGES, SIZES>(l, space, stream)"},
        lambda arch, *finish: 2 * 2 + 2 * 4 + 2,
    ),
    ("moe/grouped_wide_fp8.cu", SEVERAL): (
        dict.fromkeys(MOE_FP8_TILES, "") | {MOE_FP8_FORMS: "run<UP, !UP, W_STAGES, X_STAGES, SIZES>(l, space, stream)"},
        lambda arch, *finish: 2 * 2 + 2 * 4 + 2,
    ),
    "moe/decode_table.cu": ({"run<UP, 1>(c, meta, tile)": NOTHING}, lambda arch, *finish: 2 * 3),
    ("moe/decode_table.cu", SEVERAL): ({"run<UP, 2>(c, meta, tile)": NOTHING}, lambda arch, *finish: 2 * 3),
    (ATTENTION, 90): ({"SHAPE(64) ": "", " SHAPE(256)": "", BY_ROWS: "run<Form<T, KEYS, VALUES, d, KEYS == kNVFP4 ? 16 : 8>>(p)"}, lambda arch, *finish: 3),
    # takes the branches of sm_90
    (ATTENTION, 120): ({"SHAPE(64) ": "", " SHAPE(256)": "", BY_ROWS: "run<Form<T, KEYS, VALUES, d, 8>>(p)", NO_FP8: ""}, lambda arch, *finish: 2),
    "attention/paged_attention.cu": ((NO_PAGES_OF_64,), lambda arch, *finish: 3),
    "attention/paged_attention_fp8.cu": ((NO_PAGES_OF_64,), lambda arch, *finish: 3),
    "attention/step_attention.cu": ((NO_64,), lambda arch, *finish: 3),
    "attention/step_attention_codes.cu": ({NO_64: "", "run_slots<Many>(p, blocks_of<Many, Slots<Many>>(p))": NOTHING}, lambda arch, *finish: 2 * 2),
}
# Of these float16 is compiled, too: there its own instructions are looked for.
BOTH = (
    ("gemm/linear_small.cu", 90), ("gemm/linear_gemv.cu", 90), ("gemm/linear_table.cu", 90), ("sparse/sparse_linear_small.cu", 90),
    ("gemm/linear_w4a4.cu", 120), ("moe/router.cu", 90),
)  # fmt: skip
WHOLE = pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])


@needs_nvcc
@WHOLE
@pytest.mark.parametrize(("name", "arch"), VARIANTS)
def test_every_variant_compiles_without_spills(name, arch, whole, tmp_path):
    check_compiled(csrc.LIBRARIES[name].source, arch, tmp_path, csrc.LIBRARIES[name].defines, whole)


@needs_nvcc
@WHOLE
@pytest.mark.parametrize(("source", "arch"), COMPILED)
def test_compiles_without_spills(source, arch, whole, tmp_path):
    check_compiled(source, arch, tmp_path, whole=whole)


def put_instead(files: Iterable[Path], text: str, instead: str) -> None:
    """In the place of ``text``, which is there once in one of ``files``."""
    found = {file: whole for file in files if text in (whole := file.read_text())}
    assert [whole.count(text) for whole in found.values()] == [1], f"LEFT_OUT names what the source does not have once (instances have changed?): {text}"
    for file, whole in found.items():
        file.write_text(whole.replace(text, instead))


def compiled(source, arch, folder, defines, both, left_out) -> Path:
    """The device code of a source for one architecture, of both dtypes or of bfloat16 alone. Of linear_w4a4.cu the library, the host's part included."""
    if source == "gemm/linear_w4a4.cu":
        return build.cuda_library(source, arch, defines)
    flags = [flag for flag in build.cuda_flags(arch) if flag not in ("-shared", "-Xcompiler", "-fPIC")]
    tree = shutil.copytree(build.csrc_dir(), folder / "csrc")
    if not both:
        put_instead([tree / "common/device.cuh"], "f(__half())", NOTHING)
    for text, instead in left_out.items():
        put_instead([tree / source, *tree.rglob("*.cuh")], text, instead)
    subprocess.run([build.nvcc(), *flags, *defines, "-cubin", "-o", folder / "a.cubin", tree / source], check=True)
    return folder / "a.cubin"


def check_compiled(source, arch, folder, defines=(), whole=True):
    """``whole``: all instances."""
    wanted, count = SOURCES[source]
    both = whole or ((source, arch) in BOTH and not defines)
    keys = () if whole else ((source, arch), *((source, define) for define in defines), source)
    left_out, remain = next((LEFT_OUT[key] for key in keys if key in LEFT_OUT), ((), None))
    dtypes = 1 if source.startswith("moe") else 2  # of moe there is bfloat16 alone
    expected = (remain(arch, *defines) if remain else count(arch, *defines) // dtypes) * (dtypes if both else 1)
    library = compiled(source, arch, folder, defines, both, left_out if isinstance(left_out, dict) else dict.fromkeys(left_out, ""))
    both = both or dtypes == 1
    usage = subprocess.run([aot.tool("cuobjdump"), "--dump-resource-usage", str(library)], capture_output=True, text=True, check=True).stdout
    name = "fp4" if source.startswith("moe") else Path(source).stem  # there all of them, elsewhere what the source itself defines
    kernels = re.findall(rf"Function (\S*{name}\S*):\s+REG:(\d+) STACK:(\d+)", usage)
    tables = "gemm/linear_table.cu", "sparse/sparse_linear_table.cu"
    early, wide = (
        source in (*tables, *CLUSTERS) or (source in ("gemm/linear_gemv.cu", CHAIN, ATTENTION) and arch >= 90),
        source.endswith(("linear_wide.cu", "linear_wide_fp8.cu")),
    )
    assert len(kernels) == expected
    # bytes; without instructions that convert E4M3 two words of the keys in fp8 do not fit
    spilled = 8 if (source, arch) == (ATTENTION, 80) else 0
    assert max(int(stack) for _, _, stack in kernels) <= spilled
    sass = subprocess.run([aot.tool("cuobjdump"), "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    assert spilled or not re.search(SPILL, sass)
    if source == ATTENTION:
        assert {len(re.findall(ARRIVAL, body)) for body in sass.split("Function : ")[1:]} == {1}
        sass = re.sub(ARRIVAL, "", sass)
        # heads of up to 128 and up to 8 rows of the query: two blocks of 8 warps share a multiprocessor
        assert max(int(registers) for kernel, registers, _ in kernels if re.search("Li(64|128)ELi8E", kernel)) <= 128
    if source == CHAIN:
        assert {len(re.findall(ARRIVAL_UNREAD, body)) for body in sass.split("Function : ")[1:]} == {1, 2}  # of experts for the scores, too
        sass = re.sub(ARRIVAL_UNREAD, "", sass)
        assert not re.search(FENCE, sass), "a block waits until all that it has stored has arrived"
        # beside its 17 warps there is room for a block of the attention behind it; a sum over ranks takes more
        assert {int(registers) <= 72 for kernel, registers, _ in kernels if "ELb0EEEv" in kernel} == {True}
        assert max(int(registers) for _, registers, _ in kernels) <= 80
    assert not re.search(UNORDERED, sass), "sums in no fixed order"
    for instruction in wanted if both else [i for i in wanted if not i.endswith(r"F32\s")]:  # those are float16's
        assert re.search(instruction, sass), instruction
    # griddepcontrol.wait: of who fetches and who stores, and of the kernels before
    grid_waits = [body.count("ACQBULK") for body in sass.split("Function : ")[1:]]
    begins = early or wide or source.startswith("moe")
    assert min(grid_waits) >= (early or wide) and (max(grid_waits) > 0) is begins, grid_waits
    assert not ((early or wide) and ".CONSTANT" in "".join(re.findall(r"LDG\.E\.128\S*", sass))), "activations change while an early kernel runs"
    assert not overtaken(sass), "a stage is given back before it is read"
    assert not overwritten(sass), "an operand is written while its product may still read it"
    # products in flight together: one wait for two or four, and one at the end (of sparse ones one more before each step), where ptxas puts one behind each if
    # it cannot prove the registers free
    waits = {(len(re.findall("[HQ]GMMA", body)), body.count("WARPGROUP.DEPBAR")) for body in sass.split("Function : ")[1:]}
    if source == "moe/grouped_wide_fp8.cu":  # a loop for each number of tokens
        waits = {(products // (waited // 5), waited // (waited // 5)) for products, waited in waits if waited}
    assert waits <= {(0, 0), (4, 4), (8, 6 if source.startswith("sparse") else 5), (16, 5), (16, 9), (32, 9)}, waits


def overtaken(sass: str) -> list[str]:
    """Arrivals at a counter while a load of 16 bytes from shared memory is on its way: they overtake it, and a copy may then overwrite what it is to read.

    Bits 41 on of an instruction's second word: the scoreboard (of six, 7: none) that its result sets, at 5, and those that it waits for, from 11 on.
    """
    found, loads = [], set()
    for text, control in re.findall(r"/\*[0-9a-f]{4,5}\*/ +(\S.*?);? +/\* 0x[0-9a-f]{16} \*/\n +/\* 0x([0-9a-f]{16}) \*/", sass):
        bits = int(control, 16) >> 41
        loads -= {board for board in range(6) if bits >> 11 + board & 1}
        if "SYNCS.ARRIVE" in text and loads:
            found.append(text)
        board = bits >> 5 & 7
        if "LDS" in text and ".128" in text:
            loads.add(board)
        else:
            loads.discard(board)
    return found


def overwritten(sass: str) -> list[str]:
    """What writes a register of A or of metadata while the sparse product it was given to may run: until a wait, of which ptxas knows for A only.

    Loops are read twice, so that the end of one round meets the beginning of the next.
    """
    found = []
    for body in sass.split("Function : ")[1:]:
        if "GMMA.SP" not in body:
            continue
        code = [(int(at, 16), re.sub(r"^@!?U?P\w+ +", "", text)) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/ +(\S.*?);", body)]
        places = {at: i for i, (at, _) in enumerate(code)}
        for end, (at, text) in enumerate(code):
            jump = re.match(r"BRA\S* (?:!?U?P\w+, )?0x([0-9a-f]+)", text)
            if not jump or int(jump[1], 16) > at:
                continue
            loop = [text for _, text in code[places[int(jump[1], 16)] : end + 1]]
            groups, given = [], set()
            for text in loop * 2 if any("GMMA.SP" in text for text in loop) else ():
                if "GMMA.SP" in text:
                    a, meta = (int(re.findall(r"\bR(\d+)", text)[i]) for i in (1, 3))
                    given |= {*range(a, a + 4), meta}
                    if "gsb0" in text:
                        groups, given = [*groups, given], set()
                elif wait := re.search(r"DEPBAR\.LE gsb0, 0x(\d)", text):
                    groups = groups[len(groups) - int(wait[1]) :] if int(wait[1]) < len(groups) else groups
                elif not re.match(r"ST|SYNCS|RED|UTMA|BAR", text) and (written := re.match(r"(\S+) (?:U?P\w+, )*R(\d+)", text)):
                    first, count = int(written[2]), 4 if ".128" in written[1] else 2 if re.search(r"\.64|\.WIDE", written[1]) else 1
                    found += [text] * bool(set(range(first, first + count)) & set().union(given, *groups))
    return found


@needs_nvcc
def test_a_register_that_is_overwritten_is_found(tmp_path):
    """Without the wait before metadata is loaded."""
    shutil.copytree(build.csrc_dir(), tmp_path / "csrc")
    source = tmp_path / "csrc/sparse/sparse_linear_wide_fp8.cu"
    text, wait = source.read_text(), "        wgmma_wait<0>();  // it reads metadata"
    assert text.count(wait) == 1
    source.write_text(text.replace(wait, "        // it reads metadata"))
    tiles = tmp_path / "csrc" / FP8_TILES_IN
    text = re.sub(r"(TILE|STREAMED)\([\d, ]+\)", "", tiles.read_text())
    tiles.write_text(text.replace("#undef STREAMED", "TILE(256, 4)\n#undef STREAMED"))
    flags = [flag for flag in build.cuda_flags(90) if flag not in ("-shared", "-Xcompiler", "-fPIC")]
    subprocess.run([build.nvcc(), *flags, "-cubin", "-o", tmp_path / "a.cubin", source], check=True)
    sass = subprocess.run([aot.tool("cuobjdump"), "-sass", tmp_path / "a.cubin"], capture_output=True, text=True, check=True).stdout
    assert overwritten(sass)


def test_a_kernel_is_built_only_where_a_row_names_it():
    """wgmma is sm_90's, block-scaled MMA sm_120's: for other targets they do not compile, and installing would stop at them."""
    hopper = {
        name for name in csrc.LIBRARIES if name.startswith(("linear_chain", "linear_table", "sparse_linear_table", "linear_wide", "sparse_linear_wide", "moe"))
    }
    assert {arch: set(csrc.LIBRARIES) - set(csrc.kernels_for(arch)) for arch in (80, 90, 100, 120, 121)} == {
        80: {*hopper, "linear_w4a4", "paged_attention", "paged_attention_fp8", "step_attention", "step_attention_codes"},
        90: {"linear_w4a4"},
        100: {*hopper, "linear_w4a4"},
        120: hopper,
        121: hopper,
    }
    reason = "csrc/gemm/linear_w4a4.cu is not written for sm_90"
    assert csrc.why_not("linear_w4a4", 90) == reason
    assert csrc.door("linear_w4a4", 90) == f"called through ctypes, which costs host time: {reason}"
