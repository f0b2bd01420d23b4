"""select.plan: pure, so every architecture is tested anywhere. No tile number and no threshold of today's table is assumed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fp4_inductor.config import DispatchConfig
from fp4_inductor.errors import ConfigError, KernelError
from fp4_inductor.kernels.csrc import KERNELS
from fp4_inductor.kernels.select import Call, plan
from fp4_inductor.kernels.table import ANY, BATCH, COMPILED, EMULATED, HALF, LOST, REGIMES, ROWS, Row

ARCHS = (0, 80, 86, 89, 90, 100, 103, 120, 121)
PREFILL = ("auto", "fp8", "bf16", "nvfp4")
SHAPES = ((4096, 4096), (4095, 48), (1, 16), (33, 1040), (7, 2048), (8192, 8192))  # N, K; FP8 GEMMs want both in multiples of 16
CSRC = ("", "no CUDA compiler")  # the CUDA sources are compiled for this GPU, or why not
CALLS = [
    Call(op, arch, dtype, n, k, large, csrc)
    for op, arch, dtype, large, (n, k), csrc in itertools.product(("linear", "sparse_linear", "linear_w4a4"), ARCHS, ANY, PREFILL, SHAPES, CSRC)
]
GPU_CALLS = [c for c in CALLS if c.arch]
DEFAULT = DispatchConfig()


def limits(found) -> list[float]:
    return [math.inf if row.max_m is None else row.max_m for row in found.rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r.op}-{r.regime}-{r.kernel}-{r.arch[0]}")
def test_every_row_is_complete(row):
    assert row.regime in REGIMES
    assert 10 < len(row.reason) <= 200  # one sentence; figures beyond those that decided go to benchmarks/NOTES.md
    assert row.arch[0] <= row.arch[1]
    assert row.max_m is None or row.max_m > 0
    assert row.dtypes
    assert set(row.dtypes) <= set(ANY)
    assert set(row.prefill) <= set(PREFILL)
    assert row.prefill
    assert row.k_multiple % 16 == 0 or row.op in ("linear_fp8", "decode_attention")
    if "H200" in row.status:
        assert row.arch[0] <= 90 <= row.arch[1], "what ran on an H200 must serve one"
    if row.status == COMPILED:
        assert not row.arch[0] <= 90 <= row.arch[1], "what serves an H200 runs in lowering_tests/gpu"


def test_every_kernel_for_several_rows_says_whether_its_bits_depend_on_their_number():
    """A row that says nothing is one whose kernel is in test_emulated_linear.py or test_emulated_sparse_table.py, or calls others by their own rows."""
    kernels = {(row.op, row.kernel) for row in ROWS}
    assert {(op, kernel) for op, kernel in BATCH if op} <= kernels and {kernel for op, kernel in BATCH if not op} <= {kernel for _, kernel in kernels}
    silent = {row.kernel for row in ROWS if not row.batch and row.max_m != 1}
    small = {f"cuda_{size}{what}" for size in ("small", "table") for what in ("", "_glu", "_pointwise")}
    small = small - {"cuda_table"} | {"cuda_sparse_table"}  # that one serves 24 rows
    assert silent == small | {"linear, then act * up", "linear, then pointwise"}
    assert {row.max_m for row in ROWS if row.kernel in small and not row.batch} == {16}


def test_every_launcher_and_lowering_exists():
    """A row whose kernel nobody implements would be found by the first user of that architecture."""
    from fp4_inductor.kernels.linear import launch
    from fp4_inductor.kernels.linear_fp8 import launch as launch_fp8
    from fp4_inductor.kernels.linear_glu import launch as launch_glu
    from fp4_inductor.kernels.linear_w4a4 import launch as launch_w4a4
    from fp4_inductor.kernels.moe import launch as launch_moe
    from fp4_inductor.kernels.sparse_linear import launch as sparse_launch
    from fp4_inductor.lowerings import linear, linear_fp8, linear_glu, sparse_linear

    served = {
        "linear": (launch._LAUNCHERS, linear._LOWER),
        "sparse_linear": (sparse_launch.LAUNCHERS, sparse_linear.LOWER),
        "linear_fp8": (launch_fp8._LAUNCHERS, linear_fp8._LOWER),
        "linear_glu": (launch_glu._LAUNCHERS, linear_glu._LOWER),
    }
    for op, (launchers, lowered) in served.items():
        own = op in ("linear", "sparse_linear")  # the others call the operator of a csrc row straight away
        kernels = {row.kernel for row in ROWS if row.op == op and row.regime not in ("cpu", "unfused") and (own or not row.csrc)}
        assert kernels <= set(launchers)
        assert kernels <= set(lowered) | linear.CALLED
    assert {row.kernel for row in ROWS if row.op in ("moe", "sparse_moe")} == {*launch_moe._LAUNCHERS, "cpu", "by expert"}
    finishes = {
        "linear_glu": "glu",
        "linear_epilogue": "pointwise",
        "linear": "plain",
        "sparse_linear": None,
        "linear_w4a4": None,
        "moe": None,
        "sparse_moe": None,
    }
    assert all(KERNELS[row.csrc].finish == finishes[row.op] for row in ROWS if row.csrc and row.regime != "wide_fp8")
    assert {row.kernel for row in ROWS if row.op == "linear_w4a4" and row.regime != "cpu"} == set(launch_w4a4.LAUNCHERS)


def test_one_ascending_list_that_ends_without_a_limit():
    for call in CALLS:
        found = plan(call, DEFAULT)
        assert limits(found) == sorted(set(limits(found))), call
        assert found.rows[-1].max_m is None, call
        assert found.bounds == tuple(row.max_m for row in found.rows[:-1])
        for row in found.rows:
            assert row.arch[0] <= call.arch <= row.arch[1]
            assert call.dtype in row.dtypes
            assert call.prefill in row.prefill
            assert not (row.csrc and call.csrc)
            assert not row.off
            assert row.without not in {other.regime for other in found.rows}
            assert call.k % row.k_multiple == 0
            assert call.n % row.n_multiple == 0
        assert len(found.rows) + len(found.refused) == sum(row.op == call.op for row in ROWS), "every row is taken or refused"


def test_pick_at_every_bound_and_one_above():
    for call in CALLS:
        found = plan(call, DEFAULT)
        assert found.pick(1) is found.rows[0]
        for i, bound in enumerate(found.bounds):
            assert found.pick(bound) is found.rows[i], (call, bound)
            assert found.pick(bound + 1) is found.rows[i + 1], (call, bound)
        assert found.pick(1 << 31) is found.rows[-1]


def test_a_reason_names_the_value():
    for call in GPU_CALLS:
        for refused in plan(call, DEFAULT).refused:
            row, why = refused.row, refused.reason
            if not row.arch[0] <= call.arch <= row.arch[1]:
                assert f"sm_{call.arch}" in why or why == "needs a CPU"
            elif call.dtype not in row.dtypes:
                assert str(call.dtype).removeprefix("torch.") in why
            elif call.prefill not in row.prefill:
                assert f'"{call.prefill}"' in why
            elif row.csrc and call.csrc:
                assert why == call.csrc
            elif row.status == EMULATED and not (call.k % row.k_multiple or call.n % row.n_multiple or call.n < row.n[0]):
                assert why.startswith("emulated, not timed")
                assert row.kernel in why
            elif call.k % row.k_multiple:
                assert f"K = {call.k}" in why
                assert str(row.k_multiple) in why
            elif call.n % row.n_multiple:
                assert f"N = {call.n}" in why
                assert str(row.n_multiple) in why
            elif row.not_k_multiple and call.k % row.not_k_multiple == 0:
                assert why == f"K = {call.k} is a multiple of {row.not_k_multiple}"
            elif not row.n[0] <= call.n <= row.n[1]:
                assert why == f"N = {call.n} is not in {row.n[0]} to {row.n[1]}"
            elif row.max_weights is not None and call.n * call.k > row.max_weights:
                assert str(call.n * call.k) in why
                assert str(row.max_weights) in why
            elif call.n * call.k < row.min_weights:
                assert why == f"N * K = {call.n * call.k} is less than {row.min_weights}"
            else:
                assert "already serves M <=" in why or "is preferred" in why or why == f"the {row.without} regime serves this range", why


def test_cpu_has_one_row_and_gpus_refuse_it():
    for call in CALLS:
        regimes = {row.regime for row in plan(call, DEFAULT).rows}
        rounded = {"large_nvfp4"} if call.op == "linear" and call.prefill == "nvfp4" else set()
        assert regimes == {"cpu"} | rounded if call.arch == 0 else "cpu" not in regimes


@pytest.mark.parametrize("arch", [a for a in ARCHS if a])
def test_the_contract_of_prefill(arch):
    def last(dtype, prefill, n=256, k=256):
        return plan(Call("linear", arch, dtype, n, k, prefill), DEFAULT).rows[-1].regime

    fp8 = "large_fp8" if arch >= 89 else "large_dense"
    assert last(torch.bfloat16, "auto") == last(torch.bfloat16, "fp8") == fp8
    assert last(torch.bfloat16, "bf16") == "large_dense"
    assert last(torch.bfloat16, "auto", n=250) == "large_dense"  # rowwise scaled_mm wants N % 16 == 0
    assert last(torch.float16, "auto") == last(torch.float32, "auto") == "large_dense"


@pytest.mark.parametrize("arch", ARCHS)
def test_activations_are_rounded_only_where_that_is_asked_for_and_rows_are_many(arch):
    for dtype, (n, k) in itertools.product(ANY, SHAPES):
        regimes = {prefill: plan(Call("linear", arch, dtype, n, k, prefill), DEFAULT) for prefill in PREFILL}
        assert [prefill for prefill, found in regimes.items() if "large_nvfp4" in {row.regime for row in found.rows}] == ["nvfp4"]
        assert regimes["nvfp4"].pick(16).regime != "large_nvfp4"
        assert regimes["nvfp4"].pick(512).regime == "large_nvfp4"


def test_which_kernel_multiplies_codes():
    def kernel(arch, dtype=torch.bfloat16, triton=(3, 8), k=4096, **config):
        return plan(Call("linear_w4a4", arch, dtype, 4096, k, triton=triton), DispatchConfig(**config)).pick(2048).kernel

    assert {kernel(a) for a in (100, 103, 110, 120, 121)} == {"triton_w4a4"}
    assert {kernel(a) for a in (80, 86, 89, 90)} == {kernel(100, torch.float32)} == {"dequantize both + mm"}
    assert kernel(120, triton=(3, 6)) == kernel(100, triton=(3, 6)) == "triton_w4a4"
    assert kernel(121, triton=(3, 6)) == "dequantize both + mm"  # that Triton has no block-scaled MMA for sm_121
    reasons = {r.row.kernel: r.reason for r in plan(Call("linear_w4a4", 121, torch.bfloat16, 64, 64, triton=(3, 6)), DEFAULT).refused if r.row.arch[0] == 121}
    assert reasons == {"triton_w4a4": "needs Triton 3.8 or later, this is 3.6"}
    on = dict(candidates=("cuda_w4a4",))
    assert [kernel(a, **on) for a in (100, 120, 121)] == ["triton_w4a4", "cuda_w4a4", "cuda_w4a4"]
    assert kernel(120, k=4112, **on) == "triton_w4a4"


@pytest.mark.parametrize("arch", [a for a in ARCHS if a])
@pytest.mark.parametrize("dtype", HALF)
def test_few_rows_never_pay_for_a_transient_weight(arch, dtype):
    for n, k in SHAPES:
        row = plan(Call("linear", arch, dtype, n, k), DEFAULT).pick(1)
        assert row.regime == ("small" if arch == 90 and k % 64 else "gemv"), (n, k)
        assert plan(Call("linear", arch, dtype, n, k, csrc="no nvcc"), DEFAULT).pick(1).regime == "gemv"


def test_thresholds_override_rows():
    for call in GPU_CALLS:
        base = plan(call, DEFAULT)
        named = {row.regime: row for row in base.rows[:-1]}
        for regime in named:
            moved = plan(call, DispatchConfig(thresholds={regime: 30000}))
            mine = [row for row in moved.rows if row.regime == regime]
            assert mine, call
            assert mine[-1].max_m == 30000
            assert moved.pick(30000).regime == regime
            assert moved.pick(30001).max_m is None
            assert limits(moved) == sorted(set(limits(moved)))


def test_zero_switches_a_regime_off():
    for call in GPU_CALLS:
        base = plan(call, DEFAULT)
        for regime in {row.regime for row in base.rows[:-1]}:
            off = plan(call, DispatchConfig(thresholds={regime: 0}))
            assert regime not in {row.regime for row in off.rows}
            assert any(r.row.regime == regime and "DispatchConfig" in r.reason for r in off.refused)


def test_all_limited_regimes_off_leaves_the_unlimited_one():
    off = DispatchConfig(thresholds={regime: 0 for regime in REGIMES})
    for call in CALLS:
        found = plan(call, off)
        assert len(found.rows) == 1
        assert found.rows[0].max_m is None
        assert found.bounds == ()
        assert found.pick(1) is found.rows[0]


def test_an_unknown_regime_is_refused():
    with pytest.raises(ConfigError, match="jemv"):
        plan(CALLS[0], DispatchConfig(thresholds={"jemv": 4}))


def test_a_bad_threshold_is_refused_where_it_is_written():
    with pytest.raises(ConfigError, match="-1"):
        DispatchConfig(thresholds={"gemv": -1})


def test_nothing_serves_and_the_error_lists_every_reason():
    call = Call("linear", 75, torch.bfloat16, 64, 64)
    with pytest.raises(KernelError) as caught:
        plan(call, DEFAULT)
    for row in (row for row in ROWS if row.op == call.op):
        assert f"{row.kernel}: " in str(caught.value)
    assert "sm_75" in str(caught.value)


def _row(kernel, max_m, **fields):
    return Row("linear", fields.pop("regime", "mid"), kernel, (80, 129), max_m, ANY, "invented for this test", "compiled, not run", **fields)


def test_rows_that_never_get_a_turn_are_refused_with_the_reason():
    rows = (_row("a", 8), _row("b", 8), _row("last", None), _row("spare", None), _row("other op", None))
    rows = (*rows[:-1], Row("bmm", "mid", "other op", (80, 129), None, ANY, "invented for this test", "compiled, not run"))
    found = plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, rows)
    assert [row.kernel for row in found.rows] == ["a", "last"]
    assert {(r.row.kernel, r.reason) for r in found.refused} == {("b", "a already serves M <= 8"), ("spare", "last is preferred")}


def test_no_unlimited_row_is_an_error_even_if_others_accept():
    with pytest.raises(KernelError, match=r"no kernel serves fp4\.linear"):
        plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, (_row("a", 8),))


def test_divisibility_that_a_new_row_may_ask_for():
    rows = (_row("fast", 8, k_multiple=64, n_multiple=8), _row("last", None))
    for n, k, kernel in ((64, 128, "fast"), (63, 128, "last"), (64, 80, "last")):
        assert plan(Call("linear", 90, torch.bfloat16, n, k), DEFAULT, rows).pick(1).kernel == kernel


def test_fp8_products_without_a_transient_weight():
    """On sm_90, with nvcc, for M in between, where the transient weight's path serves, too."""
    fused, transient = "cuda_wide_fp8", "dequantize_fp8 + scaled_mm"
    for fields, kernels in (
        ({}, ["cuda_wide", fused, fused, transient]),
        ({"prefill": "fp8"}, ["cuda_wide", fused, fused, transient]),
        ({"prefill": "bf16"}, ["cuda_wide", "cuda_wide", "dequantize + mm", "dequantize + mm"]),
        ({"dtype": torch.float16}, ["cuda_wide", "cuda_wide", "dequantize + mm", "dequantize + mm"]),
        ({"k": 4096 + 64}, ["cuda_wide", transient, transient, transient]),
        ({"n": 250}, ["cuda_wide"] + ["dequantize + mm"] * 3),
        ({"arch": 100}, [transient] * 4),
        ({"csrc": "no nvcc"}, [transient] * 4),
    ):
        call = Call(**{"op": "linear", "arch": 90, "dtype": torch.bfloat16, "n": 4096, "k": 4096, **fields})
        assert [plan(call, DEFAULT).pick(m).kernel for m in (128, 129, 8192, 8193)] == kernels, fields
    large = plan(Call("linear", 90, torch.bfloat16, 8192, 4096), DEFAULT)
    assert [large.pick(m).kernel for m in (25, 64, 65, 128)] == ["cuda_wide", "cuda_wide", fused, fused]
    off = plan(Call("linear", 90, torch.bfloat16, 4096, 4096), DispatchConfig(thresholds={"wide_fp8": 0}))
    assert off.pick(512).kernel == transient


def test_fp8_products_of_a_sparse_weight():
    """As of a dense one; where rows of W are not in sixteens, too, as far as the kernel goes."""
    wide, fused, transient = "cuda_sparse_wide", "cuda_sparse_wide_fp8", "sparse_dequantize_fp8 + scaled_mm"
    for fields, kernels in (
        ({}, [wide, wide, fused, fused, transient]),
        ({"prefill": "fp8"}, [wide, wide, fused, fused, transient]),
        ({"prefill": "bf16"}, [wide, wide, wide, "sparse_dequantize + mm", "sparse_dequantize + mm"]),
        ({"dtype": torch.float16}, [wide, wide, wide, "sparse_dequantize + mm", "sparse_dequantize + mm"]),
        ({"n": 8192}, [wide] + [fused] * 3 + [transient]),
        ({"n": 2**15}, [fused] * 4 + [transient]),
        ({"n": 250}, [wide, wide, fused, fused, "sparse_dequantize + mm"]),
        ({"k": 4096 + 64}, ["triton_sparse_mid"] + [transient] * 4),
        ({"arch": 100}, ["triton_sparse_mid"] + [transient] * 4),
        ({"csrc": "no nvcc"}, ["triton_sparse_mid"] + [transient] * 4),
    ):
        call = Call(**{"op": "sparse_linear", "arch": 90, "dtype": torch.bfloat16, "n": 4096, "k": 4096, **fields})
        assert [plan(call, DEFAULT).pick(m).kernel for m in (64, 256, 257, 8192, 8193)] == kernels, fields
    off = plan(Call("sparse_linear", 90, torch.bfloat16, 4096, 4096), DispatchConfig(thresholds={"wide_fp8": 0}))
    assert off.pick(512).kernel == transient


def test_a_stand_in_serves_what_the_small_kernel_cannot():
    """Without nvcc, or with a K that no CUDA kernel takes, M = 2 to 4 stays on the GEMV."""
    gemv, small, any_k, table = "triton_gemv", "cuda_small", "cuda_small_any_k", "cuda_table"
    for arch, csrc, k, kernels in (
        (90, "", 4096, [gemv, table, table, "cuda_wide"]),
        (90, "", 2048, [gemv, table, table, small]),
        (90, "", 4032, [gemv, small, small, small]),
        (90, "no nvcc", 4096, [gemv, gemv, gemv, "triton_mid"]),
        (90, "", 4096 + 16, [any_k] * 4),
        (90, "no nvcc", 4096 + 16, [gemv, gemv, gemv, "triton_mid"]),
        (100, "", 4096 + 32, [gemv, gemv, gemv, "triton_mid"]),
    ):
        found = plan(Call("linear", arch, torch.bfloat16, 4096, k, csrc=csrc), DEFAULT)
        assert [found.pick(m).kernel for m in (1, 2, 4, 32)] == kernels, (arch, csrc, k)


def test_one_row_of_a_sparse_weight_goes_by_its_size():
    """The GEMV is ahead for small weights, the CUDA kernel for large ones; without nvcc there is only the GEMV."""
    gemv, mid = "triton_sparse_gemv", "triton_sparse_mid"
    small, table, wide = (f"cuda_sparse_{size}" for size in ("small", "table", "wide"))
    for arch, csrc, n, kernels in (
        (90, "", 4096, [table, table, wide, wide]),
        (90, "", 8192, [table, table, wide, wide]),
        (90, "", 4160, [gemv, small, small, mid]),
        (90, "no nvcc", 8192, [gemv, mid, mid, mid]),
        (80, "", 8192, [gemv, small, mid, mid]),
        (120, "", 8192, [gemv, small, mid, mid]),
    ):
        found = plan(Call("sparse_linear", arch, torch.bfloat16, n, n, csrc=csrc), DEFAULT)
        assert [found.pick(m).kernel for m in (1, 2, 32, 33)] == kernels, (arch, csrc, n)
    for n, k, kernel in (
        (4096, 4096, table),  # 2^24 weights
        (4096, 4096 - 256, gemv),
        (4096, 4096 + 64, gemv),
        (8192, 4096, table),
        (8192, 4096 + 64, gemv),
        (8, 2**22, small),  # fewer rows than the table's kernel takes
    ):
        assert plan(Call("sparse_linear", 90, torch.bfloat16, n, k), DEFAULT).pick(1).kernel == kernel, (n, k)
    off = plan(Call("sparse_linear", 90, torch.bfloat16, 8192, 8192), DispatchConfig(thresholds={"small": 0}))
    assert off.pick(1).kernel == gemv


# Kernels that do not exist, off as one that lost is.
LOSER = Row("linear", "mid", "cuda_loser", (90, 90), 128, HALF, "slower", LOST)
LOSER_GLU = replace(LOSER, op="linear_glu", kernel="cuda_loser_glu", min_m=17)


def test_a_candidate_serves_only_when_it_is_switched_on_and_then_its_whole_regime():
    rows = (LOSER, *ROWS)
    call = Call("linear", 90, torch.bfloat16, 4096, 4096)
    [why] = [r.reason for r in plan(call, DEFAULT, rows).refused if r.row is LOSER]
    assert why == 'measured, off (slower): switch it on with fp4_inductor.dispatch(candidates=("cuda_loser",))'
    on = plan(call, DispatchConfig(candidates=("cuda_loser",)), rows)
    assert [on.pick(m).kernel for m in (1, 32, 33, 128, 129)] == ["triton_gemv", *["cuda_loser"] * 3, "cuda_wide_fp8"]
    assert ("triton_mid", "the candidate cuda_loser is switched on in its place") in {(r.row.kernel, r.reason) for r in on.refused}
    alone = plan(call, DispatchConfig(candidates=("cuda_loser",), thresholds={"small": 0, "wide": 0, "mid": 700}), rows)
    assert [alone.pick(m).kernel for m in (5, 700)] == ["cuda_loser", "cuda_loser"]
    # where it cannot run it takes nothing from the others
    elsewhere = plan(Call("linear", 89, torch.bfloat16, 4096, 4096), DispatchConfig(candidates=("cuda_loser",)), rows)
    assert elsewhere.pick(33).kernel == "triton_mid"


def test_a_candidate_that_is_none_is_refused():
    for name in ("cuda_w4a5", "cuda_small"):
        with pytest.raises(ConfigError, match=name):
            plan(CALLS[0], DispatchConfig(candidates=(name,)))
    with pytest.raises(ConfigError, match="cuda_w4a4"):
        DispatchConfig(candidates="cuda_w4a4")
    assert DispatchConfig(candidates=["b", "a"]) == DispatchConfig(candidates=("a", "b"))


def test_few_rows_stay_with_the_row_without_a_limit():
    """A kernel of fp4.linear_glu for M >= 2 or 17 does not take what fp4.linear's own rows serve better."""
    fused, apart = ["cuda_table_glu", LOSER_GLU.kernel, "cuda_wide_glu"], "linear, then act * up"
    for names, want in (
        ([], {1: apart, 2: fused[0], 16: fused[0], 17: fused[2], 128: fused[2], 129: apart}),
        (fused[1:2], {1: apart, 2: fused[0], 16: fused[0], 17: fused[1], 128: fused[1], 129: apart}),
        (["triton_gemv_glu", fused[1]], {1: "triton_gemv_glu", 2: fused[0], 17: fused[1], 129: apart}),
    ):
        found = plan(Call("linear_glu", 90, torch.bfloat16, 4096, 4096), DispatchConfig(candidates=tuple(names)), (LOSER_GLU, *ROWS))
        assert {m: found.pick(m).kernel for m in want} == want, names
        assert limits(found) == sorted(set(limits(found))) and found.bounds == tuple(row.max_m for row in found.rows[:-1])
    with_gaps = DispatchConfig(candidates=(LOSER_GLU.kernel,), thresholds={"small": 0})
    found = plan(Call("linear_glu", 90, torch.bfloat16, 4096, 4096), with_gaps, (LOSER_GLU, *ROWS))
    assert {m: found.pick(m).kernel for m in (1, 16, 17, 128, 129)} == {1: apart, 16: apart, 17: fused[1], 128: fused[1], 129: apart}
    then = plan(Call("linear_epilogue", 90, torch.bfloat16, 4096, 4096), DEFAULT)
    assert [(row.kernel, row.max_m) for row in then.rows] == [
        ("linear, then pointwise", 1), ("cuda_table_pointwise", 16), ("cuda_wide_pointwise", 128), ("linear, then pointwise", None),
    ]  # fmt: skip
    ended = plan(Call("linear_glu", 90, torch.bfloat16, 4096, 4096), DispatchConfig(candidates=(LOSER_GLU.kernel,), thresholds={"mid": 16}), (LOSER_GLU, *ROWS))
    assert [row.kernel for row in ended.rows] == [apart, fused[0], fused[2], apart]
    assert any("serves M >= 17" in r.reason for r in ended.refused)
