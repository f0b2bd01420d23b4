"""W4A4 on a GPU: codes bit for bit, products against float64, eager against compiled, replay. FP4 tensor cores where there are some."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4_inductor import FP4Linear, dispatch, explain
from fp4_inductor.kernels import csrc, host, run
from fp4_inductor.kernels.forms import Problem
from fp4_inductor.kernels.linear_w4a4 import block_scaled, mma_sync
from fp4_inductor.kernels.linear_w4a4.cuda import by_form
from fp4_inductor.ops import linear_w4a4, quantize_rows_nvfp4
from lowering_tests.gpu.helpers import BF16, DEVICE, FP16, FP32, error, exact, weight

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4


def codes_of(x):
    rows = quantize_rows_nvfp4.row_scales(x)
    return (*fp4.quantize_rows_nvfp4(x, rows), rows)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_codes_are_the_contracts(dtype):
    for m, k in ((1, 16), (70, 96), (3, 4112), (2048, 4096)):
        x = (torch.randn(m, k, device=DEVICE) * torch.logspace(-4, 4, m, device=DEVICE)[:, None]).to(dtype)
        if m > 3:
            x[1], x[2, 5], x[3, -1] = 0, float("nan"), float("inf")
        q, s, rows = codes_of(x)
        assert torch.equal(rows.cpu().nan_to_num(-1), quantize_rows_nvfp4.row_scales(x.cpu()).nan_to_num(-1))
        want = quantize_rows_nvfp4.reference(x.cpu(), rows.cpu())
        assert torch.equal(q.cpu(), want[0])
        assert torch.equal(s.view(torch.uint8).cpu(), want[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_tile(dtype):
    arch = host.arch(torch.device(DEVICE, torch.cuda.current_device()))
    for n, k in ((512, 1024), (4096, 4096), (33, 2112), (130, 80)):
        w, bias = weight(n, k), torch.randn(n, device=DEVICE).to(dtype)
        for m in (1, 65, 130, 300):
            x = codes_of(torch.randn(m, k, device=DEVICE).to(dtype))
            want = exact(quantize_rows_nvfp4.dequantize(*x), *w, bias)
            calls = [lambda b, x=x, w=w: fp4.linear_w4a4(*x, *w, b, dtype)]
            problem = Problem(m, n, k, arch, dtype)
            if arch >= 100 and host.row_for_codes("linear_w4a4", x[0], dtype, m, n, k).kernel == "triton_w4a4":
                calls += [
                    lambda b, x=x, w=w, p=problem, t=t: host.plus(run.by_triton(block_scaled.FORM, (*x, *w), p, t), b) for t in block_scaled.others(problem)
                ]
            if arch in (120, 121) and k % 64 == 0 and not csrc.why_not("linear_w4a4", arch):
                calls.append(lambda b, x=x, w=w, p=problem: by_form(mma_sync.LIBRARY, x, w, p, b))
            for call in calls:
                first = call(bias)
                assert error(first, want) <= 2 * linear_w4a4.CONTRACT.tolerance[dtype], (m, n, k)
                assert all(torch.equal(call(bias), first) for _ in range(20)), (m, n, k)


def test_compiled_replayed_and_explained():
    layer = FP4Linear.from_weight(torch.randn(512, 1024) / 32, torch.randn(512), prefill="nvfp4").to(DEVICE, BF16)
    compiled = torch.compile(lambda x: F.relu(layer(F.rms_norm(x, (1024,)))), fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (1, 64, 65, 2048):
            x = torch.randn(m, 1024, device=DEVICE).to(BF16)
            want = F.relu(layer(F.rms_norm(x, (1024,))))
            # the norm may differ by a rounding, and a code by a step
            assert error(compiled(x), want.double()) <= (0.03 if m > 64 else 0.01)
        (row,) = explain(layer, x).rows
        assert row.regime == "large_nvfp4"
        y, graph = layer(x), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = layer(x)
        for _ in range(100):
            z.fill_(float("nan"))
            graph.replay()
        assert torch.equal(z, y)


def test_the_candidate_serves_when_switched_on():
    arch = host.arch(torch.device(DEVICE, torch.cuda.current_device()))
    if arch not in (120, 121) or csrc.why_not("linear_w4a4", arch):
        pytest.skip("the row of the candidate names sm_120 and sm_121 with nvcc")
    w, x = weight(130, 1024), torch.randn(300, 1024, device=DEVICE).to(BF16)
    with dispatch(candidates=("cuda_w4a4",)):
        assert host.row_for("linear_w4a4", x, 300, 130, 1024).kernel == "cuda_w4a4"
        y = fp4.linear(x, *w, None, "nvfp4")
    assert error(y, exact(quantize_rows_nvfp4.dequantize(*codes_of(x)), *w)) <= 2 * linear_w4a4.CONTRACT.tolerance[BF16]
