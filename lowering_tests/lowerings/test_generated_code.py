"""What torch.compile generates for fp4.linear in each regime: the graph after the passes, the wrapper's call, the Triton source.

CUDA code without CUDA (fake_cuda.py). The texts are the same on every supported torch; thresholds and tiles are pinned
here, and rows of other kernels are left out, so that tuning changes none of them. ``EXPECTTEST_ACCEPT=1`` rewrites.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch._dynamo as dynamo
from expecttest import TestCase
from torch import nn
from torch.testing import FileCheck

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.linear.gemv import FORM as GEMV
from fp4_inductor.kernels.linear.gemv import GemvConfig
from fp4_inductor.kernels.linear.mid import FORM as MID
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.select import plan
from fp4_inductor.lowerings import linear as lowering
from fp4_inductor.lowerings.journal import listen
from lowering_tests.fake_cuda import call, call_body, code_generation, generated_code, triton_ptx, triton_sources

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNELS = ("triton_gemv", "triton_mid", "dequantize_fp8 + scaled_mm", "dequantize + mm", "cpu")
PORTABLE = tuple(kernel for kernel in registry.kernels() if kernel.name in KERNELS)
K, N = 1024, 2048


def layer(dtype=BF16, bias=False, **options):
    return FP4Linear(K, N, bias=bias, dtype=dtype, device="cuda", **options)


def around(f, **options):
    """``f(linear, *inputs)`` with a fresh layer."""

    def build():
        linear = layer(**options)
        return lambda *inputs: f(linear, *inputs)

    return build


def marked(low=None, high=None, dim=0):
    return lambda x, *rest: dynamo.mark_dynamic(x, dim, min=low, max=high)


class Base(TestCase):
    def setUp(self):
        self.graphs: list[str] = []
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(dispatch(thresholds=(("gemv", 4), ("mid", 256))))
        pinned = {
            (lowering, "plan"): lambda a, b: plan(a, b, PORTABLE),
            (GEMV, "tile"): lambda p: GemvConfig(1 if p.m == 1 else 2 if p.m == 2 else 4, 8, 128, 4),
            (MID, "tile"): lambda p: MidConfig(16 if p.m <= 16 else 64, 64, 64, 4, 3),
        }
        for (owner, name), value in pinned.items():
            stack.enter_context(mock.patch.object(owner, name, value))

    def graph(self, graph: torch.fx.Graph) -> None:
        names = {node: f"in{i}" for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        lines = []
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                names[node] = f"t{len(names)}"
                arguments = torch.fx.node.map_arg(node.args, lambda n: names.get(n, n))
                lines.append(f"{names[node]} = {node.target}({', '.join(map(str, arguments))})")
        self.graphs.append("\n".join(lines))

    def compile(self, build, *shapes, **options) -> str:
        shapes = [s if isinstance(s[0], tuple) else (s, BF16) for s in shapes]
        options["config"] = {"post_grad_custom_post_pass": self.graph, **options.get("config", {})}
        self.code = generated_code(build, shapes, **options)[0]
        return call_body(self.code)


class Regimes(Base):
    def test_one_row(self):
        body = self.compile(layer, (1, K))
        self.assertExpectedInline(self.graphs[0], """t4 = fp4.linear.default(in0, in1, in2, in3)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((1, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, b0, 256, 1, 1, stream=stream0)
return (b0, )""",
        )

    def test_few_rows_proven(self):
        body = self.compile(layer, (3, K), mark=marked(2, 4))
        self.assertExpectedInline(self.graphs[0], """t5 = fp4.linear.default(in1, in2, in3, in4)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, b0, s0, 256, (3 + s0) // 4, 1, stream=stream0)
return (b0, )""",
        )

    def test_mid_guard(self):
        body = self.compile(lambda: layer(bias=True), (40, K), mark=marked())
        self.assertExpectedInline(self.graphs[0], """t6 = fp4.linear.default(in1, in3, in4, in5, in2)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, in4, b0, s0, 32*((63 + s0) // 64), 1, 1, stream=stream0)
return (b0, )""",
        )

    def test_mid_proven(self):
        body = self.compile(layer, (40, K), mark=marked(5, 256))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, b0, s0, 32*((63 + s0) // 64), 1, 1, stream=stream0)
return (b0, )""",
        )

    def test_batch_times_length(self):
        body = self.compile(layer, (2, 20, K), mark=lambda x: (dynamo.mark_dynamic(x, 0), dynamo.mark_dynamic(x, 1)))
        self.assertExpectedInline(self.graphs[0], """t6 = fp4.linear.default(in2, in3, in4, in5)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0*s1, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, b0, s0, s1, 32*((63 + s0*s1) // 64), 1, 1, stream=stream0)
return (reinterpret_tensor(b0, (s1, s0, 2048), (2048*s0, 2048, 1), 0), )""",
        )

    def test_batch_times_length_proven_from_both_ranges(self):
        with mock.patch.object(lowering.inductor.Symbols, "guard_at_most", side_effect=AssertionError("guarded")):
            body = self.compile(layer, (2, 20, K), mark=lambda x: (dynamo.mark_dynamic(x, 0, min=2, max=4), dynamo.mark_dynamic(x, 1, min=3, max=64)))
        assert "triton_tem_fused_linear_0.run(" in body

    def test_many_rows_fp8(self):
        body = self.compile(layer, (4096, K), mark=marked())
        self.assertExpectedInline(self.graphs[0], """t5 = fp4.linear.default(in1, in2, in3, in4)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 1024), (1024, 1), torch.float8_e4m3fn)
    b1 = empty_strided_cuda((s0, 1), (1, 1), torch.float32)
    triton_per_fused_linear_0.run(in0, b0, b1, s0, 1024, stream=stream0)
    b2 = torch.ops.fp4.dequantize_fp8.default(in1, in2)
    b3 = empty_strided_cuda((1, 2048), (2048, 1), torch.float32)
    triton_poi_fused_linear_1.run(in3, b3, 2048, stream=stream0)
    b4 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    extern_kernels._scaled_mm(b0, reinterpret_tensor(b2, (1024, 2048), (1, 1024), 0), b1, b3, out_dtype=torch.bfloat16, use_fast_accum=False, out=b4)
return (b4, )""",
        )

    def test_many_rows_float16(self):
        body = self.compile(lambda: layer(FP16), ((4096, K), FP16), mark=marked())
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.dequantize.default(in0, in1, in2, torch.float16)
    b1 = empty_strided_cuda((s0, 2048), (2048, 1), torch.float16)
    extern_kernels.mm(in3, reinterpret_tensor(b0, (1024, 2048), (1, 1024), 0), out=b1)
return (b1, )""",
        )

    def test_float32_has_one_regime(self):
        body = self.compile(lambda: layer(FP32), ((7, K), FP32), mark=marked())
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.dequantize.default(in0, in1, in2, torch.float32)
    b1 = empty_strided_cuda((s0, 2048), (2048, 1), torch.float32)
    extern_kernels.mm(in3, reinterpret_tensor(b0, (1024, 2048), (1, 1024), 0), out=b1)
return (b1, )""",
        )

    def test_many_rows_bfloat16_asked_for(self):
        body = self.compile(lambda: layer(prefill="bf16"), (4096, K), mark=marked())
        self.assertExpectedInline(self.graphs[0], """t5 = fp4.linear.default(in1, in2, in3, in4, None, bf16)""")
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.dequantize.default(in0, in1, in2, torch.bfloat16)
    b1 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    extern_kernels.mm(in3, reinterpret_tensor(b0, (1024, 2048), (1, 1024), 0), out=b1)
return (b1, )""",
        )

    def test_no_rows(self):
        body = self.compile(lambda: layer(bias=True), (0, K))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((0, 2048), (2048, 1), torch.bfloat16)
return (b0, )""",
        )

    def test_one_dimensional_activation(self):
        body = self.compile(layer, (K,))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((1, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_0.run(in0, in1, in2, in3, b0, 256, 1, 1, stream=stream0)
return (reinterpret_tensor(b0, (2048, ), (1, ), 0), )""",
        )

    def test_unbacked_rows_are_left_to_the_op(self):
        def build():
            linear, count = layer(bias=True), torch.tensor(3)
            return lambda x: linear(x.new_zeros((count.item(), K)))

        with dynamo.config.patch(capture_scalar_outputs=True):
            body = self.compile(build, (40, K))
        assert "triton_tem" not in body
        assert "torch.ops.fp4.linear.default(" in body

    def test_unproven_runtime(self):
        with dispatch(unproven="runtime"):
            body = self.compile(layer, (40, K), mark=marked())
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.linear.default(in0, in1, in2, in3, None, 'auto')
return (b0, )""",
        )

    def test_a_row_of_the_compiled_sources_calls_its_operator(self):
        """Proven or guarded like any other; the operator picks the tile by M, and the bias goes along."""
        with (
            mock.patch.object(lowering, "plan", plan),
            dispatch(thresholds=(("gemv", 1), ("small", 16))),
            listen() as entries,
        ):
            body = self.compile(lambda: layer(bias=True), (8, K), mark=marked(2, 16), csrc="")
        assert [(e.decision.row.kernel, e.decision.how) for e in entries] == [("cuda_table", "proven")]
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4_csrc.linear_table.default(in0, in1, in2, in3, in4, 90)
return (b0, )""",
        )

    def test_a_promised_range_over_regimes_is_left_to_the_op(self):
        """Dynamo refuses a guard that narrows ``mark_dynamic(min, max)``."""
        body = self.compile(layer, (40, K), mark=marked(2, 1000))
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.linear.default(in0, in1, in2, in3, None, 'auto')
return (b0, )""",
        )

    def test_ahead_of_time_never_guards(self):
        """AOTInductor drops guards: the graph must hold the self-dispatching op."""
        from torch._inductor.virtualized import V

        original = lowering.inductor.Symbols.why_no_guard

        def ahead_of_time(symbols, m):
            with mock.patch.object(V.graph, "aot_mode", True):
                return original(symbols, m)

        with mock.patch.object(lowering.inductor.Symbols, "why_no_guard", ahead_of_time):
            body = self.compile(layer, (40, K), mark=marked())
        assert "torch.ops.fp4.linear.default(" in body

    def test_a_strided_activation_is_copied_once(self):
        body = self.compile(around(lambda linear, x: linear(x.t())), (K, 3), mark=marked(2, 4, dim=1))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 1024), (1024, 1), torch.bfloat16)
    triton_poi_fused_linear_t_0.run(in0, b0, s0, s0, 1024, stream=stream0)
    b1 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_t_1.run(b0, in1, in2, in3, b1, s0, 256, (3 + s0) // 4, 1, stream=stream0)
return (b1, )""",
        )

    def test_an_activation_at_an_odd_offset_is_copied(self):
        body = self.compile(around(lambda linear, x: linear(torch.as_strided(x, (2, K), (K, 1), 1))), (3, K))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((2, 1024), (1024, 1), torch.bfloat16)
    triton_poi_fused_as_strided_linear_0.run(in0, b0, 2048, stream=stream0)
    b1 = empty_strided_cuda((2, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_as_strided_linear_1.run(b0, in1, in2, in3, b1, 256, 1, 1, stream=stream0)
return (b1, )""",
        )


class CPU(Base):
    def test_cpu_calls_the_op(self):
        from torch._inductor.utils import run_and_get_code

        lin = FP4Linear.from_weight(torch.randn(48, 32), torch.randn(48))
        x = torch.randn(5, 32)
        dynamo.mark_dynamic(x, 0)
        with torch._inductor.config.patch(force_disable_caches=True, post_grad_custom_post_pass=self.graph), torch.no_grad():
            y, code = run_and_get_code(torch.compile(lin, fullgraph=True), x)
        assert torch.equal(y, lin(x))
        self.assertExpectedInline(self.graphs[0], """t6 = fp4.linear.default(in1, in3, in4, in5, in2)""")
        self.assertExpectedInline(
            call_body(code[-1]),
            """\
b0 = torch.ops.fp4.linear.default(in0, in1, in2, in3, in4, 'auto')
return (b0, )""",
        )


class Fused(Base):
    """Epilogues lie in the template's kernel: one launch, one store."""

    def one_kernel(self, f, *shapes, **options) -> str:
        self.compile(f, *shapes, **options)
        body = call_body(self.code)
        sources = triton_sources(self.code)
        assert len(sources) == 1, sources.keys()
        assert body.count(".run(") == 1, body
        assert "extern_kernels" not in body
        ((name, source),) = sources.items()
        assert name.startswith("triton_tem_fused_"), name
        FileCheck().check_count("tl.store(", 1, exactly=True).run(source)
        return source

    def test_the_gemv_multiplies_without_tensor_cores(self):
        FileCheck().check("cvt.rn.f16x2.e4m3x2").check_not("tl.dot(").run(self.one_kernel(layer, (1, K)))

    def test_before_sm_89_the_gemv_decodes_with_masks(self):
        source = self.one_kernel(layer, (1, K), cc=(8, 0))
        FileCheck().check("CVT : tl.constexpr = False").run(source)

    def test_the_mid_kernel_multiplies_on_tensor_cores(self):
        FileCheck().check("tl.dot(").run(self.one_kernel(layer, (40, K), mark=marked()))

    def test_epilogues(self):
        act = nn.functional
        epilogues = {
            "silu": lambda y, r: act.silu(y),
            "relu": lambda y, r: act.relu(y),
            "gelu": lambda y, r: act.gelu(y),
            "gelu tanh": lambda y, r: act.gelu(y, approximate="tanh"),
            "mul": lambda y, r: y * r,
            "residual": lambda y, r: y + r,
            "silu mul residual": lambda y, r: act.silu(y) * r + r,
            "float32 out": lambda y, r: y.float() * 2,
            "scale": lambda y, r: y * 0.125,
        }
        marks = {1: None, 3: lambda *t: [dynamo.mark_dynamic(x, 0, min=2, max=4) for x in t], 40: lambda *t: [dynamo.mark_dynamic(x, 0) for x in t]}
        for m, mark in marks.items():
            for name, epilogue in epilogues.items() if m != 3 else [("residual", epilogues["residual"])]:
                with self.subTest(m=m, epilogue=name):
                    self.one_kernel(around(lambda linear, x, r, e=epilogue: e(linear(x), r), bias=True), (m, K), (m, N), mark=mark)

    def test_a_three_dimensional_residual(self):
        build = around(lambda linear, x, r: linear(x) + r, bias=True)
        # (2, 20) too from torch 2.13; 2.11 cannot match a template's rows with two dimensions, its own mm templates' neither
        for shape in ((1, 1), (1, 20), (8, 1)):
            with self.subTest(shape=shape):
                self.one_kernel(build, (*shape, K), (*shape, N))

    def test_ptx(self):
        for cc, m, instruction in (
            ((9, 0), 40, "wgmma.mma_async"),
            ((9, 0), 1, "cvt.rn.f16x2.e4m3x2"),
            ((8, 0), 40, "mma.sync"),
            ((8, 0), 1, "fma.rn.f16x2"),
            ((12, 0), 40, "mma.sync"),
        ):
            with self.subTest(cc=cc, m=m):
                self.compile(around(lambda linear, x: nn.functional.silu(linear(x)), bias=True), (m, K), cc=cc, mark=marked() if m > 1 else None)
                (ptx,) = triton_ptx(self.code, cc).values()
                FileCheck().check(f".target sm_{cc[0]}{cc[1]}").check(instruction).run(ptx)
                assert ("mma" if m == 1 else "cvt.rn.f16x2.e4m3x2") not in ptx.replace("comma", "")

    def test_rmsnorm_and_fp8_rounding_are_one_kernel(self):
        """At many rows the activation's quantisation joins the norm that produced it; nothing writes it in between."""

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.empty(K, dtype=BF16, device="cuda"), requires_grad=False)
                self.lin = layer()

            def forward(self, x):
                h = x.float()
                h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
                return self.lin(self.weight * h.to(x.dtype))

        body = self.compile(Block, (4096, K), mark=marked())
        assert len([line for line in body.splitlines() if "triton_red" in line or "triton_per" in line]) == 1, body
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 1024), (1024, 1), torch.float8_e4m3fn)
    b1 = empty_strided_cuda((s0, 1), (1, 1), torch.float32)
    triton_per_fused__to_copy_add_linear_mean_mul_pow_rsqrt_0.run(in0, in1, b0, b1, s0, 1024, stream=stream0)
    b2 = torch.ops.fp4.dequantize_fp8.default(in2, in3)
    b3 = empty_strided_cuda((1, 2048), (2048, 1), torch.float32)
    triton_poi_fused__to_copy_add_linear_mean_mul_pow_rsqrt_1.run(in4, b3, 2048, stream=stream0)
    b4 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    extern_kernels._scaled_mm(b0, reinterpret_tensor(b2, (1024, 2048), (1, 1024), 0), b1, b3, out_dtype=torch.bfloat16, use_fast_accum=False, out=b4)
return (b4, )""",
        )

    def test_gate_and_up_share_nothing_but_their_input(self):
        class MLP(nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.up = layer(), layer()

            def forward(self, x):
                return nn.functional.silu(self.gate(x)) * self.up(x)

        for m in (1, 40):
            with self.subTest(m=m):
                self.compile(MLP, (m, K))
                assert len(triton_sources(self.code)) == 2
                assert call_body(self.code).count(".run(") == 2


class Graphs(Base):
    """How many graphs a sequence of M costs."""

    SEQUENCE = (0, 1, 2, 3, 5, 16, 17, 33, 64, 512, 4096)

    def graphs_of(self, sequence, dtype=BF16, **options) -> list[int]:
        """The M at which a new graph was compiled."""
        new = []
        with code_generation() as out:
            compiled = torch.compile(layer(dtype, bias=True), fullgraph=True, **options)
            for m in sequence:
                before = len(out)
                call(compiled, torch.empty(m, K, dtype=dtype, device="cuda"))
                if len(out) > before:
                    new.append(m)
        return new

    def test_one_graph_per_regime(self):
        assert self.graphs_of((*self.SEQUENCE, *reversed(self.SEQUENCE))) == [0, 1, 2, 5, 512]

    def test_in_any_order(self):
        for sequence in ((4096, 33, 3, 1, 0), (64, 63, 62, 2, 4000, 1, 256, 257, 4, 5)):
            with self.subTest(sequence=sequence):
                # torch compiles the first shape it meets as it is, and the next ones symbolically
                assert len(self.graphs_of((*sequence, *self.SEQUENCE))) <= 3 + 2 + 1

    def test_dynamic_true(self):
        assert self.graphs_of(self.SEQUENCE, dynamic=True) == [0, 1, 2, 5, 512]

    def test_float32_and_runtime_need_one(self):
        assert self.graphs_of(self.SEQUENCE, FP32, dynamic=True) == [0, 1, 2]
        with dispatch(unproven="runtime"):
            assert self.graphs_of(self.SEQUENCE, dynamic=True) == [0, 1, 2]

    def test_thresholds_move_the_boundaries(self):
        with dispatch(thresholds={"gemv": 2, "mid": 40}):
            assert self.graphs_of(range(2, 60), dynamic=True) == [2, 3, 41]
        with dispatch(thresholds={"gemv": 0, "mid": 0}):
            assert self.graphs_of(range(2, 60), dynamic=True) == [2]
