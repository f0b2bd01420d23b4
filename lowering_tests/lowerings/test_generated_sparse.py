"""What torch.compile generates for fp4.sparse_linear in each regime, by the machinery of fp4.linear (test_generated_code.py)."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
import torch._dynamo as dynamo
from expecttest import TestCase
from torch import nn
from torch.testing import FileCheck

from fp4_inductor import Sparse24Linear, dispatch
from fp4_inductor.kernels import registry
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.select import plan
from fp4_inductor.kernels.sparse_linear import gemv, mid
from fp4_inductor.lowerings import linear as lowering
from fp4_inductor.lowerings.journal import listen
from lowering_tests.fake_cuda import call, call_body, code_generation, generated_code, triton_ptx, triton_sources

BF16, FP16 = torch.bfloat16, torch.float16
K, N = 1024, 2048
PORTABLE = tuple(kernel for kernel in registry.kernels() if not kernel.csrc)


def layer(dtype=BF16, bias=False, **options):
    return Sparse24Linear(K, N, bias=bias, dtype=dtype, device="cuda", **options)


def around(f, **options):
    """``f(linear, *inputs)`` with a fresh layer."""

    def build():
        linear = layer(**options)
        return lambda *inputs: f(linear, *inputs)

    return build


def marked(low=None, high=None):
    return lambda x, *rest: dynamo.mark_dynamic(x, 0, min=low, max=high)


class Generated(TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(dispatch(thresholds=(("gemv", 1), ("mid", 64))))
        stack.enter_context(mock.patch.object(lowering, "plan", lambda a, b: plan(a, b, PORTABLE)))
        stack.enter_context(mock.patch.object(gemv.FORM, "tile", return_value=gemv.GemvConfig(8, 64, 4)))
        stack.enter_context(mock.patch.object(mid.FORM, "tile", return_value=MidConfig(64, 64, 64, 4, 3)))

    def compile(self, build, *shapes, **options) -> str:
        shapes = [s if isinstance(s[0], tuple) else (s, BF16) for s in shapes]
        self.code = generated_code(build, shapes, **options)[0]
        return call_body(self.code)

    def test_one_row(self):
        self.assertExpectedInline(
            self.compile(layer, (1, K)),
            """\
    b0 = empty_strided_cuda((1, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_sparse_linear_0.run(in0, in1, in2, in3, in4, b0, 256, 1, 1, stream=stream0)
return (b0, )""",
        )

    def test_a_few_rows(self):
        with listen() as entries:
            body = self.compile(lambda: layer(bias=True), (40, K), mark=marked())
        assert [(e.op, e.decision.row.kernel, e.decision.how) for e in entries] == [("fp4.sparse_linear", "triton_sparse_mid", "guard")]
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_sparse_linear_0.run(in0, in1, in2, in3, in4, in5, b0, s0, 32*((63 + s0) // 64), 1, 1, stream=stream0)
return (b0, )""",
        )

    def test_many_rows_fp8(self):
        self.assertExpectedInline(
            self.compile(layer, (4096, K), mark=marked()),
            """\
    b0 = empty_strided_cuda((s0, 1024), (1024, 1), torch.float8_e4m3fn)
    b1 = empty_strided_cuda((s0, 1), (1, 1), torch.float32)
    triton_per_fused_sparse_linear_0.run(in0, b0, b1, s0, 1024, stream=stream0)
    b2 = torch.ops.fp4.sparse_dequantize_fp8.default(in1, in2, in3)
    b3 = empty_strided_cuda((1, 2048), (2048, 1), torch.float32)
    triton_poi_fused_sparse_linear_1.run(in4, b3, 2048, stream=stream0)
    b4 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    extern_kernels._scaled_mm(b0, reinterpret_tensor(b2, (1024, 2048), (1, 1024), 0), b1, b3, out_dtype=torch.bfloat16, use_fast_accum=False, out=b4)
return (b4, )""",
        )

    def test_many_rows_float16(self):
        self.assertExpectedInline(
            self.compile(lambda: layer(FP16), ((4096, K), FP16), mark=marked()),
            """\
    b0 = torch.ops.fp4.sparse_dequantize.default(in0, in1, in2, in3, torch.float16)
    b1 = empty_strided_cuda((s0, 2048), (2048, 1), torch.float16)
    extern_kernels.mm(in4, reinterpret_tensor(b0, (1024, 2048), (1, 1024), 0), out=b1)
return (b1, )""",
        )

    def test_many_rows_bfloat16_asked_for(self):
        assert "torch.ops.fp4.sparse_dequantize.default(" in self.compile(lambda: layer(prefill="bf16"), (4096, K), mark=marked())

    def test_no_rows(self):
        assert "fp4" not in self.compile(layer, (0, K))

    def test_unproven_is_left_to_the_op(self):
        with dispatch(unproven="runtime"):
            body = self.compile(lambda: layer(bias=True), (40, K), mark=marked())
        self.assertExpectedInline(
            body,
            """\
    b0 = torch.ops.fp4.sparse_linear.default(in0, in1, in2, in3, in4, in5, 'auto')
return (b0, )""",
        )

    def test_epilogues_lie_in_the_kernel(self):
        epilogues = {"silu": lambda y, r: nn.functional.silu(y), "mul residual": lambda y, r: y * r + r, "float32": lambda y, r: y.float() * 2}
        for m, instruction in ((1, "prmt.b32"), (40, "tl.dot(")):
            for name, epilogue in epilogues.items():
                with self.subTest(m=m, epilogue=name):
                    body = self.compile(around(lambda linear, x, r, e=epilogue: e(linear(x), r), bias=True), (m, K), (m, N))
                    ((kernel, source),) = triton_sources(self.code).items()
                    assert kernel.startswith("triton_tem_fused_")
                    assert body.count(".run(") == 1
                    FileCheck().check_count("tl.store(", 1, exactly=True).run(source)
                    assert instruction in source

    def test_ptx(self):
        cases = (((9, 0), 1, "cvt.rn.f16x2.e4m3x2"), ((8, 0), 1, "fma.rn.f16x2"), ((9, 0), 40, "wgmma.mma_async"), ((8, 0), 40, "mma.sync"))
        for cc, m, instruction in cases:
            with self.subTest(cc=cc, m=m):
                self.compile(around(lambda linear, x: nn.functional.silu(linear(x)), bias=True), (m, K), cc=cc)
                (ptx,) = triton_ptx(self.code, cc).values()
                FileCheck().check(f".target sm_{cc[0]}{cc[1]}").check(instruction).run(ptx)
                assert "prmt.b32" in ptx

    def test_one_graph_per_regime(self):
        new = []
        with code_generation() as out:
            compiled = torch.compile(layer(bias=True), fullgraph=True)
            for m in (0, 1, 2, 3, 16, 64, 65, 4096, 64, 2, 1, 0):
                before = len(out)
                call(compiled, torch.empty(m, K, dtype=BF16, device="cuda"))
                if len(out) > before:
                    new.append(m)
        assert new == [0, 1, 2, 65]
