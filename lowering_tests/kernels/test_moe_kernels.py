"""The MoE kernels without a GPU: numerics in Triton's interpreter, machine code for every architecture, which row serves which call."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.config import DispatchConfig
from fp4_inductor.kernels.moe import decode, many
from fp4_inductor.kernels.select import Call, moe_form, plan
from fp4_inductor.ops.activation import Activation
from lowering_tests.kernels import aot, moe_aot
from lowering_tests.kernels.test_aot import UNPACK, assert_fits, global_atomics, tensor_core_instructions
from lowering_tests.own_process import cases_of

GPT_OSS = Activation("swiglu_oai", 1.702, 7.0, True)
ARCHITECTURES = (80, 90, 100, 120)
DOZEN = 12  # warps that an SM holds at least


def assert_operands_stay_in_their_threads(done):
    """Barriers belong to the sums and the store alone."""
    assert done.count("BAR") <= 8


@pytest.mark.parametrize(("every", "many"), [("", 12), pytest.param("1", 22, marks=pytest.mark.slow)], ids=["some", "every"])
def test_in_the_interpreter(every, many, monkeypatch):
    monkeypatch.setenv("FP4_EVERY_CASE", every)
    cases = cases_of(Path(__file__).with_name("interpreted_moe.py"))
    kinds = Counter(c["case"].split()[0] for c in cases)
    assert kinds == {"decode": 48, "grouped": 46, "route": 5, "apart": 8, "many": many, "product": 3, "two": 2}, kinds


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_decode_up(cc):
    done, warps = moe_aot.decode_up(cc, "qwen3_30b")
    assert_fits(done, warps, cc, blocks=DOZEN // warps or 1, older=0)
    assert tensor_core_instructions(done) == 0
    assert not global_atomics(done)
    assert (done.count(UNPACK) > 0) == (cc >= 89)
    assert any(op.endswith(".128") and ".EF" in op for op in done.opcodes())
    assert_operands_stay_in_their_threads(done)


@pytest.mark.parametrize(
    ("layer", "act", "options"), [("gpt_oss", GPT_OSS, {"biased": True}), ("mixtral", Activation("relu2"), {"gated": False, "mapped": True})]
)
def test_decode_up_in_other_forms(layer, act, options):
    done, warps = moe_aot.decode_up(90, layer, act, **options)
    assert_fits(done, warps, 90, blocks=DOZEN // warps or 1)
    assert any(op.endswith(".128") and ".EF" in op for op in done.opcodes())


@pytest.mark.parametrize(("cc", "layer"), [
    (80, "gpt_oss"), (90, "qwen3_30b"), (100, "qwen3_30b"), (120, "qwen3_30b"),
    *[pytest.param(cc, layer, marks=pytest.mark.slow) for cc, layer in ((90, "mixtral"), (100, "gpt_oss"), (120, "mixtral"))],
])  # fmt: skip
def test_decode_down(cc, layer):
    done, warps = moe_aot.decode_down(cc, layer, biased=layer == "gpt_oss")
    assert_fits(done, warps, cc, blocks=DOZEN // warps or 1, older=0)
    assert not global_atomics(done)
    assert any(op.endswith(".128") and ".EF" in op for op in done.opcodes())
    assert_operands_stay_in_their_threads(done)


@pytest.mark.parametrize(("cc", "pairs"), [(80, 256), pytest.param(90, 256, marks=pytest.mark.slow), (90, 8192), (100, 8192), (120, 2048)])
def test_grouped(cc, pairs):
    for done, warps in (moe_aot.grouped_up(cc, "qwen3_30b", pairs), moe_aot.grouped_down(cc, "qwen3_30b", pairs)):
        assert_fits(done, warps, cc)
        assert tensor_core_instructions(done) > 0, done.opcodes()
        assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "layer"), [
    (80, "qwen3_30b"), (90, "qwen3_30b"), (aot.GB10, "qwen3_30b"),
    *[pytest.param(cc, layer, marks=pytest.mark.slow) for cc, layer in ((80, "gpt_oss"), (90, "mixtral"), (aot.GB10, "qwen3_next"))],
])  # fmt: skip
def test_sparse_decode(cc, layer):
    up, down = (f(cc, layer, biased=layer == "gpt_oss", sparse=True) for f in (moe_aot.decode_up, moe_aot.decode_down))
    for done, warps in (up, down):
        assert_fits(done, warps, cc, blocks=(DOZEN if cc >= 89 else 8) // warps or 1, older=0)
        assert tensor_core_instructions(done) == 0
        assert not global_atomics(done)
        assert done.count("PRMT") > 0  # the kept activations are gathered
        assert any(op.endswith(".64") and ".EF" in op for op in done.opcodes())
        assert_operands_stay_in_their_threads(done)


@pytest.mark.parametrize("layer", ["qwen3_30b", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_sparse_decode_takes_about_as_many_instructions(layer):
    """What fewer codes save, the gathered activations cost; the bytes remain: 22% fewer."""
    for f in (moe_aot.decode_up, moe_aot.decode_down):
        dense, sparse = (sum(f(90, layer, sparse=sparse)[0].opcodes().values()) for sparse in (False, True))
        assert sparse < 1.12 * dense


@pytest.mark.parametrize(("cc", "pairs"), [(80, 256), (90, 8192)])
def test_sparse_grouped(cc, pairs):
    for f in (moe_aot.grouped_up, moe_aot.grouped_down):
        done, warps = f(cc, "qwen3_30b", pairs, sparse=True)
        assert_fits(done, warps, cc)
        assert tensor_core_instructions(done) > 0, done.opcodes()
        assert not global_atomics(done)


UP = [(moe_aot.decode_up, ("qwen3_30b", GPT_OSS)), (moe_aot.grouped_up, ("qwen3_30b", 256))]
UP += [pytest.param(moe_aot.decode_up, at, marks=pytest.mark.slow) for at in (("gpt_oss", GPT_OSS), ("qwen3_30b",))]


@pytest.mark.parametrize(("compile_one", "at"), UP)
@pytest.mark.parametrize("sparse", [False, True])
def test_two_scales_cost_no_registers(compile_one, at, sparse):
    """One of gate and one of up: the measured kernels with another last line."""
    (one, warps), (two, _) = (compile_one(90, *at, sparse=sparse, two=two) for two in (False, True))
    assert_fits(two, warps, 90)
    assert two.registers <= one.registers + 8


@pytest.mark.parametrize("cc", [80, 90])
def test_route_and_combine(cc):
    for done, warps in (moe_aot.route(cc, mapped=True), moe_aot.route(cc, pairs=32768), moe_aot.combine(cc, is_sorted=True)):
        assert_fits(done, warps, cc)
        assert not global_atomics(done)


@pytest.mark.parametrize(("cc", "fp8", "layer"), [
    *[(cc, fp8, "qwen3_30b") for cc, fp8 in ((80, False), (90, True), (90, False))], (90, True, "gpt_oss"),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in (
        (80, False, "mixtral"), (90, True, "mixtral"), (90, False, "mixtral"), (80, False, "gpt_oss"), (90, False, "gpt_oss"),
    )],
])  # fmt: skip
def test_rows_of_many_tokens(cc, fp8, layer):
    """Wide loads; one exchange between the warps of a program, for the maximum of its row."""
    act = GPT_OSS if layer == "gpt_oss" else Activation()
    for done, warps in (moe_aot.many_in(cc, layer, fp8), moe_aot.many_between(cc, layer, fp8, act, biased=layer == "gpt_oss")):
        assert_fits(done, warps, cc, blocks=32 // warps)
        assert not global_atomics(done)
        assert done.count("LDG.E.128") > 0
        if layer != "gpt_oss":  # gate and up side by side are taken apart through shared memory
            assert done.shared <= 4 * warps * fp8
        if fp8:
            assert done.count("F2FP.SATFINITE.E4M3") > 0


@pytest.mark.parametrize(("cc", "instruction"), [(90, "QGMMA"), (100, "UTC")])
@pytest.mark.parametrize(("pairs", "of_rows"), [pytest.param(4096, False, marks=pytest.mark.slow), (32768, False), (4096, True)])
def test_products_of_tiles(cc, instruction, pairs, of_rows):
    done, warps = moe_aot.many_product(cc, "qwen3_30b", pairs, of_rows)
    assert_fits(done, warps, cc)
    assert done.count(instruction) > 0, done.opcodes()
    assert done.count("UTMALDG") > 0
    assert not global_atomics(done)


# --- selection ---------------------------------------------------------------------------------------------------


def kernels(arch, dtype, experts, *pairs, op="moe", **fields):
    options = plan(Call(op, arch, dtype, 2048, 2048, experts=experts, **fields), DispatchConfig())
    return [options.pick(p).kernel for p in pairs]


@pytest.mark.parametrize(("experts", "pairs", "kernel"), [
    (128, 8, "triton_moe_decode"), (128, 384, "triton_moe_decode"), (128, 385, "triton_moe_grouped"), (128, 4096, "triton_moe_grouped"),
    (128, 4097, "dequantize_fp8 + triton_grouped_fp8"), (8, 2, "triton_moe_decode"), (8, 24, "triton_moe_decode"), (8, 25, "triton_moe_grouped"),
    (512, 256, "triton_moe_decode"), (1, 4, "triton_moe_decode"), (1, 5, "triton_moe_grouped"), (32, 16, "triton_moe_decode"),
])  # fmt: skip
def test_pairs_against_experts_decide(experts, pairs, kernel):
    assert kernels(90, torch.bfloat16, experts, pairs, csrc=NO_NVCC) == [kernel]


NO_NVCC = "no CUDA compiler"


@pytest.mark.parametrize(("experts", "pairs", "kernel"), [
    (128, 76, "triton_moe_decode"), (128, 77, "cuda_moe_wide"), (128, 1792, "cuda_moe_wide"), (128, 1793, "cuda_moe_wide_fp8"),
    (128, 2**20, "cuda_moe_wide_fp8"), (128, 2**20 + 1, "dequantize_fp8 + triton_grouped_fp8"),
    (8, 4, "triton_moe_decode"), (8, 5, "cuda_moe_wide"), (1, 4, "triton_moe_decode"), (1, 14, "cuda_moe_wide"), (1, 15, "cuda_moe_wide_fp8"),
])  # fmt: skip
def test_pairs_against_experts_decide_where_the_cuda_kernel_is(experts, pairs, kernel):
    assert kernels(90, torch.bfloat16, experts, pairs) == [kernel]
    most = max(192, 192 * experts)
    exact = kernel if kernel == "triton_moe_decode" else "cuda_moe_wide" if pairs <= most else "dequantize + grouped_mm"
    assert kernels(90, torch.bfloat16, experts, pairs, prefill="bf16") == [exact]


def test_where_k_is_no_multiple_of_256_fp8_takes_over_later():
    assert gpt_oss(32 * 24) == "cuda_moe_wide" and gpt_oss(32 * 24 + 1) == "cuda_moe_wide_fp8"


def gpt_oss(pairs: int) -> str:
    return plan(Call("moe", 90, torch.bfloat16, 2880, 2880, experts=32), DispatchConfig()).pick(pairs).kernel


def test_the_table_kernel_serves_large_experts():
    """It takes the decode regime's place there, but for what it does not serve, and for one token or two of gpt-oss."""
    for op, kernel, other, most in (
        ("moe", "cuda_moe_table", "triton_moe_decode", 32),
        ("sparse_moe", "cuda_sparse_moe_table", "triton_sparse_moe_decode", 96),
    ):
        call = Call(op, 90, torch.bfloat16, 4096, 4096, experts=32)
        assert [plan(call, DispatchConfig()).pick(pairs).kernel == kernel for pairs in (1, most, most + 1)] == [True, True, False]
        for fields in (dict(form=("no gate",)), dict(dtype=torch.float16), dict(arch=80), dict(csrc=NO_NVCC), dict(n=2048, k=2048)):
            assert plan(replace(call, **fields), DispatchConfig()).pick(8).kernel == other
    assert [gpt_oss(pairs) for pairs in (8, 9, 32, 33)] == ["triton_moe_decode", "cuda_moe_table", "cuda_moe_table", "cuda_moe_wide"]
    plain = dict(activation="silu", gated=True, inner=704, experts=128, on_input=False, biases=())
    assert moe_form(**plain) == () and moe_form(**plain, op="sparse_moe") == ("I = 704, no multiple of 256",)


def test_the_cuda_kernel_says_what_it_does_not_take():
    plain = dict(activation="silu", gated=True, inner=768, experts=128, on_input=False, biases=(torch.bfloat16,))
    assert moe_form(**plain) == moe_form(**{**plain, "activation": "swiglu_oai", "biases": ()}) == ()
    for changed, words in (
        (dict(activation="gelu"), 'activation="gelu"'),
        (dict(activation="relu2", gated=False), 'activation="relu2", no gate'),
        (dict(inner=736), "I = 736, no multiple of 64"),
        (dict(experts=1025), "1025 experts, more than 1024"),
        (dict(on_input=True), "weight_on_input"),
        (dict(biases=(torch.bfloat16, torch.float32)), "biases that are not bfloat16"),
    ):
        form = moe_form(**{**plain, **changed})
        options = plan(Call("moe", 90, torch.bfloat16, 2048, 2048, experts=128, form=form), DispatchConfig())
        assert {r.reason for r in options.refused if r.kernel.name.startswith("cuda_moe_wide") and r.reason != 'prefill="auto"'} == {f"does not take {words}"}
        assert [options.pick(pairs).kernel for pairs in (384, 385, 4097)] == ["triton_moe_decode", "triton_moe_grouped", "dequantize_fp8 + triton_grouped_fp8"]
    for fields in (dict(csrc=NO_NVCC), dict(k=2080), dict(n=2052)):
        call = Call(**{**dict(op="moe", arch=90, dtype=torch.bfloat16, n=2048, k=2048, experts=128), **fields})
        assert plan(call, DispatchConfig()).pick(500).kernel == "triton_moe_grouped"


def test_what_other_machines_and_dtypes_take():
    many = 10**6
    assert kernels(80, torch.bfloat16, 128, 8, many) == ["triton_moe_decode", "dequantize + grouped_mm"]
    assert kernels(90, torch.bfloat16, 128, many, prefill="bf16") == ["dequantize + grouped_mm"]
    assert kernels(90, torch.float16, 128, 8, many) == ["triton_moe_decode", "triton_moe_grouped"]
    assert kernels(90, torch.float32, 128, 8, many) == ["by expert", "by expert"]
    assert kernels(0, torch.float32, 128, 8, many) == ["cpu", "cpu"]


@pytest.mark.parametrize(("arch", "dtype"), [(90, torch.bfloat16), (80, torch.bfloat16), (90, torch.float16), (120, torch.float32), (0, torch.float32)])
def test_sparse_experts_take_the_same_regimes(arch, dtype):
    pairs = (1, 8, 384, 385, 4096, 4097, 10**6)
    dense, sparse = (kernels(arch, dtype, 128, *pairs, op=op, csrc=NO_NVCC) for op in ("moe", "sparse_moe"))
    own = {k: k.replace("triton_moe", "triton_sparse_moe").replace("dequantize", "sparse_dequantize") for k in set(dense)}
    names = {**own, "cpu": "cpu", "by expert": "by expert"}
    assert sparse == [names[k] for k in dense]


def test_thresholds_override_both_bounds():
    call = Call("moe", 90, torch.bfloat16, 2048, 2048, experts=128)
    options = plan(call, DispatchConfig(thresholds={"decode": 3, "wide": 0, "wide_fp8": 0, "grouped": 0}))
    assert [options.pick(p).kernel for p in (3, 4)] == ["triton_moe_decode", "dequantize_fp8 + triton_grouped_fp8"]


@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8, 10, 64])
@pytest.mark.parametrize("k", [16, 32, 48, 512, 736, 768, 2048, 2880, 4096, 14336])
def test_decode_tiles(k, top_k, tokens):
    up, down = decode.up_tile(k, tokens), decode.down_tile(k, top_k, tokens)
    assert up.block_n % 16 == 0  # whole scale blocks of h
    for c in (up, down):
        assert 1024 * c.num_warps == c.groups * c.block_k  # 32 k a thread
        assert c.block_k in (128, 256, 512, 1024, 2048, 4096)
        assert c.block_k <= max(256, 1024 // c.groups) or c.block_k < 2 * k
    assert up.block_n % up.groups == 0
    assert down.groups < 2 * top_k


@pytest.mark.parametrize(
    ("rows", "experts", "k", "parts"), [(1536, 128, 2048, 1), (28672, 8, 4096, 1), (1024, 512, 2048, 1), (4096, 256, 7168, 8), (7168, 256, 2048, 4)]
)
def test_transient_weights_are_bounded(rows, experts, k, parts):
    """In E4M3; the last two are DeepSeek-V3's."""
    part = many.part_of_rows(rows, experts * k)
    assert 16 <= part <= rows
    assert part % 16 == 0
    assert part * experts * k <= many.TRANSIENT_BYTES
    assert -(-rows // part) == parts
