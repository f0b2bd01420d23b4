"""select.plan: pure, so every architecture is tested anywhere. What it chooses over a grid of calls is in golden_plans.txt."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fp4_inductor.config import DispatchConfig, dispatch
from fp4_inductor.errors import ConfigError, KernelError
from fp4_inductor.kernels import build, forms, host, registry
from fp4_inductor.kernels.csrc import LIBRARIES
from fp4_inductor.kernels.kernel import ANY, COMPILED, EMULATED, HALF, LOST, MEASURED_H100, Kernel, On
from fp4_inductor.kernels.select import ONE, Call, csrc_names, plan

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


@pytest.mark.parametrize("kernel", registry.kernels(), ids=lambda kernel: f"{kernel.op}-{kernel.name}")
def test_every_kernel_is_complete(kernel):
    assert kernel.regime in registry.regimes()
    assert set(kernel.dtypes) <= set(ANY) and kernel.dtypes
    assert set(kernel.prefill) <= set(PREFILL) and kernel.prefill
    assert kernel.k_multiple % 16 == 0 or kernel.op in ("linear_fp8", "decode_attention", "cached_attention", "paged_attention", "router")
    assert kernel.on
    for on in kernel.on:
        assert 10 < len(on.why) <= 200  # one sentence; figures beyond those that decided go to benchmarks/NOTES.md
        assert on.first <= on.last
        if "H200" in on.status:
            assert on.first <= 90 <= on.last, "what ran on an H200 must serve one"
        if on.status == COMPILED:
            assert not on.first <= 90 <= on.last, "what serves an H200 runs in lowering_tests/gpu"


def test_every_kernel_for_several_rows_says_whether_its_bits_depend_on_their_number():
    """One that says nothing is in test_emulated_sparse_table.py, or calls others by their own choice, or serves one row."""
    silent = {kernel.name for kernel in registry.kernels() if not kernel.batch[1]}
    one_row = {"triton_sparse_gemv", "triton_gemv_fp8", "triton_gemv_glu", "cuda_gemv", "cuda_gemv_pointwise", "cuda_gemv_glu", "cuda_gemv_chain"}
    in_steps = {"linear, then act * up", "linear, then pointwise", "one by one", "linear, sum, squares", "scaled, then linear", "scaled, then glu"}
    assert silent == {"cuda_sparse_table"} | in_steps | one_row
    for call in CALLS:
        for row in plan(call, DEFAULT).rows:
            assert bool(row.batch) == bool(row.implementation.batch[1] and (row.max_m is None or row.max_m > row.implementation.batch[0]))


def test_every_kernel_has_a_form_that_runs():
    """One that nobody implements would be found by the first user of that architecture."""
    of_op = {"linear_glu": "glu", "linear_epilogue": "pointwise", "linear_residual_squares": "pointwise", "rms_scaled_linear_glu": "glu"}
    for kernel in registry.kernels():
        if kernel.form is None:  # a CPU's op chooses itself, the two steps of a fused op are other ops
            assert kernel.regime in ("cpu", "unfused")
        elif isinstance(kernel.form, forms.Triton | forms.Launches):
            assert callable(kernel.form.source()) or hasattr(kernel.form.source(), "arg_names")
        if kernel.library:
            assert LIBRARIES[kernel.csrc] == kernel.library and (build.csrc_dir() / kernel.library.source).exists()
            assert kernel.library.finish in (None, of_op.get(kernel.op, "plain"))
    assert {library.name for library in LIBRARIES.values()} == set(LIBRARIES)


def test_one_ascending_list_that_ends_without_a_limit():
    for call in CALLS:
        found = plan(call, DEFAULT)
        assert limits(found) == sorted(set(limits(found))), call
        assert found.rows[-1].max_m is None, call
        assert found.bounds == tuple(row.max_m for row in found.rows[:-1])
        for row in found.rows:
            assert row.implementation.refusal(call) is None
            assert not row.on.off
        served = {row.kernel for row in found.rows}
        assert served.isdisjoint(refused.kernel.name for refused in found.refused)
        assert len(served) + len(found.refused) == len(registry.kernels(call.op)), "every kernel is taken or refused"


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
            kernel, why = refused.kernel, refused.reason
            on = kernel.at(call.arch)
            if on is None:
                assert f"sm_{call.arch}" in why or why == "needs a CPU"
            elif call.dtype not in kernel.dtypes:
                assert str(call.dtype).removeprefix("torch.") in why
            elif call.prefill not in kernel.prefill:
                assert f'"{call.prefill}"' in why
            elif kernel.csrc and call.csrc:
                assert why == call.csrc
            elif call.k % kernel.k_multiple:
                assert why == f"K = {call.k} is not a multiple of {kernel.k_multiple}"
            elif call.n % kernel.n_multiple:
                assert why == f"N = {call.n} is not a multiple of {kernel.n_multiple}"
            elif call.n < kernel.least_n:
                assert why == f"N = {call.n} is less than {kernel.least_n}"
            elif on.status == EMULATED:
                assert why.startswith("emulated, not timed") and kernel.name in why
            elif on.status == LOST:
                assert why.startswith(f"measured, off ({on.why})") and kernel.name in why
            else:
                assert why.startswith("kernels/choose/") and why.endswith(f"for N = {call.n}, K = {call.k}"), why


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
    reasons = {
        r.kernel.name: r.reason
        for r in plan(Call("linear_w4a4", 121, torch.bfloat16, 64, 64, triton=(3, 6)), DEFAULT).refused
        if r.kernel.name == "triton_w4a4"
    }
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
            assert any(r.kernel.regime == regime and "DispatchConfig" in r.reason for r in off.refused)


def test_all_limited_regimes_off_leaves_the_unlimited_one():
    off = DispatchConfig(thresholds={regime: 0 for regime in registry.regimes()})
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
    for kernel in registry.kernels(call.op):
        assert f"{kernel.name}: " in str(caught.value)
    assert "sm_75" in str(caught.value)


def _kernel(name, until, **fields):
    on = On(80, 129, fields.pop("status", COMPILED), "invented for this test")
    return Kernel(fields.pop("op", "linear"), name, fields.pop("regime", "mid"), (on,), ANY, until=lambda call: until, **fields)


def test_kernels_that_never_get_a_turn_are_refused_with_the_reason():
    kernels = (_kernel("a", 8), _kernel("b", 8), _kernel("last", None), _kernel("spare", None), _kernel("other op", None, op="bmm"))
    found = plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, kernels)
    assert [row.kernel for row in found.rows] == ["a", "last"]
    preferred = "kernels/choose/sm90.py prefers a, last for N = 64, K = 64"
    assert {(r.kernel.name, r.reason) for r in found.refused} == {("b", preferred), ("spare", preferred)}


def test_no_kernel_without_a_limit_is_an_error_even_if_others_accept():
    with pytest.raises(KernelError, match=r"no kernel serves fp4\.linear"):
        plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, (_kernel("a", 8),))


def test_divisibility_that_a_new_kernel_may_ask_for():
    kernels = (_kernel("fast", 8, k_multiple=64, n_multiple=8), _kernel("last", None))
    for n, k, name in ((64, 128, "fast"), (63, 128, "last"), (64, 80, "last")):
        assert plan(Call("linear", 90, torch.bfloat16, n, k), DEFAULT, kernels).pick(1).kernel == name


def test_neighbouring_ranges_of_one_kernel_are_one_unless_its_tile_follows_the_bound():
    last, gemv = _kernel("last", None), registry.named("linear")["triton_gemv"]
    found = plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, (last, gemv))
    assert [(row.kernel, row.max_m) for row in found.rows] == [("triton_gemv", 1), ("triton_gemv", 4), ("last", None)]
    one = plan(Call("linear", 90, torch.bfloat16, 64, 64), DEFAULT, (last, replace(gemv, tile_by_bound=False)))
    assert [(row.kernel, row.max_m) for row in one.rows] == [("triton_gemv", 4), ("last", None)]


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
    assert [large.pick(m).kernel for m in (33, 64, 65, 128)] == ["cuda_wide", "cuda_wide", fused, fused]
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
    """Without nvcc, or with a K that no CUDA kernel takes, M = 1 to 4 stays on the Triton GEMV."""
    gemv, own, small, any_k, table = "triton_gemv", "cuda_gemv", "cuda_small", "cuda_small_any_k", "cuda_table"
    for arch, csrc, k, kernels in (
        (90, "", 4096, [own, table, table, table]),
        (90, "", 2048, [own, table, table, table]),
        (90, "", 4032, [own, small, small, small]),
        (90, "", 2**15 + 64, [gemv, small, small, small]),
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


def test_a_candidate_serves_only_when_it_is_switched_on():
    loser = Kernel("linear", "cuda_loser", "mid", (On(90, 90, LOST, "slower"),), HALF, until=lambda call: 128)
    kernels = (loser, *registry.kernels())
    call = Call("linear", 90, torch.bfloat16, 4096, 4096)
    [why] = [r.reason for r in plan(call, DEFAULT, kernels).refused if r.kernel is loser]
    assert why == 'measured, off (slower): switch it on with fp4_inductor.dispatch(candidates=("cuda_loser",))'
    with pytest.raises(ConfigError, match="cuda_loser"):
        plan(call, DispatchConfig(candidates=("cuda_loser",)))  # registered nowhere
    glu = Call("linear_glu", 90, torch.bfloat16, 4096, 4096)
    on = plan(glu, DispatchConfig(candidates=("triton_gemv_glu",)))
    assert [(row.kernel, row.max_m) for row in on.rows][:2] == [("triton_gemv_glu", 1), ("cuda_table_glu", 32)]
    # where it cannot run it takes nothing from the others
    elsewhere = plan(Call("linear_w4a4", 90, torch.bfloat16, 4096, 4096), DispatchConfig(candidates=("cuda_w4a4",)))
    assert elsewhere.pick(33).kernel == "dequantize both + mm"


def test_one_row_of_an_eager_call_stays_with_triton():
    """Nothing begins early there, and without that cuda_gemv is behind. Other rows have the same kernels as in a compiled graph."""
    for op in ("linear", "linear_glu", "linear_epilogue"):
        compiled, eager = (plan(Call(op, 90, torch.bfloat16, 4096, 4096, eager=eager), DEFAULT) for eager in (False, True))
        assert compiled.pick(1).kernel.startswith("cuda_gemv") and compiled.pick(1).status == MEASURED_H100
        assert eager.pick(1).kernel == dict(linear="triton_gemv", linear_glu="linear, then act * up", linear_epilogue="linear, then pointwise")[op]
        assert [eager.pick(m).kernel for m in (2, 16, 64, 300)] == [compiled.pick(m).kernel for m in (2, 16, 64, 300)]
    assert host._plan(("linear", torch.device("cpu"), torch.bfloat16, 64, 64, "auto", (), ONE), DEFAULT).call.eager


def test_one_row_by_cuda_where_it_is_switched_on():
    """A threshold that asks for more rows than the kernel takes does not get them from it."""
    names = {"linear": "cuda_gemv", "linear_glu": "cuda_gemv_glu", "linear_epilogue": "cuda_gemv_pointwise"}
    for op, name in names.items():
        for arch in (80, 86, 90, 100, 120):
            call = Call(op, arch, torch.bfloat16, 4096, 4096)
            for thresholds in ({}, {"gemv": 4}):
                rows = plan(call, DispatchConfig(candidates=tuple(names.values()), thresholds=thresholds)).rows
                assert (rows[0].kernel, rows[0].max_m) == (name, 1) and all(row.kernel != name for row in rows[1:]), (op, arch)
            off = plan(call, DispatchConfig(candidates=tuple(names.values()), thresholds={"gemv": 0})).rows
            assert all(row.regime != "gemv" for row in off)
    long = Call("linear", 90, torch.bfloat16, 4096, 32768 + 64)
    [why] = [r.reason for r in plan(long, DispatchConfig(candidates=("cuda_gemv",))).refused if r.kernel.name == "cuda_gemv"]
    assert why == "K = 32832 is more than 32768"


def test_a_candidate_that_is_none_is_refused():
    for name in ("cuda_w4a5", "cuda_small"):
        with pytest.raises(ConfigError, match=name):
            plan(CALLS[0], DispatchConfig(candidates=(name,)))
    with pytest.raises(ConfigError, match="cuda_w4a4"):
        DispatchConfig(candidates="cuda_w4a4")
    assert DispatchConfig(candidates=["b", "a"]) == DispatchConfig(candidates=("a", "b"))


def test_one_row_has_its_own_kernels_where_an_epilogue_is_fused():
    apart = "linear, then act * up"
    found = plan(Call("linear_glu", 90, torch.bfloat16, 4096, 4096), DEFAULT)
    assert [(row.kernel, row.max_m) for row in found.rows] == [("cuda_gemv_glu", 1), ("cuda_table_glu", 32), ("cuda_wide_glu", 128), (apart, None)]
    without = plan(Call("linear_glu", 90, torch.bfloat16, 4096, 4096), DispatchConfig(thresholds={"small": 0, "gemv": 0}))
    assert [(row.kernel, row.max_m) for row in without.rows] == [(apart, 1), ("cuda_wide_glu", 128), (apart, None)]
    then = plan(Call("linear_epilogue", 90, torch.bfloat16, 4096, 4096), DEFAULT)
    assert [(row.kernel, row.max_m) for row in then.rows] == [
        ("cuda_gemv_pointwise", 1), ("cuda_table_pointwise", 32), ("cuda_wide_pointwise", 128), ("linear, then pointwise", None),
    ]  # fmt: skip


def test_a_chain_has_one_row():
    call = Call("linear_chain", 90, torch.bfloat16, 4096, 4096)
    for config in (DEFAULT, DispatchConfig(thresholds={"chain": 4})):
        assert [(row.kernel, row.max_m) for row in plan(call, config).rows] == [("cuda_gemv_chain", 1), ("one by one", None)]
    off = DispatchConfig(thresholds={"chain": 0})
    others = [replace(call, arch=80), replace(call, k=4080), replace(call, k=16448), replace(call, n=57345), replace(call, csrc="no nvcc")]
    for apart in (plan(call, off), *(plan(other, DEFAULT) for other in others)):
        assert [row.kernel for row in apart.rows] == ["one by one"]


def test_libraries_of_candidates_are_compiled_where_they_are_switched_on():
    chain, glu = Call("linear_chain", 90, torch.bfloat16, 4096, 4096), Call("linear_glu", 80, torch.bfloat16, 8192, 4096)
    assert csrc_names(chain) == ["linear_chain"] and csrc_names(glu) == ["linear_small"]
    with dispatch(candidates=("cuda_gemv_glu",)):
        assert csrc_names(glu) == ["linear_gemv_glu"]
