"""One product with a global scale for each of its members, on a GPU: every kernel, each member by itself, experts with two scales, fusion."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from fp4_inductor.formats import nvfp4, sparse24
from fp4_inductor.kernels import host, select
from fp4_inductor.ops import moe
from fp4_inductor.ops.activation import Activation
from fp4_inductor.passes import matches, reset_matches
from lowering_tests.gpu import helpers
from lowering_tests.gpu.helpers import BF16, DEVICE, FP8_BOUND, FP16, FP32, error

pytestmark = pytest.mark.gpu
fp4 = torch.ops.fp4
FACTORS = (1.0, 0.04, 7.0, 0.3)  # of the global scales: one member's in place of another's is far off


def weight(n: int, k: int, sparse: bool) -> tuple[torch.Tensor, ...]:
    """The parts without the global scale."""
    return (helpers.sparse_weight if sparse else helpers.weight)(n, k)[:-1]


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "2:4"])
@pytest.mark.parametrize(
    ("n", "k", "rows", "dtype"),
    [
        (6144, 4096, [0, 4096, 5120], BF16),
        (6144, 4096, [0, 5, 6143], BF16),
        (1536, 1024, [0, 768], FP16),
        (1536, 1024, [0, 1, 50, 1529], BF16),  # more scales than a kernel takes
        (96, 64, [0, 64, 80], FP32),
    ],
    ids=str,
)
def test_each_member_by_itself(sparse, n, k, rows, dtype):
    op, name = (fp4.sparse_linear, "sparse_linear") if sparse else (fp4.linear, "linear")
    packed, spans = weight(n, k, sparse), list(itertools.pairwise([*rows, n]))
    g = torch.tensor(FACTORS[: len(rows)], device=DEVICE) * 0.3 / k**0.5
    decode = sparse24.dequantize_sparse24 if sparse else nvfp4.dequantize
    of_row = g.double().repeat_interleave(torch.tensor([b - a for a, b in spans], device=DEVICE))
    dense = decode(*packed, torch.ones((), device=DEVICE), FP32).double() * of_row[:, None]
    bias = torch.randn(n, device=DEVICE).to(dtype)
    for m in (1, 8, 16, 48, 200, 1024):
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        want = x.double() @ dense.T
        y, biased = op(x, *packed, g, None, "auto", rows), op(x, *packed, g, bias, "auto", rows)
        row = host.row_for(name, x, m, n, k, counts=select.Counts(scales=min(len(rows), 3)))
        count = min(b - a for a, b in spans) * m  # a handful of errors do not average
        if "fp8" in row.regime:
            bound = FP8_BOUND * min(3, 1 + 3 / count**0.5)
        else:
            bound = {BF16: 8e-3, FP16: 1e-3, FP32: 1e-5}[dtype] * (3 if count < 64 else 1)
        assert max(error(y[:, a:b], want[:, a:b]) for a, b in spans) <= bound, (m, row.kernel)
        assert error(biased, want + bias.double()) <= bound, (m, row.kernel)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "2:4"])
@pytest.mark.parametrize("act", [Activation(), Activation("swiglu_oai", 1.702, 7.0, True)], ids=["silu", "gpt-oss"])
def test_experts_with_a_scale_of_gate_and_of_up(sparse, act):
    e, top, h, inner = 8, 2, 2048, 768
    stacks = []
    for n, width in ((2 * inner, h), (h, inner)):
        parts = [weight(n, width, sparse) for _ in range(e)]
        stacks.append([torch.stack([p[i].view(torch.uint8) for p in parts]) for i in range(len(parts[0]))])
    metas = [p[1] if sparse else None for p in stacks]
    up, down = [(p[0], p[-1].view(nvfp4.SCALE_DTYPE)) for p in stacks]
    two = (torch.rand(e, 1, device=DEVICE) + 0.5) * torch.tensor([0.25, 4.0], device=DEVICE) * 0.2 / h**0.5
    of_down = (torch.rand(e, device=DEVICE) + 0.5) * 0.2 / inner**0.5
    form = select.moe_form(act.name, True, inner, e, False, (), select.moe_op(*metas))
    for tokens in (1, 8, 64, 512):
        x = torch.randn(tokens, h, device=DEVICE).to(BF16)
        w, ids = torch.rand(tokens, e, device=DEVICE).softmax(-1).topk(top)

        def args(g, x=x, w=w, ids=ids):
            return x, ids, w, *up, g, *down, of_down, None, None, *act.arguments(), False, None, "auto", *metas

        want = moe.CONTRACT.reference(*args(two, x.float())).double()
        swapped = moe.CONTRACT.reference(*args(two.flip(1), x.float())).double()
        row = host.row_for(select.moe_op(*metas), x, tokens * top, h, h, form=form, counts=select.Counts(e, 2))
        bound = 0.1 if "fp8" in row.regime else 1e-2
        assert error(fp4.moe(*args(two)), want) <= bound, (tokens, row.kernel)
        assert error(fp4.moe(*args(two)), swapped) > 0.3
        one, equal = fp4.moe(*args(two[:, 0].contiguous())), fp4.moe(*args(two[:, :1].repeat(1, 2)))
        assert error(equal, one.double()) <= bound, (tokens, row.kernel)


@pytest.mark.parametrize("m", [1, 8])
def test_gate_and_up_fuse(m):
    n, k = 6144, 4096
    (q, s), g = weight(n, k, False), torch.tensor(FACTORS[:2], device=DEVICE) * 0.3 / k**0.5
    dense = nvfp4.dequantize(q, s, torch.ones((), device=DEVICE), FP32).double() * g.double().repeat_interleave(n // 2)[:, None]

    def glu(x):
        gate, up = fp4.linear(x, q, s, g, None, "auto", [0, n // 2]).chunk(2, -1)
        return F.silu(gate) * up

    x = torch.randn(m, k, device=DEVICE).to(BF16)
    reset_matches()
    with torch._inductor.config.patch(force_disable_caches=True):  # the passes run
        y = torch.compile(glu, fullgraph=True, dynamic=False)(x)
    gate, up = (x.double() @ dense.T).chunk(2, -1)
    assert error(y, F.silu(gate) * up) <= 1.5e-2
    assert matches().get("linear_glu") == 1
