"""An RMSNorm becomes part of the linear layers that read it, however it is written, if their kernel takes one and a launch is saved.

Graphs on the CPU: the plan of a GPU is pretended (norm_kernels.py), and the op computes its steps one by one.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import fp4_inductor
from fp4_inductor import dispatch
from fp4_inductor.explain import Explanation
from fp4_inductor.passes import missed, norm
from fp4_inductor.passes.missed import APART, listen
from lowering_tests import norm_kernels
from lowering_tests.models.conftest import BASE, DENSE, MOE, build

BF16 = torch.bfloat16
K, N, EPS = 64, 48, 1e-5


def llama(x, w):
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return w * x32.to(x.dtype)


def gemma(x, w):
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w.float())).type_as(x)


def gpt_oss(x, w):
    x32 = x.float()
    return (w * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)


# Each with its offset.
SPELLINGS = {
    "Llama": (llama, 0.0),
    "Gemma": (gemma, 1.0),
    "gpt-oss": (gpt_oss, 0.0),
    "F.rms_norm": (lambda x, w: F.rms_norm(x, (K,), w, EPS), 0.0),
    "Gemma 3n": (lambda x, w: (x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + EPS, -0.5) * w.float()).to(x.dtype), 0.0),
    "square, division by a root": (lambda x, w: (x.float() / torch.sqrt(x.float().square().mean(-1, True) + EPS)).to(x.dtype) * w, 0.0),
    "reciprocal of a root": (lambda x, w: (x.float() * (1 / ((x.float() * x.float()).mean(-1, True) + EPS).sqrt())).to(x.dtype) * w, 0.0),
    "a sum and a division": (lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, True) / K + EPS)).to(x.dtype), 0.0),
    "no keepdim": (lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1) + EPS)[..., None]).to(x.dtype), 0.0),
    "in the dtype of x": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * w, 0.0),
    "w + 1 in its dtype": (lambda x, w: llama(x, w + 1), 1.0),
    "the weight as a row": (lambda x, w: llama(x, w[None]), 0.0),
    "behind a view": (lambda x, w: llama(x.view(1, 1, K), w).view(1, K), 0.0),
}
# What is no RMSNorm: nothing is said of it.
OTHERS = {
    "LayerNorm": lambda x, w: F.layer_norm(x, (K,), w),
    "over another dimension": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(0, keepdim=True) + EPS)).to(x.dtype),
    "over both": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean((0, 1), keepdim=True) + EPS)).to(x.dtype),
    "over a part of a row": lambda x, w: llama(x.view(-1, K // 2), w[: K // 2]).view(-1, K),
    "of another tensor": lambda x, w: w * (x.float() * torch.rsqrt((x + 1).float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),
    "fourth powers": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(4).mean(-1, keepdim=True) + EPS)).to(x.dtype),
    "a root that multiplies": lambda x, w: w * (x.float() * torch.sqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),
    "no eps": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))).to(x.dtype),
    "a sum over half of K": lambda x, w: w * (x.float() * torch.rsqrt(x.float().pow(2).sum(-1, True) / (K // 2) + EPS)).to(x.dtype),
    "times a number": lambda x, w: w * (2 * x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),
    "two weights": lambda x, w: w * (x.float() * w * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),
    "a weight for each row": lambda x, w: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * w.sum()[None, None],
    "rounded to float16 on the way": lambda x, w: (w.half() * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + EPS)).half()).to(x.dtype),
    "a sum": lambda x, w: w + (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype),
}
# What is one, and why it is left.
LEFT = {
    "its result": (lambda y, x, linear: (linear(y), y), "the graph's caller reads it, too"),
    "another operator": (lambda y, x, linear: (linear(y), y.cumsum(-1)), "aten.cumsum.default reads it, too"),
    "another operator, of a view": (lambda y, x, linear: (linear(y), y.view(-1).cumsum(-1)), "aten.cumsum.default reads it, too"),
    "a layer's other argument": (lambda y, x, linear: (linear(y), torch.ops.fp4.linear(y[:, :16], *fp4_weight())), "aten.slice.Tensor reads it, too"),
}


def fp4_weight():
    return torch.ops.fp4.quantize(torch.ones(N, 16, dtype=BF16))


class Layer(nn.Module):
    def __init__(self, norm, then=None, dtype=BF16, weight=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = fp4_inductor.quantize_model(nn.Sequential(nn.Linear(K, N, dtype=dtype)), progress=False)[0]
        self.w = nn.Parameter(torch.randn(K).to(weight or dtype), requires_grad=False)
        self.norm, self.then = norm, then

    def forward(self, x):
        y = self.norm(x, self.w)
        return self.linear(y) if self.then is None else self.then(y, x, self.linear)


@pytest.fixture
def folded(compiled):
    """``folded(model, *args)``: compiled for the pretended GPU; what was compiled, and what was left apart."""

    def run(model, *args, **options):
        with norm_kernels.on_a_cpu(), listen() as left:
            c = compiled(model, *args, **options)
        left = [m for m in left if m.what == APART]
        want, got = ([r] if isinstance(r, torch.Tensor) else list(r) for r in (model(*args), c.result))
        for a, b in zip(got, want, strict=True):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2
        return c, [m.reason for m in left]

    return run


def called(graph: str) -> list[str]:
    """The fp4 ops of a graph in order."""
    return re.findall(r"= fp4\.(\w+)\.default", graph)


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling(folded, name):
    written, offset = SPELLINGS[name]
    c, left = folded(Layer(written), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({"norm_linear": 1}, [])
    [arguments] = re.findall(r"fp4\.norm_linear\.default\((.*?)\)", c.graph)
    assert [float(a) for a in arguments.split(", ")[2:4]] == pytest.approx([EPS, offset], rel=1e-6)
    assert "rsqrt" not in c.graph and "mean" not in c.graph and "sum" not in c.graph


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(folded, dtype):
    c, left = folded(Layer(llama, dtype=dtype), torch.randn(1, K).to(dtype))
    # No kernel of these plans takes float32, so there is nothing to say.
    assert (c.matches, left) == ({"norm_linear": 1} if dtype == torch.float16 else {}, [])


def test_the_graph(folded):
    c, _ = folded(Layer(gemma), torch.randn(1, 1, K).to(BF16))
    assert_expected_inline(
        c.graph,
        """\
v0 = fp4.norm_linear.default(in1, in0, 1e-05, 1.0, in3, in4, in5, in2)
return v0""",
    )


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_is_left(folded, name):
    assert (lambda c, left: (c.matches, left))(*folded(Layer(OTHERS[name]), torch.randn(1, K).to(BF16))) == ({}, [])


@pytest.mark.parametrize("name", LEFT)
def test_what_else_reads_it(folded, name):
    then, reason = LEFT[name]
    c, left = folded(Layer(llama, then), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({}, [reason])


def test_two_layers_that_read_one_norm(folded):
    """Each computes it: no kernel of it is left."""

    class Two(Layer):
        def __init__(self):
            super().__init__(llama)
            self.other = fp4_inductor.quantize_model(nn.Sequential(nn.Linear(K, 32, dtype=BF16)), progress=False)[0]

        def forward(self, x):
            y = self.norm(x, self.w)
            return self.linear(y), self.other(y[None])

    c, left = folded(Two(), torch.randn(1, K).to(BF16))
    assert (c.matches, left, called(c.graph)) == ({"norm_linear": 2}, [], ["norm_linear"] * 2)


def test_what_stands_behind_the_layer(folded):
    """An activation and a residual are part of the call, too."""
    c, left = folded(Layer(llama, lambda y, x, linear: F.gelu(linear(y)) + x[:, :N]), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({"norm_linear": 1, "norm_linear_epilogue": 1}, [])
    assert_expected_inline(
        c.graph,
        """\
v0 = aten.slice.Tensor(in1, 1, 0, 48)
v1 = fp4.norm_linear_epilogue.default(in1, in0, 1e-05, 0.0, in3, in4, in5, in2, gelu, None, v0, auto)
return v1""",
    )


def test_two_layers_one_of_which_has_no_such_kernel(folded, monkeypatch):
    class Gated(Layer):
        def __init__(self):
            super().__init__(llama)
            self.gate_up = fp4_inductor.quantize_model(nn.Sequential(nn.Linear(K, 2 * N, dtype=BF16)), progress=False)[0]

        def forward(self, x):
            y = self.norm(x, self.w)
            gate, up = self.gate_up(y).chunk(2, -1)
            return self.linear(y), F.silu(gate) * up

    model, x = Gated(), torch.randn(1, K).to(BF16)
    assert folded(model, x)[0].matches == {"linear_glu": 1, "norm_linear": 1, "norm_linear_glu": 1}
    monkeypatch.setitem(norm_kernels.KERNELS, "linear_glu", norm_kernels.kernel("linear_glu", "glu", takes_norm=False))
    c, left = folded(model, x)
    assert (c.matches, left) == ({"linear_glu": 1}, ["M is 1: no kernel takes one in front of linear_glu_default"])


@pytest.mark.parametrize(("rows", "dynamic", "reason"), [(2, False, "M is 2"), (5, True, "M is dynamic")])
def test_rows_that_the_kernel_does_not_take(folded, rows, dynamic, reason):
    x = torch.randn(rows, K).to(BF16)
    if dynamic:
        torch._dynamo.mark_dynamic(x, 0)
    c, left = folded(Layer(llama), x)
    assert (c.matches, left) == ({}, [f"{reason}: row takes one, up to M = 1"])


def test_weights(folded):
    x = torch.randn(1, K).to(BF16)
    float32 = lambda x, w: (w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS))).to(x.dtype)  # noqa: E731
    assert folded(Layer(float32, weight=torch.float32), x)[1] == ["it reads bfloat16, multiplies by float32 and gives bfloat16: kernels take one dtype"]
    assert folded(Layer(lambda x, w: F.rms_norm(x, (K,), None, EPS)), x)[1] == ["it has no weight"]
    assert folded(Layer(lambda x, w: llama(x, w * 2 + w.abs())), x)[1] == ["its weight is computed by the graph"]
    wide = Layer(lambda x, w: llama(x, w).to(BF16), weight=torch.float32)
    assert folded(wide, torch.randn(1, K))[1] == ["it reads float32, multiplies by float32 and gives bfloat16: kernels take one dtype"]


@pytest.mark.parametrize(
    "before",
    [lambda x: x * 2, lambda x: x + x.mean(-1, keepdim=True), lambda x: F.embedding(x.long().abs()[:, 0], torch.ones(9, K, dtype=BF16))],
    ids=["a pointwise kernel", "a reduction", "an embedding"],
)
def test_a_kernel_that_makes_its_input_computes_it(folded, before):
    c, left = folded(Layer(lambda x, w: llama(before(x), w)), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({}, ["the kernel that makes its input computes it on the way"])


def test_a_write_between_them(folded, monkeypatch):
    monkeypatch.setattr(norm, "in_one_mutation_region", lambda nodes: len(list(nodes)) < 5)
    c, left = folded(Layer(llama), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({}, ["something is written between it and a linear layer"])


def test_a_part_of_it_that_something_else_reads(folded):
    class Part(Layer):
        def forward(self, x):
            root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
            return self.linear(self.w * (x.float() * root).to(x.dtype)), root.cumsum(0)

    c, left = folded(Part(None), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({}, ["something else reads a part of it"])


def test_the_graph_of_a_cpu_stays_as_it_is(compiled):
    with listen() as left:
        c = compiled(Layer(llama), torch.randn(1, K).to(BF16))
    assert (c.matches, left) == ({}, [])


def test_what_explain_prints():
    left = [missed.Missed(f"mul_{i}", "[2, 64]", "M is 2: row takes one, up to M = 1", APART) for i in range(2)]
    text = Explanation([], {}, [*left, missed.Missed("dequantize", "[4, 8, 8]", "no layer")]).text(200)
    assert "left apart: 2 norms [2, 64] (mul_0, mul_1) are not part of a linear layer: M is 2: row takes one, up to M = 1" in text
    assert "left dense: dequantize [4, 8, 8] is dequantized: no layer" in text
    assert str(left[0]) == "mul_0 [2, 64] is not part of a linear layer: M is 2: row takes one, up to M = 1"


# --- decoder layers -------------------------------------------------------------------------------------------------

# Of models with two layers. The first norm's input is an embedding; the sum behind the last layer is part of the model's last norm.
PRE_NORM = dict(glu=2, folded=1, sums=3)
MODELS = {
    "llama": PRE_NORM, "mistral": PRE_NORM, "qwen2": PRE_NORM, "qwen3": PRE_NORM, "gemma": PRE_NORM, "phi3": PRE_NORM,
    # Norms behind attention and the MLP: their kernel computes the next one, too.
    "gemma2": dict(glu=0, folded=0, sums=0), "gemma3": dict(glu=0, folded=0, sums=0),
    # The sum behind experts is a kernel of Inductor's, and a router reads the norm in front of them.
    "mixtral": dict(glu=0, folded=0, sums=0), "gpt_oss": dict(glu=0, folded=0, sums=0),
}  # fmt: skip
MORE = {
    "gemma": ("GemmaConfig", {"intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": True}),
}


def decode_step(family):
    import transformers

    if family in DENSE | MOE:
        model = build(family, BF16)
    else:
        torch.manual_seed(0)
        name, fields = MORE[family]
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | fields), dtype=BF16).eval()
    model = fp4_inductor.quantize_model(model, progress=False)
    return lambda ids: model(input_ids=ids, use_cache=False).logits


AS_ANOTHER = ("mistral", "qwen2", "gemma2")  # as Llama, and as Gemma 3


@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.slow if family in AS_ANOTHER else ()) for family in MODELS])
def test_families(folded, family):
    c, left = folded(decode_step(family), torch.tensor([[5]]))
    want = MODELS[family]
    found = {name: c.matches.get(name, 0) for name in ("norm_linear_glu", "norm_linear", "norm_linear_siblings", "linear_epilogue")}
    qkv = "norm_linear" if family == "phi3" else "norm_linear_siblings"
    expected = dict.fromkeys(found, 0) | {"norm_linear_glu": want["glu"], qkv: want["folded"], "linear_epilogue": want["sums"]}
    assert found == expected
    assert set(left) <= {"the kernel that makes its input computes it on the way"}


def test_a_layer_of_a_decode_step(folded):
    """From the first layer's MLP to that of the second: nothing but attention, and what it needs, is left between the linear layers."""
    with dispatch(thresholds={"chain": 0}):
        c, _ = folded(decode_step("llama"), torch.tensor([[5]]))
    first = ["linear_siblings", "linear_epilogue", "norm_linear_glu", "linear_epilogue"]  # its norm's input is an embedding
    last = ["norm_linear_siblings", "linear_epilogue", "norm_linear_glu", "linear"]  # the sum behind it is part of the model's last norm
    assert called(c.graph) == [*first, *last]


def test_a_prompt_has_its_norms_as_before(folded):
    c, left = folded(decode_step("llama"), torch.tensor([[5, 6, 7]]))
    assert not any("norm" in name for name in c.matches)
    assert set(left) == {"M is 3: row takes one, up to M = 1", "M is 3: row_glu takes one, up to M = 1"}
