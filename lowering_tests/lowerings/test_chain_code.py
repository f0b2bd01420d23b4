"""Generated CUDA code of products that are one launch: fp4.linear_chain between two attentions. No GPU (fake_cuda.py).

The stand-in for a GPU traces no call that writes its inputs, so that the caches and their arrivals are made in the graph here.
"""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from fp4_inductor import FP4Linear, _engines, dispatch
from fp4_inductor.lowerings.journal import listen
from fp4_inductor.modules import SiblingWeight, pack_siblings
from fp4_inductor.ops.linear_chain import ARRIVALS
from fp4_inductor.passes import matches, missed, reset_matches
from fp4_inductor.passes.missed import UNCHAINED
from lowering_tests.fake_cuda import call_body, generated_code

BF16 = torch.bfloat16
K, HEADS, KV_HEADS, D, INNER, LENGTH, EPS = 1024, 8, 2, 128, 1536, 256, 1e-6


def normalized(x, weight):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


class DecoderLayer(nn.Module):
    """A layer of a Llama over a cache."""

    def __init__(self):
        super().__init__()
        options = dict(bias=False, dtype=BF16, device="cuda")
        for name in ("first", "second"):
            self.register_buffer(name, torch.ones(K, dtype=BF16, device="cuda"))
        self.q, self.k, self.v = (FP4Linear(K, n * D, **options) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.o, self.down = FP4Linear(HEADS * D, K, **options), FP4Linear(INNER, K, **options)
        self.gate, self.up = (FP4Linear(K, INNER, **options) for _ in range(2))
        with mock.patch.object(SiblingWeight, "refresh", lambda self: setattr(self, "shared", False)):  # values of fake tensors cannot be compared
            pack_siblings([self.q, self.k, self.v])
            pack_siblings([self.gate, self.up])

    def forward(self, x, keys, values, arrivals, position):
        h = normalized(x, self.first)
        q, k, v = (f(h).view(1, 1, -1, D).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = torch.ops.fp4.cached_attention(q, k, v, keys, values, position, arrivals=arrivals)
        x = x + self.o(attended.reshape(1, 1, -1))
        h = normalized(x, self.second)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64, device="cuda"))

    def forward(self, x, cache, arrivals):
        arrivals = arrivals * 2
        for i, layer in enumerate(self.layers):
            x = layer(x, cache * (2 * i + 2), cache * (2 * i + 3), arrivals, self.position)
        return x


def compiled(build=Decoder, rows=1, csrc="", **options):
    """``(the wrapper's call, journal, matches, why products were left apart)``"""
    reset_matches()
    shapes = [((1, rows, K), BF16), ((1, KV_HEADS, LENGTH, D), BF16), ((ARRIVALS,), torch.int32)]
    with listen() as entries, missed.listen() as left, dispatch(**options):
        code = generated_code(build, shapes, csrc=csrc)[0]
    return call_body(code), entries, matches(), [m.reason for m in left if m.what == UNCHAINED]


def launched(body: str) -> list[str]:
    """The kernels of a wrapper in order, but those that make the caches."""
    names = re.findall(r"(?:(triton_\w+?)_\d+\.run|torch\.ops\.(?:fp4|fp4_csrc)\.(\w+)\.default)\(", body)
    return [a or b for a, b in names if a != "triton_poi_fused_mul"]


def arguments(body: str, op: str) -> list[str]:
    return re.findall(rf"{op}\.default\((.*)\)\n", body)


@pytest.fixture
def engine():
    remove = _engines.add_provider(lambda: True)
    yield
    remove()


LAYER = ["cached_attention", "linear_chain"]


def test_three_layers_are_seven_launches():
    """Two a layer, and q, k and v of the first one."""
    body, entries, counted, left = compiled(lambda: Decoder(3))
    assert launched(body) == ["linear_gemv", *LAYER, *LAYER, *LAYER]
    assert (counted["linear_chain"], left) == (3, [])
    chains = [e for e in entries if e.op == "fp4.linear_chain"]
    assert [e.module for e in chains] == [f"layers.{i + (name == 'q')}.{name}" for i in range(3) for name in ("o", "gate", "down", "q")][:-1]
    assert {e.decision.row.kernel for e in chains} == {"cuda_gemv_chain"} and {e.decision.how for e in chains} == {"proven"}
    assert [e.note for e in chains[:4]] == [
        "product 1 of 4 of one launch; in the kernel: + residual; begins while the kernel before it runs",
        "one call for siblings: gate, up; product 2 of 4 of one launch; the RMSNorm of its input is in the kernel; silu(gate) * up",
        "product 3 of 4 of one launch; in the kernel: + residual",
        "one call for siblings: q, k, v; product 4 of 4 of one launch; 3 global scales; the RMSNorm of its input is in the kernel",
    ]
    assert chains[-1].note == "product 3 of 3 of one launch; in the kernel: + residual"


def test_the_code():
    """All meet in one buffer, of which no copy is made; attention reads q, k and v where their product lies."""
    body = compiled()[0]
    first, second = arguments(body, "linear_chain")
    assert_expected_inline(
        first.replace("], ", "],\n"),
        """\
reinterpret_tensor(b6, (1, 1024), (1024, 1), 0), [in8, in9, in10, in11],
[in12, in13, in14, in15],
[in16, in17, in18, in19],
[None, None, None, None],
[None, in20, None, in21],
[reinterpret_tensor(in0, (1, 1024), (1024, 1), 0), None, None, None],
[-1, -1, 0, -1],
[0.0, 1e-06, 0.0, 1e-06],
[0.0, 0.0, 0.0, 0.0],
[0, 1, 0, 0],
[0, 1, 0, 0],
[0, 0, 1536, 0, 0, 0, 1024, 1280],
b5, None, (), (), 0, 1, 90""",
    )
    assert re.search(r"\[None, in\d+, None\], \[b8, None, None\], \[-1, -1, 0\], .* \[0, 0, 1536, 0, 0, 0\], b5, None, \(\), \(\), 0, 1, 90$", second)
    assert [given.split(", ")[-2] for given in arguments(body, "cached_attention")] == ["b5", "b5"]
    assert len(re.findall(r"reinterpret_tensor\(b9, \(1, [82], 1, 128\)", arguments(body, "cached_attention")[1])) == 3 and "b9 = b7[3]" in body


def test_where_it_may_not_begin_early():
    body, entries, *_ = compiled(early="never")
    assert all(given.endswith(", 0, 90") for given in arguments(body, "linear_chain"))
    assert entries[2].note.endswith('not begun early: DispatchConfig(early="never")')


class Alone(nn.Module):
    """Two pieces of a decoder as an engine compiles them, each behind an attention that is not in the graph."""

    def __init__(self, products=3):
        super().__init__()
        self.layers = nn.ModuleList(FP4Linear(K, K, bias=False, dtype=BF16, device="cuda") for _ in range(2 * products))

    def forward(self, x, cache, arrivals):
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != len(self.layers) // 2 else layer(x.cumsum(-1).to(x.dtype))
        return x


def test_zeros_of_its_own():
    """One buffer for both, which is zeroed at each call: calls on several streams have one each."""
    body, (first, *others), counted, left = compiled(Alone)
    assert (counted["linear_chain"], left) == (2, [])
    assert launched(body)[:2] == ["triton_poi_fused", "linear_chain"] and launched(body)[-1] == "linear_chain"
    assert launched(body).count("triton_poi_fused") == 1
    [buffer] = {given.split(", ")[-3] for given in arguments(body, "linear_chain")}
    assert re.search(rf"{buffer} = empty_strided_cuda\(\({ARRIVALS}, \), \(1, \), torch.int32\)", body) and "fp4_arrivals" not in body
    assert "what its blocks meet in is filled at each call of the graph: its calls may run at the same time" in first.note
    assert not any("blocks meet" in e.note for e in others if not e.note.startswith("product 1"))


@pytest.mark.parametrize("products", [2, 3])
def test_zeros_that_the_graph_keeps(engine, products):
    """An engine's graph is called on one stream at a time: a constant, for all of its launches, and no launch that fills it."""
    body, entries, counted, left = compiled(lambda: Alone(products))
    assert (counted["linear_chain"], left) == (2, [])
    assert launched(body)[0] == launched(body)[-1] == "linear_chain" and "triton_poi_fused" not in launched(body)
    met_in = re.findall(r"reinterpret_tensor\(fp4_arrivals, \(\d+, \), \(1, \), 0\), None, \(\), \(\), 0, 1, 90", body)
    assert met_in == [f"reinterpret_tensor(fp4_arrivals, ({ARRIVALS}, ), (1, ), 0), None, (), (), 0, 1, 90"] * 2
    assert [e.note.endswith("begins while the kernel before it runs; its blocks meet in a constant of the graph") for e in entries] == (
        [True] + [False] * (products - 1)
    ) * 2


class Direct(nn.Module):
    """The op itself, which no pass has written: x through two products, of which the second adds the result of the first, and a weight that the graph makes."""

    def __init__(self, computed=False):
        super().__init__()
        self.computed = computed
        self.o, self.down = (FP4Linear(K, K, bias=False, dtype=BF16, device="cuda") for _ in range(2))
        self.register_buffer("norm", torch.ones(K, dtype=BF16, device="cuda"))

    def forward(self, x, cache, arrivals):
        (q, s, g), parts = self.o.parts()[:3], self.down.parts()
        norm = self.norm + self.norm.abs() if self.computed else self.norm
        lists = [[q, parts[0]], [s, parts[1]], [g, parts[2]], [None, None], [norm, None], [x, None], [-1, 0], [EPS, 0.0], [1.0, 0.0], [3, 0], [0, 0], [0] * 4]
        return torch.ops.fp4.linear_chain(x.relu(), *lists, arrivals * 2)[:2]


def test_the_op_itself():
    body, entries, *_ = compiled(Direct)
    assert launched(body)[-1] == "linear_chain" and len(arguments(body, "linear_chain")) == 1
    assert [e.note.split("; ")[1:] for e in entries] == [
        ["the RMSNorm of its input is in the kernel", "in the kernel: gelu_tanh + residual", "begins while the kernel before it runs"],
        ["in the kernel: + residual"],
    ]
    _, (first, _), *_ = compiled(lambda: Direct(computed=True))
    assert first.note.endswith("not begun early: its weight is computed by the graph")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(thresholds={"chain": 0}), "switched off by DispatchConfig.thresholds"),
        (dict(csrc="no nvcc"), "no nvcc"),
        (dict(rows=8), "kernels/choose/sm90.py prefers"),
    ],
    ids=["off", "not compiled", "many rows"],
)
def test_what_is_launched_one_by_one(options, reason):
    """The op costs what its products cost, and says why."""
    body, (chain, *products), *_ = compiled(Direct, **options)
    assert "fp4_csrc.linear_chain" not in body
    assert chain.decision.row.kernel == "one by one" and chain.note == "every product of the chain is a call of its own"
    if "rows" not in options:
        [refused] = [r.reason for r in chain.refused if r.kernel.name == "cuda_gemv_chain"]
        assert refused.startswith(reason)
    assert [e.op for e in products] == ["fp4.linear_epilogue"] * 2 or [e.op for e in products] == ["fp4.linear"] * 2


@pytest.mark.parametrize(
    ("options", "reason"), [(dict(thresholds={"chain": 0}), "switched off by DispatchConfig.thresholds"), (dict(csrc="no nvcc"), "no nvcc")]
)
def test_a_graph_whose_products_are_not_one_launch(options, reason):
    body, _, counted, left = compiled(**options)
    assert "linear_chain" not in counted and "linear_chain" not in body
    assert len(left) == 2 and all(words.startswith(reason) for words in left)
