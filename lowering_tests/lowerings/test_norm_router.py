"""The norm in front of a router becomes part of its launch: where, where not, and what ``explain()`` says then. On a pretended GPU."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import dispatch, passes
from fp4_inductor.lowerings import journal
from fp4_inductor.modules import FP4Linear
from fp4_inductor.passes.missed import APART, listen
from lowering_tests.fake_cuda import call, code_generation
from lowering_tests.lowerings.test_moe_lowering import E, H, Router


class Layer(torch.nn.Module):
    """``experts(router(norm(y))) + y``, ``y = o(x) + x``; ``before``: what stands ahead of the norm."""

    def __init__(self, before=lambda y: y, weighted=True, dtype=torch.bfloat16):
        super().__init__()
        self.mlp, self.before = Router("normalized rounded", dtype), before
        self.o = FP4Linear(H, H, bias=False, dtype=dtype, device="cuda")
        self.norm = torch.nn.Parameter(torch.empty(H, dtype=dtype, device="cuda"), requires_grad=False) if weighted else None

    def forward(self, x):
        x = self.before(self.o(x) + x)
        wide = x.float()
        h = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        if self.norm is not None:
            h = self.norm * h
        return self.mlp(h.view(-1, H)).view(x.shape) + x


def compiled(*shape, kind=Layer, dynamic=False, csrc="", **options):
    """The code, and why norms were left."""
    passes.reset_matches()
    with code_generation(csrc=csrc) as out, listen() as left:
        x = torch.empty(*shape, H, dtype=torch.bfloat16, device="cuda")
        call(torch.compile(kind(**options), fullgraph=True, dynamic=dynamic), x)
    return out[0], [one.reason for one in left if one.what == APART]


@pytest.mark.parametrize("shape", [(8,), (64,), (4, 16), (8, 1)])
def test_it_is_one_launch(shape):
    """Also of tokens in several dimensions, as a decoder layer has them."""
    code, left = compiled(*shape)
    assert not left and passes.matches()["norm_router"] == 1
    assert code.count("torch.ops.fp4.norm_router.default(") == 1 and "fp4.router" not in code and "rsqrt" not in code
    assert "'normalized', torch.bfloat16, True)" in code, "the layer in front of it is a kernel of this graph"


def test_a_dynamic_number_of_few_tokens():
    """A guard says how many there are, as at other kernels with a largest M."""
    code, left = compiled(16, dynamic=True)
    assert not left and code.count("torch.ops.fp4.norm_router.default(") == 1 and "rsqrt" not in code


@pytest.mark.parametrize(("tokens", "kernel", "note"), [(8, "cuda_router", "the RMSNorm of its input is in the kernel"), (72, "scores + choice", "")])
def test_what_explain_is_told(tokens, kernel, note):
    with journal.listen() as entries:
        compiled(tokens)
    (entry,) = (entry for entry in entries if entry.op == "fp4.router")
    assert (entry.m, entry.n, entry.k, entry.decision.how, entry.decision.row.kernel) == (str(tokens), E, H, "proven", kernel)
    assert entry.note == "; ".join(filter(None, (note, "begins while the kernel before it runs")))


def test_what_else_reads_it_reads_what_the_launch_writes():
    class Shared(Layer):
        def forward(self, x):
            x = self.o(x)
            h = torch.nn.functional.rms_norm(x, (H,), self.norm, 1e-6)
            return self.mlp(h) + torch.sigmoid(h)

    code, left = compiled(8, kind=Shared)
    assert not left and "torch.ops.fp4.norm_router.default(" in code and "rsqrt" not in code


HOW_MANY = "72 tokens: cuda_router takes a norm of 8 to 64, known at compile time"


@pytest.mark.parametrize(
    ("layer", "shape", "dynamic", "reason"),
    [
        ({}, (72,), False, HOW_MANY),
        ({}, (1,), False, HOW_MANY.replace("72", "1")),
        ({}, (200,), True, HOW_MANY.replace("72", "a dynamic number of")),
        (dict(before=torch.sin), (8,), False, "the kernel that makes its input computes it on the way"),
        (dict(weighted=False), (8,), False, "it has no weight"),
    ],
)
def test_where_it_stays(layer, shape, dynamic, reason):
    code, left = compiled(*shape, dynamic=dynamic, **layer)
    assert left == [reason]
    assert "fp4.norm_router" not in code and code.count("torch.ops.fp4.router.default(") == 1


def test_nothing_is_said_where_there_is_no_such_kernel():
    code, left = compiled(8, csrc="nvcc is not here")
    assert not left and "torch.ops.fp4.router.default(" in code
    with dispatch(thresholds={"router": 0}):
        code, left = compiled(8)
    assert not left and "torch.ops.fp4.router.default(" in code
