"""Generated code of ``prefill="nvfp4"``: rounding fused with the norm, block-scaled MMA with its epilogue. No GPU (fake_cuda.py).

The texts are the same on every supported torch; the tile is pinned here. ``EXPECTTEST_ACCEPT=1`` rewrites.
"""

from __future__ import annotations

import contextlib
import re
from unittest import mock

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from expecttest import TestCase
from torch import nn
from torch.testing import FileCheck

from fp4_inductor import FP4Linear, dispatch
from fp4_inductor.kernels import select
from fp4_inductor.kernels.linear.mid import MidConfig
from fp4_inductor.kernels.linear_w4a4 import block_scaled
from fp4_inductor.lowerings.journal import listen
from lowering_tests.fake_cuda import call, call_body, code_generation, generated_code, triton_ptx, triton_sources
from lowering_tests.lowerings.decoder_block import Block
from lowering_tests.test_explain import explain_cuda

BF16 = torch.bfloat16
K, N = 1024, 2048
TILE = MidConfig(128, 128, 128, 8, 3)


def layer(dtype=BF16, bias=False, k=K):
    return FP4Linear(k, N, bias=bias, dtype=dtype, device="cuda", prefill="nvfp4")


def many(*inputs):
    for x in inputs:
        dynamo.mark_dynamic(x, 0)


class Generated(TestCase):
    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        stack.enter_context(mock.patch.object(block_scaled.FORM, "tile", return_value=TILE))

    def compile(self, build, *shapes, cc=(12, 0), mark=many, **options) -> str:
        graphs: list[str] = []

        def keep(graph: torch.fx.Graph) -> None:
            graphs.append("\n".join(str(n.target) for n in graph.nodes if n.op == "call_function" and "fp4" in str(n.target)))

        options["config"] = {"post_grad_custom_post_pass": keep, **options.get("config", {})}
        with listen() as self.entries:
            self.code = generated_code(build, [(s, BF16) if isinstance(s[0], int) else s for s in shapes], cc=cc, mark=mark, **options)[0]
        self.graph = graphs[0]
        return call_body(self.code)

    def kernels(self) -> list[tuple[str, str]]:
        return [(e.decision.row.kernel, e.decision.how) for e in self.entries]


class Many(Generated):
    def test_many_rows(self):
        body = self.compile(lambda: layer(bias=True), (4096, K))
        self.assertExpectedInline(self.graph, """fp4.linear.default""")
        assert self.kernels() == [("quantize_rows_nvfp4 + linear_w4a4", "guard")]
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 1), (1, s0), torch.float32)
    triton_per_fused_linear_0.run(b0, in0, s0, 1024, stream=stream0)
    b1 = torch.ops.fp4.quantize_rows_nvfp4.default(in0, b0)
    b2 = b1[0]
    b3 = b1[1]
    b4 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_1.run(b2, b3, b0, in1, in2, in3, in4, b4, s0, 16*((127 + s0) // 128), 1, 1, stream=stream0)
return (b4, )""",
        )

    def test_few_rows_keep_their_activations(self):
        for m in (1, 16, 64):
            body = self.compile(layer, (m, K), mark=None)
            assert "nvfp4" not in body
            assert self.entries[0].decision.row.regime in ("gemv", "mid")

    def test_the_codes_are_made_once_for_all_readers_and_the_maximum_with_the_norm(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("w", torch.ones(K, dtype=BF16, device="cuda"))
                self.a, self.b = layer(bias=True), layer()

            def forward(self, x):
                h = x.float()
                h = self.w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
                return F.relu(self.a(h)), self.b(h) * 2

        body = self.compile(Two, (4096, K))
        self.assertExpectedInline(
            body,
            """\
    b0 = empty_strided_cuda((s0, 1024), (1024, 1), torch.bfloat16)
    b1 = empty_strided_cuda((s0, 1), (1, s0), torch.float32)
    triton_per_fused__to_copy_add_linear_mean_mul_pow_rsqrt_0.run(b1, in0, in1, b0, s0, 1024, stream=stream0)
    b2 = torch.ops.fp4.quantize_rows_nvfp4.default(b0, b1)
    b3 = b2[0]
    b4 = b2[1]
    b5 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused__to_copy_add_linear_mean_mul_pow_relu_rsqrt_1.run(b3, b4, b1, in2, in3, in4, in5, b5, s0, 16*((127 + s0) // 128), 1, 1, stream=stream0)
    b6 = empty_strided_cuda((s0, 2048), (2048, 1), torch.bfloat16)
    triton_tem_fused_linear_mul_2.run(b3, b4, b1, in6, in7, in8, b6, s0, 16*((127 + s0) // 128), 1, 1, stream=stream0)
return (b5, b6, )""",
        )
        norm = next(source for name, source in triton_sources(self.code).items() if "rsqrt_0" in name)
        FileCheck().check("rsqrt").check(".to(tl.bfloat16)").check("max2").check("0.0003720238095238095").check("nan").run(norm)

    def test_the_instruction(self):
        for cc, instruction in (((12, 0), r"mma\.sync\.aligned\.m16n8k64\.\S*mxf4nvf4\.block_scale"), ((10, 0), r"tcgen05\.mma\S*mxf4nvf4\.block_scale")):
            with self.subTest(cc=cc):
                self.compile(lambda: (lambda linear: lambda x, r: F.relu(linear(x)) * r)(layer(bias=True)), (4096, K), (4096, N), cc=cc)
                (source,) = (s for name, s in triton_sources(self.code).items() if name.startswith("triton_tem"))
                FileCheck().check("tl.dot_scaled(").check("maximum(").check_count("tl.store(", 1, exactly=True).run(source)
                (ptx,) = triton_ptx(self.code, cc).values()
                assert re.search(instruction, ptx)

    def test_siblings_are_one_launch(self):
        for shared in (False, True):
            with self.subTest(shared=shared):
                body = self.compile(lambda shared=shared: Block("nvfp4", shared), (4096, 1024))
                assert len(re.findall(r"triton_tem\w+\.run\(", body)) == 3, body  # q k v, gate up, down
                assert body.count("quantize_rows_nvfp4") == 2
                assert self.entries[0].note == "one call for siblings: q, k, v"

    def test_where_no_fp4_tensor_cores_are(self):
        body = self.compile(lambda: layer(bias=True), (4096, K), cc=(9, 0))
        assert self.kernels() == [("quantize_rows_nvfp4 + linear_w4a4", "guard")]
        FileCheck().check("fp4.quantize_rows_nvfp4").check("fp4.dequantize").check("fp4.dequantize").check("extern_kernels.mm(").run(body)
        body = self.compile(lambda: Block("nvfp4"), (4096, 1024), cc=(9, 0))
        assert body.count("extern_kernels.mm(") == 3, body

    def test_an_old_triton_on_sm_121(self):
        with mock.patch.object(select, "triton_version", return_value=(3, 6)):
            body = self.compile(layer, (4096, K), cc=(12, 1))
        assert "triton_tem" not in body and "extern_kernels.mm(" in body

    def test_float32_is_multiplied_in_float32(self):
        body = self.compile(lambda: layer(torch.float32), ((4096, K), torch.float32))
        assert "triton_tem" not in body and body.count("torch.ops.fp4.dequantize.default(") == 2

    def test_the_candidate_is_called_through_its_op(self):
        with dispatch(candidates=("cuda_w4a4",)):
            body = self.compile(layer, (4096, K), csrc="")
            assert "torch.ops.fp4.linear_w4a4.default(" in body and "triton_tem" not in body
            body = self.compile(lambda: Block("nvfp4"), (4096, 1024), csrc="")
        # it takes one global scale: q, k, v, gate, up, down one by one, from two sets of codes
        assert body.count("torch.ops.fp4.linear_w4a4.default(") == 6
        assert body.count("quantize_rows_nvfp4") == 2

    def test_an_odd_k(self):
        body = self.compile(lambda: layer(k=1000), (4096, 1000))  # padded to 1008: not whole tiles
        (source,) = (s for name, s in triton_sources(self.code).items() if name.startswith("triton_tem"))
        FileCheck().check("EVEN : tl.constexpr = False").run(source)
        assert "triton_tem" in body


class Op(Generated):
    def test_a_direct_call(self):
        """Whoever has codes already."""

        def build():
            w = layer().parts()
            return lambda xq, xs, rs: torch.ops.fp4.linear_w4a4(xq, xs, rs, *w, None, BF16)

        shapes = (((4096, K // 2), torch.uint8), ((4096, K // 16), torch.float8_e4m3fn), ((4096, 1), torch.float32))
        self.compile(build, *shapes, mark=None)
        assert [(e.op, e.decision.row.kernel) for e in self.entries] == [("fp4.linear_w4a4", "triton_w4a4")]
        assert next(iter(triton_sources(self.code))).startswith("triton_tem")

    def test_graphs(self):
        """One more graph than regimes cost without it: none. M up to 64 is as ever, above it W4A4."""
        new = []
        with code_generation((12, 0)) as out:
            compiled = torch.compile(layer(bias=True), fullgraph=True, dynamic=True)
            for m in (0, 1, 2, 33, 64, 65, 512, 8192, 7):
                before = len(out)
                call(compiled, torch.empty(m, K, dtype=BF16, device="cuda"))
                new += [m] if len(out) > before else []
        assert new == [0, 1, 2, 33, 65] or new == [0, 1, 2, 65], new


class Explained(Generated):
    def test_the_kernel_and_the_reason(self):
        for cc, kernel in (((12, 0), "triton_w4a4 (compiled, not run)"), ((10, 0), "triton_w4a4 (compiled, not run)"), ((9, 0), "dequantize both + mm")):
            with self.subTest(cc=cc):
                (row,) = explain_cuda(layer, (4096, K), cc=cc).rows
                assert (row.regime, row.kernel) == ("large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4")
                assert row.note.startswith("activations rounded to NVFP4 per token; linear_w4a4: " + kernel)
                assert ("slower" in row.note) == (cc == (9, 0))
