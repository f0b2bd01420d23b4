"""Generated CUDA code of merged siblings, of act(gate) * up in one kernel, and of the FP8 path. No GPU (fake_cuda.py)."""

from __future__ import annotations

import re
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.kernels import registry, select
from fp4_inductor.kernels.forms import Norm, Problem
from fp4_inductor.kernels.linear_glu import gemv as glu_gemv
from fp4_inductor.lowerings import linear as lowering
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import FP8Linear
from fp4_inductor.ops.activation import activation_code
from fp4_inductor.ops.linear_glu import ACTIVATIONS
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.fake_cuda import NOT_COMPILED, call_body, generated_code, triton_ptx, triton_sources
from lowering_tests.lowerings.decoder_block import Block

BF16 = torch.bfloat16
K, N, KV, INNER = Block.K, Block.N, Block.KV, Block.INNER


def compiled(m, build=Block, csrc=None, **options):
    with listen() as entries:
        code = generated_code(build, [((m, K), BF16)], **({} if csrc is None else {"csrc": csrc}), **options)[0]
    return code, entries


def kernels(entries):
    return [(e.op, e.decision.row.kernel, e.n) for e in entries]


@pytest.mark.parametrize(("m", "kernel"), [(1, "triton_gemv"), (40, "triton_mid")])
def test_siblings_are_one_launch(m, kernel):
    code, entries = compiled(m)
    assert kernels(entries) == [("fp4.linear", kernel, N + 2 * KV), ("fp4.linear", kernel, 2 * INNER), ("fp4.linear", kernel, K)]
    assert entries[0].note == "one call for siblings: q, k, v"
    body = call_body(code)
    assert len(re.findall(r"triton_tem\w+\.run\(", body)) == 3
    assert "fp4.linear" not in body
    templates = [source for name, source in triton_sources(code).items() if name.startswith("triton_tem")]
    bounds = {tuple(re.findall(r"B[12] : tl.constexpr = (\d+)", source)) for source in templates}
    assert bounds == {(str(N), str(N + KV)), (str(INNER), str(2**31 - 1)), ("0", "0")}
    assert len(triton_ptx(code)) == 3


def test_no_weight_is_copied_and_one_input_is_written_once():
    code, _ = compiled(1)
    body = call_body(code)
    weights = re.findall(r"empty_strided_cuda\([^)]*\), \([^)]*\), torch\.(?:uint8|float8\w*)", body)
    assert not weights
    assert body.count("triton_per_fused") == 1  # the norm, written once for its two readers
    norm = re.search(r"triton_per_fused\w*\.run\((.*?)\)", body)[1].split(", ")
    assert len([a for a in norm if re.fullmatch(r"b\d+", a)]) == 1


def test_one_call_of_the_cuda_kernel_with_a_scale_for_each_sibling():
    for shared, scales in ((False, f"{N}, {N + KV}"), (True, "0, 0")):
        code, entries = compiled(8, build=lambda shared=shared: Block(shared=shared), csrc="")
        assert [e.n for e in entries] == [N + 2 * KV, 2 * INNER, K]
        assert kernels(entries)[0] == ("fp4.linear", "cuda_table", N + 2 * KV)
        assert [e.note.partition(";")[0] for e in entries[:2]] == ["one call for siblings: q, k, v", "one call for siblings: gate, up"]
        assert re.findall(r"fp4_csrc\.linear_table\.default\(.*?, 90(.*?)\)", call_body(code)) == [f", 0, 0, 0, 0, {scales}, 0, None, None, 1"]


def test_one_by_one_where_no_kernel_takes_their_scales(monkeypatch):
    rows = tuple(replace(kernel, one_scale=True) if kernel.name == "cuda_table" else kernel for kernel in registry.kernels())
    monkeypatch.setattr(lowering, "plan", lambda call, config: select.plan(call, config, rows))
    code, entries = compiled(8, csrc="")
    assert [e.n for e in entries if e.decision.row.kernel == "cuda_table"] == [N, KV, KV]
    assert [e.module for e in entries[:3]] == ["q", "k", "v"]
    assert all("takes one global scale" in e.note for e in entries[:3])
    assert call_body(code).count("fp4_csrc.linear_table.default(") == 3


def test_gate_times_up_and_the_residual_in_the_cuda_kernel():
    reset_matches()
    code, entries = compiled(8, csrc="")
    assert kernels(entries) == [
        ("fp4.linear", "cuda_table", N + 2 * KV), ("fp4.linear_glu", "cuda_table_glu", 2 * INNER), ("fp4.linear_epilogue", "cuda_table_pointwise", K)
    ]  # fmt: skip
    early = "begins while the kernel before it runs"
    assert [e.note for e in entries[1:]] == [f"one call for siblings: gate, up; silu(gate) * up; {early}", f"in the kernel: + residual; {early}"]
    assert entries[2].module == "down"
    assert matches() == {"siblings": 2, "linear_glu": 1, "linear_epilogue": 1}
    body = call_body(code)
    assert re.findall(r"linear_table_glu\.default\(.*?, 90(.*?)\)", body) == [f", 0, 0, 0, 0, {INNER}, 0, 1, None, None, 1"]
    assert re.findall(r"linear_table_pointwise\.default\(.*?, 90(.*?), in0, 1\)", body) == [", 0, 0, 0, 0, 0, 0, 0, None"]
    assert "triton_poi_fused_mul" not in body
    assert re.search(r"return \(b\d+, b\d+, \)", body)
    # so do more rows
    assert [(e.op, e.decision.row.kernel) for e in compiled(40, csrc="")[1]][1:] == [
        ("fp4.linear_glu", "cuda_wide_glu"),
        ("fp4.linear_epilogue", "cuda_wide_pointwise"),
    ]


GEMVS = ("cuda_gemv", "cuda_gemv_glu", "cuda_gemv_pointwise")


@pytest.mark.parametrize(("cc", "candidates", "early"), [((9, 0), (), True), ((8, 0), GEMVS, False)], ids=str)
def test_one_row_by_the_cuda_kernels(cc, candidates, early):
    """The norm is in the kernels of its readers, whose input is then the graph's; what they make is read early, from sm_90 on."""
    with dispatch(candidates=candidates):
        code, entries = compiled(1, csrc="", cc=cc)
    assert [(e.op, e.decision.row.kernel) for e in entries] == [("fp4.linear", GEMVS[0]), ("fp4.linear_glu", GEMVS[1]), ("fp4.linear_epilogue", GEMVS[2])]
    assert ["begins while the kernel before it runs" in e.note for e in entries] == [False, False, early]
    body, arch, last = call_body(code), cc[0] * 10 + cc[1], ", 1" if early else ""
    normed = re.findall(rf"linear_gemv_glu\.default\(.*?, {arch}(.*?)\)", body)
    assert len(normed) == 1 and re.fullmatch(rf", 0, 0, 0, 0, {INNER}, 0, 1, None, None, 0, in\d+, 1\.19\d+e-07, 0\.0", normed[0])
    assert re.findall(rf"linear_gemv_pointwise\.default\(.*?, {arch}(.*?)\)", body) == [f", 0, 0, 0, 0, 0, 0, 0, None, in0{last}"]
    assert len(re.findall(r"triton_\w+\.run\(", body)) == 1  # the heads


def test_a_norm_in_the_kernel(monkeypatch):
    """As a lowering asks for it: behind all other arguments; its weight is one of those that must not be written before."""
    seen = []
    monkeypatch.setattr(lowering, "order", types.SimpleNamespace(why_not_early=lambda activations, read, promised: seen.append(len(read)) or ""))
    plain = lowering.call_csrc

    def with_norm(entry, library, parts, weight, bias, arch, asked):
        return plain(entry, library, parts, weight, bias, arch, asked._replace(norm=Norm(weight[1], 1e-6, 1.0)))  # any tensor of the graph

    monkeypatch.setattr(lowering, "call_csrc", with_norm)
    code = generated_code(lambda: FP4Linear(K, K, bias=False, dtype=BF16, device="cuda"), [((1, K), BF16)], csrc="")[0]
    assert re.findall(r"linear_gemv\.default\(.*?, 90(.*?)\)", call_body(code)) == [", 0, 0, 0, 0, 0, 0, 0, None, None, 1, in2, 1e-06, 1.0"]
    assert seen == [3]  # codes, scales, the norm's weight


def launches(body: str) -> int:
    return len(re.findall(r"(?:triton_(?:poi|tem|per|red)\w+\.run|fp4_csrc\.\w+\.default|torch\.ops\.fp4\.\w+\.default)\(", body))


def test_other_numbers_of_rows_are_launched_as_if_there_were_no_such_kernels():
    """Many rows, and graphs whose M is dynamic or known at run time only."""

    def graph(m, off=False, unproven="guard", **options):
        with dispatch(unproven=unproven, thresholds={"small": 0} if off else {}):
            code, entries = compiled(m, csrc="", **options)
        return entries, call_body(code)

    dynamic = {"mark": lambda x: torch._dynamo.mark_dynamic(x, 0)}
    for m, options in ((8200, {}), (8200, dynamic)):
        entries, body = graph(m, **options)
        assert [(e.op, e.decision.row.kernel) for e in entries] == [("fp4.linear", "dequantize_fp8 + scaled_mm")] * 3
        assert "fp4_csrc" not in body
        assert launches(body) == launches(graph(m, off=True, **options)[1])
    entries, body = graph(8, **dynamic)
    assert [e.op for e in entries] == ["fp4.linear", "fp4.linear_glu", "fp4.linear_epilogue"]
    assert {e.decision.how for e in entries} == {"guard"}
    entries, body = graph(8, unproven="runtime", **dynamic)
    assert {(e.op, e.decision.how) for e in entries} == {("fp4.linear", "runtime")}
    assert "fp4.linear_glu" not in body and "fp4.linear_epilogue" not in body
    assert launches(body) == launches(graph(8, off=True, unproven="runtime", **dynamic)[1])
    late = {r.kernel.name for e in entries for r in e.refused if r.reason.startswith("decided at run time: ")}
    assert late == {f"cuda_{size}_{what}" for size in ("gemv", "table", "wide") for what in ("glu", "pointwise")}


def test_explain_says_why_the_cuda_kernels_do_not_serve():
    def refused(cc=(9, 0), name="table", **options):
        entries = compiled(8, cc=cc, **options)[1]
        assert {e.op for e in entries} == {"fp4.linear"}
        return [{r.kernel.name: r.reason for e in entries for r in e.refused}[f"cuda_{name}_{what}"] for what in ("glu", "pointwise")]

    assert refused() == [NOT_COMPILED] * 2
    assert all("candidates=" in why for why in refused((8, 0), csrc="", name="small"))


def test_a_residual_in_front_of_a_norm_is_part_of_the_norm():
    """Its kernel reads the sum anyway: an addition in the matmul would save nothing."""

    class Normed(Block):
        def forward(self, x):
            heads, y = super().forward(x)
            return heads, y, F.rms_norm(y, (K,), self.w)

    code, entries = compiled(8, build=Normed, csrc="")
    assert [(e.op, e.decision.row.kernel) for e in entries][1:] == [("fp4.linear_glu", "cuda_table_glu"), ("fp4.linear", "cuda_table")]
    assert len(re.findall(r"triton_\w+\.run\(", call_body(code))) == 3  # the first norm, the heads, the sum and its norm
    assert any(r.kernel.name == "cuda_table_pointwise" and r.reason.startswith("what stands behind the layer") for r in entries[2].refused)
    # M stays dynamic: one that became a constant is an error for a marked size.
    assert {e.decision.how for e in compiled(8, build=Normed, csrc="", mark=lambda x: torch._dynamo.mark_dynamic(x, 0))[1]} == {"guard"}


@pytest.mark.parametrize(("m", "most"), [(512, 2), (16, 4)])
def test_sums_of_many_rows_are_written_once(m, most):
    """Each norm reads the sum before it and what one layer adds; of few rows it adds up what came since, which is cheaper than a buffer."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(FP4Linear(K, K, bias=False, device="cuda") for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(F.rms_norm(x, (K,)))
            return x

    code, _ = compiled(m, build=Chain, csrc="")
    norms = [source for source in triton_sources(code).values() if "rsqrt" in source]
    inputs = [len(set(re.findall(r"tl\.load\((in_ptr\d+|in_out_ptr\d+) \+", source))) for source in norms]
    assert max(inputs) == most, inputs


def test_fp8_products_round_activations_in_the_kernel_before_them():
    """One operator for siblings, without a transient weight; what it takes is rounded where it is made: in the norm, in act(gate) * up."""
    dynamic = {"mark": lambda x: torch._dynamo.mark_dynamic(x, 0)}
    for options in ({}, dynamic):
        code, entries = compiled(512, csrc="", **options)
        body = call_body(code)
        assert kernels(entries) == [("fp4.linear", "cuda_wide_fp8", n) for n in (N + 2 * KV, 2 * INNER, K)]
        assert {e.decision.how for e in entries} == {"guard" if options else "proven"}
        assert body.count("fp4_csrc.linear_wide_fp8.default(") == 3
        assert "dequantize" not in body and "quantize_rows" not in body
        # Written as the kernel takes it, by the kernel that computes it: (m, k / 256, 4, 16, 4) in the order of fp4.quantize_rows_fp8(lane_order=True).
        assert re.search(rf"empty_strided_cuda\(\(\w+, {K // 256}, 4, 16, 4\), \({K}, 256, 4, 16, 1\), torch.float8_e4m3fn\)", body)
        transient, before = compiled(8200, csrc="", **options)
        assert {e.decision.row.kernel for e in before} == {"dequantize_fp8 + scaled_mm"}
        assert len(re.findall(r"triton_\w+\.run\(", body)) <= len(re.findall(r"triton_\w+\.run\(", call_body(transient)))
    with dispatch(unproven="runtime"):
        assert "fp4_csrc" not in call_body(compiled(512, csrc="", **dynamic)[0])


@pytest.mark.parametrize("prefill", ["fp8", "bf16"])
def test_many_rows_are_one_product(prefill):
    code, entries = compiled(4096, build=lambda: Block(prefill))
    assert [e.n for e in entries] == [N + 2 * KV, 2 * INNER, K]
    body = call_body(code)
    product, decode = ("_scaled_mm(", "fp4.dequantize_fp8") if prefill == "fp8" else ("extern_kernels.mm(", "fp4.dequantize.")
    assert body.count(product) == body.count(decode) == 3


def test_gate_times_up_in_one_launch_where_it_is_switched_on():
    with dispatch(candidates=("triton_gemv_glu",)):
        code, entries = compiled(1)
        assert [e.op for e in entries] == ["fp4.linear", "fp4.linear_glu", "fp4.linear"]
        assert entries[1].note == "one call for siblings: gate, up; silu(gate) * up"
        assert len(re.findall(r"triton_tem\w+\.run\(", call_body(code))) == 3
        assert f"empty_strided_cuda((1, {2 * INNER})" not in call_body(code)
        assert len(triton_ptx(code)) == 3
        assert [e.op for e in compiled(8)[1]].count("fp4.linear_glu") == 0
    entries = compiled(1)[1]
    assert {e.op for e in entries} == {"fp4.linear"}
    assert any("candidates=" in r.reason for e in entries for r in e.refused)


class Phi(nn.Module):
    def __init__(self, act, bias):
        super().__init__()
        self.gate_up, self.act = FP4Linear(K, 2 * INNER, bias=bias, device="cuda"), act

    def forward(self, x, residual):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.act(gate) * up + residual


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_fused_weight_with_bias_and_residual(name):
    with dispatch(candidates=("triton_gemv_glu",)):
        code = generated_code(lambda: Phi(ACTIVATIONS[name], name != "relu"), [((1, K), BF16), ((1, INNER), BF16)])[0]
    body = call_body(code)
    assert body.count(".run(") == 1, "bias, activation, product and residual in one kernel"
    source = next(iter(triton_sources(code).values()))
    assert f"ACT : tl.constexpr = {int(activation_code(name))}" in source
    assert len(triton_ptx(code)) == 1


def test_autotuning_measures_tiles_of_the_same_kernel():
    choices = glu_gemv.form("silu", False, 1).options(Problem(1, 12288, 4096, 90, BF16), autotune=True)
    assert len(choices) > 1 and len({tuple(c.items()) for c in choices}) == len(choices)


# --- FP8 ----------------------------------------------------------------------------------------------------------


def test_the_norm_and_the_rounding_to_fp8_are_one_kernel():
    """amax / 448 and x / scale by IEEE division on the rounded activation: the eager op's bits, and no bf16 copy is written."""
    code, _ = compiled(4096, build=lambda: Block("fp8"))
    body = call_body(code)
    assert "quantize_rows_fp8" not in body
    name, source = next((n, s) for n, s in triton_sources(code).items() if "libdevice.rsqrt" in s)
    assert source.count("div.rn.f32") == 2
    rounded = re.search(r"(tmp\d+) = tmp\d+\.to\(tl\.bfloat16\)\s+(tmp\d+) = \1\.to\(tl\.float32\)\s+\w+ = tl_math\.abs\(\2\)", source)
    assert rounded, "the activation is rounded before its maximum is taken"
    stores = re.findall(r"tl\.store\((\w+)", source)
    assert len(stores) == 2, "codes and scales, once, and not the activation itself"
    written = re.search(rf"{name}\.run\((.*?)\)", code)[1].split(", ")
    assert "torch.float8_e4m3fn" in body
    assert len(written) >= 4


def test_silu_times_up_is_rounded_in_the_kernel_that_computes_it(monkeypatch):
    """One kernel of ours reads gate and up once; where siblings are two results, and behind other functions, Inductor's own does it."""
    code, _ = compiled(4096, build=lambda: Block("fp8"))
    body = call_body(code)
    [arguments] = re.findall(r"fp4\.quantize_glu_rows_fp8\.default\((.*?)\)", body)
    assert re.fullmatch(r"(b\d+|reinterpret_tensor\(b\d+.*), 'silu', False", arguments)
    exponential = ("tl_math.exp", "tl.sigmoid", "libdevice.exp")
    assert not any(name in source for source in triton_sources(code).values() for name in exponential), "the product itself is computed nowhere else"

    apart = tuple(replace(kernel, one_scale=True) for kernel in registry.kernels())
    monkeypatch.setattr(lowering, "plan", lambda call, config: select.plan(call, config, apart))
    code, _ = compiled(4096, build=lambda: Block("fp8"))
    [source] = [s for s in triton_sources(code).values() if "float8e4nv" in s and "rsqrt" not in s]
    assert any(name in source for name in exponential)
    assert "quantize_glu_rows" not in call_body(code)


def test_a_product_whose_rows_are_divided_is_no_row_of_gate_times_up():
    """Two rows of the next layer are one row of gate and up."""

    class Divided(Block):
        def __init__(self):
            super().__init__("fp8")
            self.narrow = FP4Linear(INNER // 2, K, device="cuda", prefill="fp8")

        def forward(self, x):
            return self.narrow((F.silu(self.gate(x)) * self.up(x)).view(-1, INNER // 2))

    code, entries = compiled(4096, build=Divided, csrc="")
    assert entries[-1].m == str(2 * 4096)
    assert "quantize_glu_rows" not in call_body(code)
    assert "float8e4nv" in "".join(triton_sources(code).values())


@pytest.mark.parametrize("prefill", ["fp8", "bf16"])
def test_one_transient_weight_at_a_time(prefill):
    """Peak memory of prefill is the model, the activations and one layer."""

    def build():
        wide = [FP4Linear(4096, 8192, device="cuda", prefill=prefill) for _ in range(4)]
        back = [FP4Linear(8192, 4096, device="cuda", prefill=prefill) for _ in range(4)]

        def forward(x):
            for a, b in zip(wide, back, strict=True):
                x = x + b(torch.relu(a(x)))
            return x

        return forward

    code = generated_code(build, [((2048, 4096), BF16)])[0]
    alive, most = set(), 0
    for line in code[code.index("def call(") :].splitlines():
        made = re.search(r"(buf\d+) = torch\.ops\.fp4\.dequantize", line)
        alive |= {made[1]} if made else set()
        alive -= set(re.findall(r"del (buf\d+)", line))
        most = max(most, len(alive))
    assert code.count("= torch.ops.fp4.dequantize") == 8
    assert most == 1


def test_fp8_head():
    def head(prefill="auto"):
        return lambda: FP8Linear(K, 32000, device="cuda", prefill=prefill)

    code, entries = compiled(1, build=head())
    assert kernels(entries) == [("fp4.linear_fp8", "triton_gemv_fp8", 32000)]
    assert len(triton_ptx(code)) == 1
    assert "fp8e4nv" not in next(iter(triton_sources(code).values())).replace("'*fp8e4nv'", ""), "read as bytes: sm_80 has no such type"
    code, entries = compiled(64, build=head())
    assert kernels(entries) == [("fp4.linear_fp8", "scaled_mm", 32000)]
    assert call_body(code).count("_scaled_mm(") == 1
    code, entries = compiled(64, build=head("bf16"))
    assert kernels(entries) == [("fp4.linear_fp8", "cast + mm", 32000)]
    assert "_scaled_mm" not in code
