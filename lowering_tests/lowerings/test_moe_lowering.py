"""fp4.moe in compiled graphs: one call, one graph for every number of tokens, and the regime that T * k lies in told in the journal."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fp4_inductor import explain, passes
from fp4_inductor._torch import capture
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import FP4Experts, FP4ExpertWeight, Sparse24ExpertWeight
from fp4_inductor.ops.activation import Activation
from fp4_inductor.ops.moe_call import fields_of_parts, flat
from lowering_tests.fake_cuda import call, code_generation

E, H, INNER, K = 16, 128, 64, 2
FP8 = "dequantize_fp8 + triton_grouped_fp8"


def experts(device="cuda", dtype=torch.bfloat16, kinds=(FP4ExpertWeight, FP4ExpertWeight), act=Activation("swiglu_oai", 1.702, 7.0, True), **options):  # noqa: B008
    kind = dict(dtype=dtype, device=device)
    first, down = kinds[0](E, 2 * INNER, H, bias=True, **kind), kinds[1](E, H, INNER, **kind)
    return FP4Experts(first, down, act, **options)


def tokens(t, dtype=torch.bfloat16, device="cuda"):
    x = torch.empty(t, H, dtype=dtype, device=device)
    return x, torch.zeros(t, K, dtype=torch.int64, device=device), torch.empty(t, K, device=device)


@pytest.mark.parametrize(
    ("t", "kernel"), [(1, "triton_moe_decode"), (24, "triton_moe_decode"), (25, "triton_moe_grouped"), (1000, "dequantize_fp8 + triton_grouped_fp8")]
)
def test_static_tokens_are_proven(t, kernel):
    with code_generation() as out, listen() as entries:
        call(torch.compile(experts(), fullgraph=True, dynamic=False), *tokens(t))
    (entry,) = entries
    assert (entry.op, entry.m, entry.n, entry.k, entry.experts) == ("fp4.moe", str(t * K), H, H, E)
    assert (entry.decision.how, entry.decision.row.kernel) == ("proven", kernel)
    assert len(list(filter(None, out))) == 1
    assert out[0].count("torch.ops.fp4.moe.default(") == 1


@pytest.mark.parametrize(("t", "kernel"), [(4, "triton_moe_decode"), (5, "cuda_moe_wide"), (192, "cuda_moe_wide"), (193, "cuda_moe_wide_fp8")])
def test_where_the_cuda_kernels_are_compiled(t, kernel):
    with code_generation(csrc="") as out, listen() as entries:
        call(torch.compile(experts(), fullgraph=True, dynamic=False), *tokens(t))
        call(torch.compile(experts(act=Activation("gelu")), fullgraph=True, dynamic=False), *tokens(t))
    assert [e.decision.row.kernel for e in entries] == [kernel, "triton_moe_decode" if t < 10 else "triton_moe_grouped"]
    assert out[0].count("torch.ops.fp4.moe.default(") == 1
    refused = {r.kernel.name: r.reason for r in entries[1].refused}
    assert refused["cuda_moe_wide"] == 'does not take activation="gelu"'


class Rank(torch.nn.Module):
    """One of two ranks, with half of the experts: it sees every token."""

    def __init__(self):
        super().__init__()
        self.experts = experts()
        self.register_buffer("map", torch.zeros(2 * E, dtype=torch.int32, device="cuda"))

    def forward(self, x, ids, weights):
        parts = [fields_of_parts(w.parts(), w.bias) for w in (self.experts.first, self.experts.down_proj)]
        return torch.ops.fp4.moe.default(*flat((x, ids, weights), *parts, self.experts.activation, expert_map=self.map))


@pytest.mark.parametrize(("t", "kernel"), [(8, "triton_moe_decode"), (10, "cuda_moe_wide"), (384, "cuda_moe_wide"), (385, "cuda_moe_wide_fp8")])
def test_a_rank_expects_its_share_of_the_assignments(t, kernel):
    """Bounds of the test above, twice: half of the assignments are another rank's."""
    with code_generation(csrc=""), listen() as entries:
        call(torch.compile(Rank(), fullgraph=True, dynamic=False), *tokens(t))
    assert [(e.decision.how, e.decision.row.kernel, e.experts) for e in entries] == [("proven", kernel, 2 * E)]


@pytest.mark.parametrize("kinds", [(Sparse24ExpertWeight, Sparse24ExpertWeight), (FP4ExpertWeight, Sparse24ExpertWeight)])
@pytest.mark.parametrize(
    ("t", "kernel"),
    [(1, "triton_sparse_moe_decode"), (25, "triton_sparse_moe_grouped"), (1000, "sparse_dequantize_fp8 + triton_grouped_fp8")],
)
def test_sparse_experts_have_rows_of_their_own(t, kernel, kinds):
    with code_generation() as out, listen() as entries:
        call(torch.compile(experts(kinds=kinds), fullgraph=True, dynamic=False), *tokens(t))
    (entry,) = entries
    assert (entry.op, entry.m, entry.n, entry.k, entry.experts) == ("fp4.moe", str(t * K), H, H, E)
    assert (entry.decision.how, entry.decision.row.kernel) == ("proven", kernel)
    assert out[0].count("torch.ops.fp4.moe.default(") == 1


def test_one_graph_for_every_number_of_tokens():
    with code_generation() as out, listen() as entries:
        compiled = torch.compile(experts(), fullgraph=True)
        for t in (7, 2, 100, 4000, 33):
            args = tokens(t)
            for a in args:
                torch._dynamo.mark_dynamic(a, 0)
            call(compiled, *args)
    assert len(list(filter(None, out))) == 1
    (entry,) = entries
    assert (entry.decision.row, entry.decision.how) == (None, "runtime")
    assert "one graph" in entry.decision.note


def test_a_promised_range_proves_the_regime():
    with code_generation() as out, listen() as entries:
        compiled = torch.compile(experts(), fullgraph=True)
        args = tokens(4)
        torch._dynamo.mark_dynamic(args[0], 0, min=2, max=4)
        for a in args[1:]:
            torch._dynamo.mark_dynamic(a, 0, min=2, max=4)
        call(compiled, *args)
    assert len(list(filter(None, out))) == 1
    assert (entries[0].decision.how, entries[0].decision.row.kernel) == ("proven", "triton_moe_decode")


def explained(t, csrc, dtype=torch.bfloat16, **options):
    with code_generation(csrc=csrc):
        compiled = torch.compile(experts(dtype=dtype, **options), dynamic=False)
        again = capture.compile_again
        with mock.patch.object(capture, "compile_again", lambda *a: call(lambda: again(*a))):
            (row,) = explain(compiled, *tokens(t, dtype)).rows
    return row


def test_explain_tells_which_kernels_could_not_serve_a_layer():
    row = explained(9, "")
    assert (row.kernel, row.regime) == ("cuda_moe_wide", "wide")
    assert dict(row.refused)["triton_moe_grouped"].startswith("kernels/choose/sm90.py prefers triton_moe_decode, cuda_moe_wide, ")
    assert row.note.startswith(f"fp4.moe, {E} experts") and "cuda_moe_wide: " in row.note
    row = explained(100, "", act=Activation("gelu_tanh"))
    assert row.kernel == "triton_moe_grouped"
    assert ("cuda_moe_wide", 'does not take activation="gelu_tanh"') in row.refused
    assert ("cuda_moe_wide", "no nvcc") in explained(100, "no nvcc").refused


def test_explain_tells_kernel_and_refusals():
    row = explained(3, "no nvcc", torch.float16)
    assert (row.op, row.m, row.kernel, row.decision) == ("fp4.moe", "6", "triton_moe_decode", "proven")
    assert any(kernel == "dequantize_fp8 + triton_grouped_fp8" and "float16" in why for kernel, why in row.refused)
    assert f"{E} experts" in row.note


def test_on_a_cpu_compiled_is_eager():
    torch.manual_seed(0)
    from fp4_inductor.modules.experts import quantize_stack

    layer = FP4Experts(quantize_stack(torch.randn(E, 2 * INNER, H), None), quantize_stack(torch.randn(E, H, INNER), None), Activation())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for t in (5, 1, 0, 40):
        args = (torch.randn(t, H), torch.randint(-1, E + 1, (t, K)), torch.rand(t, K))
        assert torch.equal(compiled(*args), layer(*args))
    row = explain(layer, *args).rows[0]
    assert (row.op, row.m, row.n, row.k, row.kernel, row.decision) == ("fp4.moe", "80", H, H, "cpu", "runtime")
    assert explain(compiled, *args).rows[0].decision == "proven"


def routed(module, **how):
    """A layer behind its router: scores, the best of them, their weights."""

    def layer(x, scores):
        weights, ids = torch.topk(scores.softmax(-1), K, **how)
        return module(x, ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype))

    return layer


@pytest.mark.parametrize(
    ("how", "scores", "taken"),
    [({}, E, True), ({"dim": -1, "sorted": False}, E, True), ({"largest": False}, E, False), ({"dim": 0}, E, False), ({}, 1025, False)],
    ids=str,
)
def test_the_choice_of_experts_is_one_kernel(how, scores, taken):
    passes.reset_matches()
    t = K if how.get("dim") == 0 else 5
    with code_generation() as out, listen():
        call(torch.compile(routed(experts(), **how), fullgraph=True), tokens(t)[0], torch.empty(t, scores, device="cuda"))
    assert out[0].count("torch.ops.fp4.topk.default(") == taken
    assert out[0].count("aten.topk.default(") == (not taken)
    assert passes.matches().get("topk", 0) == taken


class Router(torch.nn.Module):
    """A layer behind the router of one of the families, as Transformers writes them."""

    def __init__(self, family, dtype=torch.bfloat16):
        super().__init__()
        self.family, self.experts = family, experts(dtype=dtype)
        self.weight = torch.nn.Parameter(torch.empty(E, H, dtype=dtype, device="cuda"), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(E, dtype=dtype, device="cuda"), requires_grad=False)

    def forward(self, x):
        logits = torch.nn.functional.linear(x, self.weight, self.bias if "biased" in self.family else None)
        if "chosen" in self.family:
            top, ids = torch.topk(logits, K, dim=-1)
            return self.experts(x, ids, torch.softmax(top, dim=1, dtype=top.dtype))
        if "sigmoid" in self.family:
            weights, ids = torch.topk(logits.float().sigmoid(), K)
            return self.experts(x, ids, weights)
        probabilities = torch.softmax(logits, dtype=torch.float, dim=-1)
        weights, ids = torch.topk(probabilities, K, dim=-1)
        if "normalized" in self.family:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if "temperature" in self.family:
            weights = weights / 2.0
        y = self.experts(x, ids, weights.to(logits.dtype) if "rounded" in self.family else weights)
        return (y, probabilities) if "read" in self.family else (y, logits) if "logits" in self.family else y


@pytest.mark.parametrize("t", [1, None], ids=["T = 1", "any T"])
@pytest.mark.parametrize(
    ("family", "form", "dtype"),
    [
        ("softmax rounded", "softmax", torch.bfloat16),
        ("softmax", "softmax", torch.float32),
        ("normalized rounded", "normalized", torch.bfloat16),
        ("normalized", "normalized", torch.float32),
        ("normalized biased", "normalized", torch.float32),
        ("chosen biased", "chosen", torch.bfloat16),
        ("chosen", "chosen", torch.bfloat16),
        ("softmax temperature", "softmax", torch.float32),
    ],
)
def test_the_router_is_one_op(family, form, dtype, t):
    passes.reset_matches()
    with code_generation() as out, listen():
        call(torch.compile(Router(family), fullgraph=True, dynamic=t is None), tokens(t or 40)[0])
    (line,) = (line for line in out[0].splitlines() if "torch.ops.fp4.router.default(" in line)
    assert f", {K}, '{form}', {dtype}, False)" in line
    assert "aten.topk" not in out[0] and "fp4.topk" not in out[0] and "extern_kernels.mm" not in out[0] and "extern_kernels.addmm" not in out[0]
    assert passes.matches().get("router", 0) == 1
    kernels = out[0].count("triton_poi_fused") + out[0].count("triton_per_fused") + out[0].count("triton_red_fused")
    assert bool(kernels) == ("temperature" in family), "nothing is left of it but what fp4.router does not do"


def test_the_router_under_max_autotune():
    with torch._inductor.config.patch(coordinate_descent_tuning=True), code_generation() as out, listen():
        call(torch.compile(Router("normalized rounded"), fullgraph=True, dynamic=False), tokens(1)[0])
    assert out[0].count("torch.ops.fp4.router.default(") == 1 and "triton_per_fused" not in out[0] and "triton_red_fused" not in out[0]


@pytest.mark.parametrize("family", ["sigmoid", "softmax read", "normalized logits"])
def test_of_other_routers_the_choice_alone(family):
    passes.reset_matches()
    with code_generation() as out, listen():
        call(torch.compile(Router(family), fullgraph=True), tokens(8)[0])
    assert "torch.ops.fp4.topk.default(" in out[0] and "fp4.router" not in out[0]
    assert not passes.matches().get("router", 0)


def test_other_choices_stay_as_they_are():
    with code_generation() as out, listen():
        call(torch.compile(lambda x: torch.topk(x, 4), fullgraph=True), torch.empty(5, E, device="cuda"))
    assert "fp4.topk" not in out[0]
