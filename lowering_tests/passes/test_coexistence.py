"""Someone else in Inductor's pass slots, or in the same pattern table: both run."""

from __future__ import annotations

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass, register_graph_pattern

aten = torch.ops.aten


class SinToCos(CustomGraphPass):
    """A foreign pass with a visible effect."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph):
        self.runs += 1
        for node in graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    def uuid(self):
        return "sin to cos"


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, part in zip(("q", "s", "g"), torch.ops.fp4.quantize(torch.randn(48, 64)), strict=True):
            self.register_buffer(name, part)

    def forward(self, x):
        return F.linear(x, torch.ops.fp4.dequantize(self.q, self.s, self.g, x.dtype)).sin()


def test_foreign_pass_in_each_slot(compiled):
    model, x = Model(), torch.randn(5, 64)
    for slot in ("post_grad_custom_pre_pass", "joint_custom_post_pass"):
        foreign = SinToCos()
        c = compiled(model, x, config={slot: foreign})
        assert foreign.runs == 1
        assert c.matches == {"dequantize_mm": 1}
        assert "aten.cos" in c.graph


def test_our_slot_use_is_none():
    """The package registers without touching any slot."""
    import torch._inductor.compile_fx  # noqa: F401

    slots = ("post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass", "joint_custom_post_pass", "pre_grad_custom_pass")
    assert [getattr(inductor_config, slot) for slot in slots] == [None] * len(slots)


def test_foreign_pattern_on_the_same_anchor(compiled):
    """A second pattern on aten.mm sees the products that are not ours."""
    from torch._inductor.fx_passes import post_grad

    seen = []
    table: PatternMatcherPass = post_grad.pass_patterns[0]
    key = ("call_function", aten.mm.default)
    before = list(table.patterns[key])

    @register_graph_pattern(CallFunction(aten.mm.default, KeywordArg("a"), KeywordArg("b")), pass_dict=table)
    def foreign(match, a, b):
        seen.append(match.output_node().name)

    try:
        model, x = Model(), torch.randn(5, 64)
        other = torch.randn(48, 48)
        c = compiled(lambda x: model(x) @ other, x)
    finally:
        table.patterns[key][:] = before
    assert c.matches == {"dequantize_mm": 1}
    assert len(seen) == 1
