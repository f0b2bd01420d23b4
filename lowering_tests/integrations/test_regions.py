"""Decoder layers are compiled once: which calls, with which graphs, and that nothing else changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, StaticCache

import fp4_inductor
from fp4_inductor import KVCache, NVFP4Config
from fp4_inductor.decoding import regions
from fp4_inductor.kernels import select
from lowering_tests.models.conftest import BASE, DENSE, MOE

IDS = torch.tensor([[5, 6, 7, 9]])
REGION = torch.ops.higher_order.invoke_subgraph
# Their two layers differ. A graph that is called once is inlined by torch.
HYBRID = {"gpt_oss", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"}
HYBRID |= {"granitemoehybrid", "lfm2_moe", "llama4", "nemotron_h"}
IN_CI = ["llama", "gpt_oss", "gpt2", "mixtral", "qwen3_next"]  # gemma3, whose layers are of two kinds: test_layers_of_two_kinds_are_two_graphs


@pytest.fixture(autouse=True)
def two_layers_are_enough(monkeypatch):
    monkeypatch.setattr(regions, "LEAST", 2)


def quantized(model: nn.Module) -> nn.Module:
    return fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False, strict=False)


class Graphs(list):
    """A backend that keeps Dynamo's graphs and runs them through AOTAutograd."""

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.append(graph)
        return aot_eager(graph, inputs)

    @property
    def regions(self) -> list[str]:
        """The name of the graph that each call of a region runs."""
        return [node.args[0].target for graph in self for node in graph.graph.nodes if node.target is REGION]


def decode(model: nn.Module, steps: int = 3, **compile_options) -> torch.Tensor:
    """Logits of some steps behind a prompt, compiled, over a static cache."""
    torch._dynamo.reset()
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=32)
        model(input_ids=IDS, past_key_values=cache, use_cache=True)
        forward = torch.compile(model, fullgraph=True, dynamic=False, **compile_options)
        positions = [torch.tensor([[IDS.shape[1] + i]]) for i in range(steps)]
        return torch.stack([forward(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True, position_ids=p).logits.clone() for p in positions])


@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in IN_CI else pytest.mark.slow) for f in sorted(DENSE | MOE)])
def test_every_layer_of_a_decode_step_is_a_call_of_a_region(tiny, family, monkeypatch):
    model = quantized(tiny(family, torch.bfloat16))
    layers = regions.decoder_layers(model)
    assert len(layers) == model.config.num_hidden_layers and all("forward" in layer.__dict__ for layer in layers)
    with_regions, without = Graphs(), Graphs()
    logits = decode(model, backend=with_regions)
    calls = Counter(with_regions.regions)
    assert sum(calls.values()) == len(layers) * len(with_regions) or (family in HYBRID and not calls)
    for layer in layers:
        del layer.forward
    assert torch.equal(decode(model, backend=without), logits)
    assert without.regions == [] and len(without) == len(with_regions)


FIRST_ALIKE = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 gives the first layer a graph of its own")


@FIRST_ALIKE
def test_equal_layers_share_one_graph(tiny):
    """Inductor's own code: two layers, one function that is called twice; the same logits as without."""
    from torch._inductor.utils import run_and_get_code

    model = quantized(tiny("llama", torch.bfloat16))
    graphs = Graphs()
    decode(model, steps=1, backend=graphs)
    assert len(set(graphs.regions)) == 1
    logits, [*_, code] = run_and_get_code(decode, model)
    assert code.count("subgraph_0(") == 3, "defined once, called twice"
    for layer in regions.decoder_layers(model):
        del layer.forward
    plain = decode(model, backend="aot_eager")
    assert ((plain - logits).float().norm() / plain.float().norm()).item() < 1e-2, "Inductor rounds where it does not fuse"


@FIRST_ALIKE
def test_layers_of_two_kinds_are_two_graphs():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**{**BASE, "num_hidden_layers": 4}, intermediate_size=128, head_dim=16, layer_types=kinds)
    model = quantized(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    graphs = Graphs()
    decode(model, steps=1, backend=graphs)
    assert sorted(Counter(graphs.regions).values()) == [2, 2]


def test_a_cache_that_grows_gradients_and_export_run_the_layers_themselves(tiny):
    model = quantized(tiny("llama", torch.bfloat16))

    def growing(ids):
        return model(input_ids=ids, past_key_values=DynamicCache(config=model.config), use_cache=True).logits

    for context, call in (
        (torch.no_grad(), growing),
        (torch.enable_grad(), lambda ids: model(input_ids=ids, use_cache=False).logits),
    ):
        torch._dynamo.reset()
        graphs = Graphs()
        with context:
            compiled = torch.compile(call, backend=graphs)(IDS)
            assert torch.equal(compiled, call(IDS))
        assert graphs and graphs.regions == []
    torch._dynamo.reset()
    graphs = Graphs()
    with torch.no_grad():
        torch.compile(lambda ids: model(input_ids=ids, use_cache=False).logits, backend=graphs)(IDS)
    assert len(graphs.regions) == 2, "a call without a cache is a region"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False})
    assert not [node for node in program.graph.nodes if node.target is REGION]


def test_eager_calls_copies_and_pickles_are_as_before(tiny):
    model = quantized(tiny("llama", torch.bfloat16))
    with torch.no_grad():
        logits = model(IDS).logits
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again(IDS).logits, logits)
            mine, theirs = regions.decoder_layers(model), regions.decoder_layers(again)
            assert all(layer.forward.__self__ is layer for layer in (*mine, *theirs))
            assert not {id(layer) for layer in mine} & {id(layer) for layer in theirs}


def test_a_forward_that_somebody_wrapped_and_few_layers_are_left_alone(tiny, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    wrapped = model.model.layers[0].forward
    model.model.layers[0].forward = wrapped
    quantized(model)
    assert model.model.layers[0].forward is wrapped and "forward" in model.model.layers[1].__dict__
    monkeypatch.setattr(regions, "LEAST", 3)
    assert regions.use_regions(quantized(tiny("llama", torch.bfloat16))) == 0
    assert regions.use_regions(nn.Sequential(nn.Linear(32, 32))) == 0


def test_it_can_be_switched_off(tiny, monkeypatch):
    monkeypatch.setenv("FP4_INDUCTOR_REGIONS", "0")
    model = quantized(tiny("llama", torch.bfloat16))
    assert all("forward" not in layer.__dict__ for layer in regions.decoder_layers(model))


def test_explain_names_every_layer(tiny):
    model = quantized(tiny("llama", torch.bfloat16))
    with torch.no_grad():
        rows = fp4_inductor.explain(torch.compile(model), input_ids=IDS, use_cache=False).rows
        torch._dynamo.reset()
        for layer in regions.decoder_layers(model):
            del layer.forward
        without = fp4_inductor.explain(torch.compile(model), input_ids=IDS, use_cache=False).rows
    assert sorted(row.module for row in rows) == sorted(row.module for row in without)
    assert {row.module.split(".")[2] for row in rows} == {"0", "1"}


@pytest.mark.parametrize(("family", "rows", "options", "pays"), [
    ("qwen3", 1, {}, True), ("qwen3_moe", 1, {}, True), ("gpt_oss", 1, {}, False), ("qwen3", 1, dict(thresholds={"chain": 0}), False),
    ("qwen3", 8, {}, True), ("qwen3", 33, {}, False), ("qwen3_moe", 8, {}, False), ("qwen3", 8, dict(thresholds={"rms": 0}), False),
])  # fmt: skip
def test_a_step_is_one_graph_where_products_of_two_layers_are_one_launch(tiny, family, rows, options, pays, monkeypatch):
    model = quantized(tiny(family))
    assert not regions.pays_undivided(model, rows), "on a CPU"
    of_a_gpu = dataclasses.replace(select.describe("linear_chain", torch.device("cpu"), torch.bfloat16, 256, 256), arch=90)
    monkeypatch.setattr(select, "describe", lambda op, *args, **options: dataclasses.replace(of_a_gpu, op=op))
    with fp4_inductor.dispatch(**options):
        assert regions.pays_undivided(model, rows) is pays


def test_a_step_over_a_cache_that_asks_for_one_graph(tiny):
    model, ids = quantized(tiny("qwen3")), torch.tensor([[3]])
    for whole in (False, True):
        torch._dynamo.reset()
        cache, graphs = KVCache(model, 16, 1), Graphs()
        step = torch.compile(model, backend=graphs, fullgraph=True, dynamic=False)
        with torch.no_grad(), regions.undivided(cache) if whole else contextlib.nullcontext():
            step(input_ids=ids, past_key_values=cache)
        subgraphs = [name for graph in graphs for name, _ in graph.named_children() if name.startswith("subgraph")]
        assert bool(subgraphs) is not whole and not getattr(cache, regions._UNDIVIDED, False)
