"""The CUDA kernels of csrc/gemm on a CPU (emulator.py): every tile against float64 over tails, and the emulator's own checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fp4_inductor._sources import csrc_dir
from fp4_inductor.formats import nvfp4
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.params import LinearParams
from fp4_inductor.ops import linear, quantize_rows_nvfp4
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import Emulated, EmulatorError, emulated, linear_fields, tiles_of

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
SMALL, TABLE, WIDE = "gemm/linear_small.cu", "gemm/linear_table.cu", "gemm/linear_wide.cu"
BF16, FP16 = torch.bfloat16, torch.float16


def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every code and the whole range of scales occur, subnormal ones too."""
    q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    s = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8).view(nvfp4.SCALE_DTYPE)
    return q, s, torch.tensor(0.37)


def run(kernel: Emulated, x, w, bias, tile, seed: int = 0, starts: tuple[int, ...] = ()) -> torch.Tensor:
    out = torch.full((x.shape[0], w[0].shape[0]), float("nan"), dtype=x.dtype)
    return kernel.run(LinearParams, linear_fields(x, w, bias, tile, starts), out, seed=seed)


def error(y, x, w, bias) -> float:
    r = x.double() @ nvfp4.dequantize(*w, torch.float32).double().T
    r = r if bias is None else r + bias.double()
    distance = ((y.double() - r).norm() / r.norm()).item()
    return distance if distance == distance else float("inf")


def check(source, m, n, k, tile, dtype) -> None:
    x, w = torch.randn(m, k).to(dtype), weight(n, k)
    bias = torch.randn(n).to(dtype) if n % 2 else None
    y = run(emulated(source), x, w, bias, tile)
    few = 2 if m * n < 32 else 1
    assert error(y, x, w, bias) <= linear.CONTRACT.tolerance[dtype] * few, (m, n, k, tile, dtype)


# K: less than a step, a step and a half, more than all warps take at once, odd multiples of 64, and of 16 only
@pytest.mark.parametrize("tile", tiles_of(SMALL), ids=str)
def test_small(tile):
    most = 8 if tile == (4, 8, 3) else 32 if tile in ((2, 8, 4), (4, 4, 3)) else 16
    least = 17 if most == 32 else 1
    for i, (n, k) in enumerate(((1, 64), (33, 192), (70, 4160), (64, 2048))):
        for m in (least, least + 4, most):
            check(SMALL, m, n, k, tile, (BF16, FP16)[(i + m) % 2])


def test_small_with_32_tokens_of_the_common_tiles():
    for tile in ((2, 16, 2), (4, 8, 2)):
        for m, n, k in ((17, 65, 320), (32, 64, 1088)):
            check(SMALL, m, n, k, tile, BF16)


@pytest.mark.parametrize("k", [16, 48, 80, 1040, 2064])
def test_small_with_any_k(k):
    for m, n in ((1, 5), (9, 33), (20, 70)):
        for dtype in (BF16, FP16):
            check(SMALL, m, n, k, (2, 16, 2), dtype)


# (sets, sets_a_warp, k_groups, substeps): one warp; rows beyond N; a ring shorter than K; more warps in K than stages; every warp; four warps a stage
TABLE_TILES = [(1, 1, 1, 1), (3, 1, 5, 1), (2, 2, 16, 1), (4, 2, 3, 1), (16, 2, 2, 1), (8, 2, 4, 1), (14, 2, 2, 1), (2, 2, 4, 4), (2, 2, 16, 4), (8, 2, 4, 4)]


@pytest.mark.parametrize("tile", TABLE_TILES, ids=str)
def test_table(tile):
    """K: one stage, fewer than warps, more than the ring holds; rows of x that are fetched: 4, 8, 16, 24, 32."""
    each = tile[3] * 256
    for i, (m, n, steps) in enumerate(
        ((1, 33, 1), (8, 100, 9), (5, 16, 20), (9, 260, 5), (16, 129, 17), (3, 33, 9), (24, 50, 9), (17, 33, 20), (32, 50, 9), (27, 33, 20))
    ):
        if m <= 16 or (tile[3] == 1 and (m <= 24 or tile[0] // tile[1] * tile[2] < 16)):
            check(TABLE, m, n, each * (steps if tile[3] == 1 else -(-steps // 2)), tile, (BF16, FP16)[i % 2])


def test_every_instance_of_the_table_kernel_has_a_tile():
    assert {(sets, substeps) for _, sets, _, substeps in TABLE_TILES} == set(tiles_of(TABLE))


def test_table_chooses_a_tile_for_every_size():
    for m, n, k in (
        (1, 1, 256),
        (2, 4100, 512),
        (8, 70, 4096),
        (13, 2114, 768),
        (3, 2114, 1024),
        (20, 2114, 1024),
        (32, 4100, 1024),
        (29, 70, 2048),
        (25, 2114, 512),
    ):
        check(TABLE, m, n, k, (0, 0, 0, 0), BF16)


@pytest.mark.parametrize("tile", tiles_of(WIDE), ids=str)
def test_wide(tile):
    for i, (m, n, k, splits) in enumerate(((3, 33, 256, 1), (tile[1] + 6, 260, 1280, 2), (tile[1], 129, 2304, 4))):
        check(WIDE, m, n, k, (*tile, splits), (BF16, FP16)[i % 2])


@pytest.mark.parametrize("tile", tiles_of(WIDE, "SHARED"), ids=str)
def test_wide_where_two_blocks_share_activations(tile):
    """An odd number of blocks' rows, and bits that one block computes alone."""
    for i, (m, n, k) in enumerate(((3, 33, 256), (tile[1] + 6, 260, 1280))):
        check(WIDE, m, n, k, (*tile, -1), (BF16, FP16)[i % 2])
    x, w = torch.randn(m, k).to(BF16), weight(n, k)
    assert torch.equal(run(emulated(WIDE), x, w, None, (*tile, -1)), run(emulated(WIDE), x, w, None, (*tile, 1)))


@pytest.mark.parametrize("tile", tiles_of(WIDE, "STREAMED"), ids=str)
def test_wide_where_blocks_share_tiles(tile):
    """Five blocks: shares of tiles, whole tiles, fewer tiles than blocks, one block for all."""
    for i, (m, n, k) in enumerate(((tile[1] + 6, 520, 1280), (3, 33, 2304), (tile[1], 129, 256))):
        check(WIDE, m, n, k, (*tile, 1, 0), (BF16, FP16)[i % 2])


@pytest.mark.parametrize("tile", tiles_of(WIDE, "ANY_K"), ids=str)
def test_wide_with_any_k(tile):
    """Rows of scales that no tile map takes: they are loaded."""
    for i, (m, n, k, splits) in enumerate(((3, 33, 64, 1), (tile[1] + 6, 260, 1088, 2), (tile[1], 129, 2176, 4))):
        check(WIDE, m, n, k, (*tile, splits), (BF16, FP16)[i % 2])


def test_wide_chooses_a_tile_for_every_size():
    for m, n, k in ((1, 64, 64), (9, 70, 1024), (20, 2100, 512), (50, 130, 2048), (70, 300, 8192), (130, 200, 1024), (300, 129, 320)):
        check(WIDE, m, n, k, (0, 0, 0, 0), BF16)


EACH = pytest.mark.parametrize(("source", "tile"), [(SMALL, (4, 8, 2)), (TABLE, (2, 2, 2, 1)), (WIDE, (128, 32, 2, 1))], ids=["small", "table", "wide"])


@EACH
def test_siblings_have_global_scales_of_their_own(source, tile):
    """Two and three members in one call, bit for bit what a call each by the same tile computes."""
    for m, starts, n in ((3, (48,), 70), (16, (16, 80), 130), (9, (5, 6), 33)):
        k = 768 if source == TABLE else 576
        q, s, _ = weight(n, k)
        g = torch.tensor([0.37, 2.9, 0.011])[: len(starts) + 1]
        x, bias = torch.randn(m, k).to(BF16), torch.randn(n).to(BF16)
        y = run(emulated(source), x, (q, s, g), bias, tile, starts=starts)
        for i, (a, b) in enumerate(zip((0, *starts), (*starts, n), strict=True)):
            part = (q[a:b], s[a:b], g[i])
            assert torch.equal(y[:, a:b], run(emulated(source), x, part, bias[a:b], tile)), (m, starts, i)
            assert error(y[:, a:b], x, part, bias[a:b]) <= 2 * linear.CONTRACT.tolerance[BF16]


@EACH
def test_every_code_with_every_scale(source, tile):
    q = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    s = torch.arange(127, dtype=torch.uint8)[:, None].expand(127, 32).contiguous().view(nvfp4.SCALE_DTYPE)
    w = (q, s, torch.tensor(2.0**-9))
    for dtype in (BF16, FP16):
        x = torch.randn(16, 512).to(dtype)
        y = run(emulated(source), x, w, None, tile)
        assert not y[:, 0].any(), "scale byte 0"
        dense = nvfp4.dequantize(*w, torch.float32).double()
        magnitude = x.double().abs() @ dense.abs().T  # a single result may cancel
        assert ((y.double() - x.double() @ dense.T).abs() / magnitude.clamp_min(1e-30)).max() <= 2**-8


@pytest.mark.parametrize(
    ("source", "tile"), [(SMALL, (2, 16, 2)), (SMALL, (4, 8, 2)), (TABLE, (3, 1, 2, 1)), (TABLE, (2, 2, 8, 4)), (WIDE, (128, 32, 2, 2))], ids=str
)
def test_the_bits_do_not_depend_on_the_order_of_threads_nor_rows_on_each_other(source, tile):
    m, k = (16, 256 * (5 if tile[-1] == 1 else 12)) if source == TABLE else (24, 1088)
    x, w = torch.randn(m, k).to(BF16), weight(70, k)
    y = run(emulated(source), x, w, None, tile)
    assert torch.equal(run(emulated(source), x, w, None, tile, seed=7), y)
    for bad in (float("nan"), float("inf")):
        x[3, -1] = bad
        z = run(emulated(source), x, w, None, tile)
        keep = [i for i in range(m) if i != 3]
        assert torch.equal(z[keep], y[keep])
        assert not z[3].isfinite().any()


def noise(m: int, n: int, k: int, dtype=BF16) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """x and a weight all of whose products sum to zero: what comes out is the rounding of one order of summation. K % 32 == 0."""
    q, s, g = weight(n, k // 2)[0], (torch.rand(n, k // 32) + 0.5).to(nvfp4.SCALE_DTYPE).view(torch.uint8), torch.tensor(1.0)
    order = torch.randperm(k // 16)
    q = torch.cat((q, q ^ 0x88), 1).view(n, k // 16, 8)[:, order].reshape(n, k // 2)
    x = torch.randn(m, k // 2).to(dtype).repeat(1, 2).view(m, k // 16, 16)[:, order].reshape(m, k)
    return x, (q, s.repeat(1, 2)[:, order].contiguous().view(nvfp4.SCALE_DTYPE), g)


def alike(result, sizes) -> list[list[int]]:
    """The numbers of rows for which the first row has the same bits."""
    classes: list[tuple[torch.Tensor, list[int]]] = []
    for m in sizes:
        first = result(m)[:1]
        same = next((found for y, found in classes if torch.equal(y, first)), None)
        if same is None:
            classes.append((first, [m]))
        else:
            same.append(m)
    return [found for _, found in classes]


def test_bits_do_not_depend_on_the_batch_but_where_the_table_says_so():
    few, many = [1, 2, 8, 9, 16], [17, 31, 32]
    for n, k, want in ((70, 4160, [few, many]), (40, 8256, [few + many])):
        x, w = noise(32, n, k)
        assert alike(lambda m: run(emulated(SMALL), x[:m].clone(), w, None, (0, 0, 0)), few + many) == want, (n, k)  # noqa: B023
    # 8192 rows and more take long here; their tiles differ in the number of warps, or not
    x, w = noise(32, 70, 1088)
    tiles = {8: (4, 8, 3), 16: (4, 8, 2), 32: (4, 8, 2)}
    assert alike(lambda m: run(emulated(SMALL), x[:m].clone(), w, None, tiles[m]), tiles) == [[8, 16, 32]]
    tiles[32] = (4, 4, 3)
    assert alike(lambda m: run(emulated(SMALL), x[:m].clone(), w, None, tiles[m]), tiles) == [[8, 16], [32]]
    x, w = noise(24, 70, 4352)
    assert alike(lambda m: run(emulated(TABLE), x[:m].clone(), w, None, (0, 0, 0, 0)), [*few, 17, 24]) == [[*few, 17, 24]]
    x, w = noise(32, 70, 4352)
    assert alike(lambda m: run(emulated(TABLE), x[:m].clone(), w, None, (0, 0, 0, 0)), [16, 24, 25, 32]) == [[16, 24, 25, 32]]
    x, w = noise(24, 70, 4096)
    tiles = {16: (2, 2, 8, 4), 17: (2, 2, 8, 1), 24: (4, 2, 8, 1)}  # of 33 to 64 rows a block; of these the last has seven stages
    assert alike(lambda m: run(emulated(TABLE), x[:m].clone(), w, None, tiles[m]), tiles) == [[16, 17], [24]]
    x, w = noise(65, 70, 1088)
    tiles = {3: (128, 32, 2, 2), 60: (128, 64, 2, 1), 65: (128, 128, 1, 1)}  # blocks, then groups, that share K
    assert len(alike(lambda m: run(emulated(WIDE), x[:m].clone(), w, None, tiles[m]), tiles)) == 3
    said = {name: kernel.batch for name, kernel in registry.named("linear").items()}
    assert said["cuda_small"][0] == 16 and "M <= 16" in said["cuda_small"][1]
    assert said["cuda_table"][0] == 16 and "seven warps" in said["cuda_table"][1]
    assert said["cuda_wide"][0] == 1 and said["cuda_wide"][1]


def test_the_cpu_kernel_has_two_orders():
    few, many = [1, 2, 3, 4, 5, 7, 8], [9, 16, 33, 64, 128]
    for dtype in (BF16, torch.float32):
        x, w = noise(128, 300, 1088, dtype)
        classes = alike(lambda m: torch.ops.fp4.linear(x[:m], *w), few + many)  # noqa: B023
        assert classes[0] == few, classes


def test_arguments_that_no_kernel_takes():
    for source, tile in ((SMALL, (2, 16, 2)), (TABLE, (2, 2, 2, 1)), (WIDE, (128, 32, 2, 1))):
        kernel, one = emulated(source), 256 if source == TABLE else 64

        def call(m, n, k, second, third, act, tile, kernel=kernel):
            kernel.run(LinearParams, dict(M=m, N=n, K=k, second=second, third=third, act=act, tile=tile), torch.empty(1))

        for m, n, k, t in ((0, 8, one, tile), (1, 0, one, tile), (1, 8, 0, tile), (1, 8, 72, tile), (1, 8, one, (9, *tile[1:]))):
            with pytest.raises(EmulatorError, match="status"):
                call(m, n, k, 0, 0, 0, t)
        for second, third, act in ((9, 8, 0), (-1, 0, 0), (0, 0, 1)):  # not in order; no such row; an activation in a plain library
            with pytest.raises(EmulatorError, match="status 1"):
                call(1, 8, one, second, third, act, tile)
    of_four = (1, (2, 2, 6, 4), 1024), (17, (2, 2, 4, 4), 1024), (1, (2, 2, 4, 4), 1280), (1, (2, 1, 4, 4), 1024), (1, (2, 2, 2, 2), 1024)
    of_one = [(m, (*tile, 1), 256) for m, tile in ((33, (2, 2, 2)), (25, (2, 2, 16)), (1, (2, 2, 17)), (1, (18, 2, 1)), (1, (2, 3, 1)), (1, (4, 4, 1)))]
    for m, tile, k in (*of_one, *of_four):
        with pytest.raises(EmulatorError, match="status"):
            emulated(TABLE).run(LinearParams, dict(M=m, N=8, K=k, tile=tile), torch.empty(1))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 64), (64, 128, 1152), (70, 131, 832)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_both_operands_in_nvfp4(m, n, k, dtype):
    """linear_w4a4: the FP4 tensor cores of sm_120, by the fragment layout of the PTX manual."""
    x, w = (*weight(m, k)[:2], 0.37 * torch.rand(m, 1)), weight(n, k)
    bias = torch.randn(n).to(dtype) * 1e3
    w = (*w[:2], torch.tensor(2.0**-12))  # float16 holds the sums
    out = torch.full((m, n), float("nan"), dtype=dtype)
    given = dict(linear_fields(x[0], w, bias, ()), K=k, dtype=int(dtype == FP16), x_scale=x[1], row_scale=x[2])
    y = emulated("gemm/linear_w4a4.cu", 120).run(LinearParams, given, out)
    assert error(y, quantize_rows_nvfp4.dequantize(*x), w, bias) <= linear.CONTRACT.tolerance[dtype] * 2


# --- the test of the test: one line is broken (FP4_FAULT in the sources), and the emulator must say so ----------------
TOO_EARLY = "before its asynchronous copy was waited for|nobody wrote"
CAUGHT = [
    (SMALL, "SKIP_COPY_WAIT", TOO_EARLY),
    (SMALL, "WAIT_FOR_ONE_GROUP_TOO_FEW", TOO_EARLY),
    (SMALL, "SKIP_SYNC_AFTER_COPY", "race: read|nobody wrote|before its asynchronous copy"),
    (SMALL, "SKIP_SYNC_BEFORE_REFILL", "race: write"),
    (SMALL, "SKIP_BARRIER_BEFORE_SUMS", "race|nobody wrote"),
    (SMALL, "READ_ROWS_PAST_N", "outside every allocation"),
    (SMALL, "READ_K_PAST_K", "outside every allocation"),
    (SMALL, "READ_SCALES_PAST_END", "outside every allocation"),
    (SMALL, "STORE_COLUMNS_PAST_N", "outside every allocation"),
    (SMALL, "SUMS_TOO_CLOSE", None),
    (TABLE, "SKIP_BARRIER_AFTER_TABLE", "race|nobody wrote"),
    (TABLE, "SKIP_FULL_WAIT", "before its asynchronous copy|nobody wrote|race"),
    (TABLE, "SKIP_FREE_WAIT", "race|nobody waited for|promise"),
    (TABLE, "SKIP_BARRIER_BEFORE_SUMS", "race|nobody waited for"),
    (WIDE, "SKIP_WGMMA_WAIT", None),  # the next tile in its place is its own warpgroup's: products of the wrong numbers
    (WIDE, "SKIP_TOKENS_WAIT", "before its asynchronous copy was waited for"),
    (WIDE, "SKIP_TOKENS_FREE_WAIT", "race|nobody waited for"),
    (WIDE, "ONE_WARP_KEEPS_TOKENS", "deadlock"),
    (WIDE, "SKIP_WEIGHTS_WAIT", TOO_EARLY),
    (WIDE, "FREE_WEIGHTS_EARLY", "race|more arrivals"),
    (WIDE, "EXPECT_CODES_ONLY", "promise|more bytes|race|nobody"),
]


@pytest.mark.parametrize(("source", "fault", "words"), CAUGHT)
def test_a_broken_kernel_is_caught(source, fault, words):
    tile = {SMALL: (2, 16, 2), TABLE: (1, 1, 3, 1), WIDE: (64, 32, 4, 2)}[source]
    k = 2064 if fault == "READ_SCALES_PAST_END" else 8192 if source in (WIDE, TABLE) else 4160
    x, w, kernel = torch.randn(8, k).to(BF16), weight(33, k), emulated(source)
    emulator.check_caught(kernel, fault, words, lambda: error(run(kernel, x, w, None, tile), x, w, None))


def test_every_fault_point_is_tried_and_exists():
    """A test that asks for a name that no source has would break nothing."""
    here = Path(__file__).parent
    sources = [*csrc_dir().rglob("*.cu"), *csrc_dir().rglob("*.cuh"), here / "tile_maps.cu"]
    points = {name for path in sources for name in re.findall(r"FP4_FAULT\(([A-Z]\w+)\)", path.read_text())} - {"NAME"}
    tests = "".join(path.read_text() for path in here.glob("test_emulated_*.py"))
    assert points == set(re.findall(r'"([A-Z]+(?:_[A-Z]+)+)"', tests)) - {"ANY_K"}  # which is a macro that lists tiles
