"""A kernel begins while the one before it runs only where that one is proven not to write its weight."""

from __future__ import annotations

import re
import types

import pytest
import torch
from torch._inductor.virtualized import V

from fp4_inductor import FP4Linear, Sparse24Linear, _engines, dispatch
from fp4_inductor._torch import order
from fp4_inductor.lowerings import linear as lowering
from fp4_inductor.lowerings.journal import listen
from lowering_tests.fake_cuda import call_body, generated_code

BF16 = torch.bfloat16
K, N, M = 512, 1024, 8


def compiled(f, m=M, layer=FP4Linear):
    """The arguments of the kernel's call behind ``arch``, and what explain() says of it; ``f(linear, x)`` of a fresh layer."""

    def build():
        linear = layer(K, N, bias=False, dtype=BF16, device="cuda")
        return lambda x: f(linear, x)

    with listen() as entries:
        body = call_body(generated_code(build, [((m, K), BF16)], csrc="")[0])
    [arguments] = re.findall(r"fp4_csrc\.\w+\.default\(.*?, 90(.*?)\)", body)
    return [int(a) if a != "None" else None for a in arguments.split(", ")[1:]], entries[-1].note


def test_a_kernel_of_the_graph_made_the_activations():
    for m, tile, kernel in ((8, 4, "table"), (64, 4, "wide"), (300, 2, "wide_fp8")):
        more = [0, 0] if kernel == "wide_fp8" else [0, 0, 0, None, None]
        assert compiled(lambda linear, x: linear(x.relu()), m=m) == ([0] * tile + more + [1], "begins while the kernel before it runs"), kernel


def test_a_sparse_layer():
    for m in (M, 64):
        assert compiled(lambda linear, x: linear(x.relu()), m=m, layer=Sparse24Linear) == ([0, 0, 0, 0, 0, 0, 1], "begins while the kernel before it runs")
    assert compiled(lambda linear, x: linear(x.relu()), m=300, layer=Sparse24Linear)[0] == [0, 0, 0, 0, 1]
    assert compiled(lambda linear, x: linear(x), layer=Sparse24Linear)[0] == []
    part = lambda linear, x: torch.ops.fp4.sparse_linear(x.relu(), linear.values, linear.meta ^ 0, linear.scale, linear.global_scale)  # noqa: E731
    assert compiled(part, layer=Sparse24Linear) == ([], "not begun early: its weight is computed by the graph")


def test_the_second_of_a_chain_follows_the_first():
    def build():
        first, second = (FP4Linear(K, K, bias=False, dtype=BF16, device="cuda") for _ in range(2))
        return lambda x: second(first(x))

    with listen() as entries:
        generated_code(build, [((M, K), BF16)], csrc="")
    assert [e.note.startswith("begins") for e in entries] == [False, True]


def test_activations_that_came_from_outside():
    for f in (lambda linear, x: linear(x), lambda linear, x: linear(x.view(2, M // 2, K))):
        assert compiled(f) == ([], "not begun early: no kernel of the graph is known to run before it: its activations are not computed by one")


def test_an_engine_promises_it():
    """That what runs before its graphs writes no weight. What the graph itself writes is not covered."""
    remove = _engines.add_provider(lambda: True)
    try:
        assert compiled(lambda linear, x: linear(x))[1] == "begins while the kernel before it runs"
        made = compiled(lambda linear, x: torch.ops.fp4.linear(x, linear.qdata ^ 0x88, linear.scale, linear.global_scale))
        assert made[1] == "not begun early: its weight is computed by the graph"
    finally:
        remove()


def test_a_weight_that_the_graph_makes():
    def made(linear, x):
        return torch.ops.fp4.linear(x.relu(), linear.qdata ^ 0x88, linear.scale, linear.global_scale)

    assert compiled(made) == ([], "not begun early: its weight is computed by the graph")


def test_a_weight_that_the_graph_changes(monkeypatch):
    """In place, before it is read. The stand-in for a GPU cannot trace that, so it is said to the lowering."""

    def without(changed):
        def why_not(activations, weight, promised):
            if changed:
                V.graph.mark_buffer_mutated(weight[0].get_name())
            return order.why_not_early(activations, weight, promised)

        return why_not

    for changed, note in ((False, "begins while the kernel before it runs"), (True, "not begun early: its weight is changed by the graph")):
        monkeypatch.setattr(lowering, "order", types.SimpleNamespace(why_not_early=without(changed)))
        assert compiled(lambda linear, x: linear(x.relu()))[1] == note


def test_memory_that_is_not_initialised_takes_no_kernel():
    assert compiled(lambda linear, x: linear(torch.empty_like(x)))[0] == []


def test_switched_off():
    with dispatch(early="never"):
        assert compiled(lambda linear, x: linear(x.relu())) == ([], 'not begun early: DispatchConfig(early="never")')


@pytest.mark.parametrize("m", [8, 64])
def test_a_fused_epilogue(m):
    arguments, note = compiled(lambda linear, x: torch.nn.functional.silu(linear(x.relu())), m=m)
    assert arguments[-1] == 1 and "begins while" in note


def in_a_region(around, monkeypatch=None, m=M):
    """As :func:`compiled`, of a layer in a region (``torch.compiler.nested_compile_region``) that ``around(region, layers, x)`` calls twice."""
    from torch.compiler import nested_compile_region

    def build():
        layers = [FP4Linear(K, K, bias=False, dtype=BF16, device="cuda") for _ in range(2)]
        region = nested_compile_region(lambda x, q, s, g: torch.ops.fp4.linear(x.relu(), q, s, g) + 1)
        return lambda x: around(region, layers, x)

    with listen() as entries:
        code = generated_code(build, [((m, K), BF16)], csrc="")[0]
    calls = re.findall(r"fp4_csrc\.linear_table\.default\(.*?, 90(.*?)\)", code)
    return calls, [e.note for e in entries]


def parts(layer):
    return layer.qdata, layer.scale, layer.global_scale


def test_a_region_whose_calls_pass_weights_of_the_graph_around_it():
    calls, notes = in_a_region(lambda region, layers, x: region(region(x, *parts(layers[0])), *parts(layers[1])))
    assert len(calls) == 1 and calls[0].endswith(", 1") and notes == ["begins while the kernel before it runs"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_region_that_gets_a_weight_which_is_computed_at_one_call(which):
    """The region is lowered at its first call, for all of them."""

    def around(region, layers, x):
        for i, layer in enumerate(layers):
            q, s, g = parts(layer)
            x = region(x, q ^ 0x88 if i == which else q, s, g)
        return x

    calls, notes = in_a_region(around)
    assert calls == [""] and notes == ["not begun early: inside a subgraph, and the graph around it may compute or change its weight"]


def test_a_region_whose_weight_is_written_by_the_graph_around_it(monkeypatch):
    """The stand-in for a GPU cannot trace a weight that is written, so the answer for the node is changed."""
    written = set()
    is_written = order._is_written
    monkeypatch.setattr(order, "_is_written", lambda node: node.name in written or is_written(node))
    calls, _ = in_a_region(lambda region, layers, x: region(region(x, *parts(layers[0])), *parts(layers[1])))
    assert calls[0].endswith(", 1")
    names = []
    monkeypatch.setattr(order, "_is_written", lambda node: names.append(node.name) or len(names) > 3)
    calls, notes = in_a_region(lambda region, layers, x: region(region(x, *parts(layers[0])), *parts(layers[1])))
    assert calls == [""] and "may compute or change its weight" in notes[0] and len(names) == 4


@pytest.mark.parametrize(
    ("before", "early"),
    [(lambda x: x.relu(), True), (lambda x: x.relu().view(1, M, K).view(M, K), True), (lambda x: x @ x.t() @ x, True), (lambda x: x, False),
     (lambda x: x.view(1, M, K).view(M, K), False)],
    ids=["a kernel", "a view of its result", "a product", "an input", "a view of an input"],
)  # fmt: skip
def test_a_region_whose_activations_come_from_outside(before, early):
    """A decoder layer whose first linear layer computes its own norm reads what the layer before, or the embedding, has written."""
    from torch.compiler import nested_compile_region

    def build():
        layers = [FP4Linear(K, K, bias=False, dtype=BF16, device="cuda") for _ in range(2)]
        region = nested_compile_region(lambda x, q, s, g: torch.ops.fp4.linear(x, q, s, g) + 1)

        def run(x):
            x = before(x)
            for layer in layers:
                x = region(x, *parts(layer))
            return x

        return run

    with listen() as entries:
        code = generated_code(build, [((M, K), BF16)], csrc="")[0]
    [arguments] = re.findall(r"fp4_csrc\.linear_table\.default\(.*?, 90(.*?)\)", code)
    assert arguments.endswith(", 1") is early
    assert entries[0].note.startswith("begins while" if early else "not begun early: no kernel of the graph is known to run before it")


def test_what_writes_a_value():
    """In place, through a view, and inside a region; what only reads, or copies, does not."""
    aten = torch.ops.aten

    def graph(build, in_region):
        """The input of a graph in which ``build``'s node uses it, perhaps inside a region."""
        inner = torch.fx.Graph()
        value = inner.placeholder("value")
        build(inner, value)
        inner.output(())
        if not in_region:
            return value
        outer = torch.fx.Graph(torch.nn.Module())
        outer.owning_module.region = types.SimpleNamespace(graph=inner)
        weight = outer.placeholder("weight")
        outer.call_function(torch.ops.higher_order.invoke_subgraph, (outer.create_node("get_attr", "region"), "region", weight))
        return weight

    cases = {
        True: (
            lambda g, w: g.call_function(aten.add_.Tensor, (w, 1)),
            lambda g, w: g.call_function(aten.copy_.default, (g.call_function(aten.slice.Tensor, (w, 0, 0, 1)), w)),
            lambda g, w: g.call_function(aten.add_.Tensor, (g.call_function(aten.view.default, (g.call_function(aten.t.default, (w,)), [4])), 1)),
            lambda g, w: g.call_function(len, (w,)),  # not known
        ),
        False: (
            lambda g, w: g.call_function(aten.add.Tensor, (w, 1)),
            lambda g, w: g.call_function(aten.add_.Tensor, (g.call_function(aten.clone.default, (w,)), 1)),
            lambda g, w: g.call_function(aten.copy_.default, (g.call_function(aten.clone.default, (w,)), w)),
            lambda g, w: g.call_function(aten.slice.Tensor, (w, 0, 0, 1)),
        ),
    }
    for written, builds in cases.items():
        for build in builds:
            for in_region in (False, True):
                assert order._is_written(graph(build, in_region)) is written, (written, builds.index(build), in_region)
