"""Capture and replay, on a stand-in for a CUDA device: tokens, what runs how often, and what is told on the host.

Over a StaticCache: on a CPU a KVCache reads its counter on the host.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import StaticCache

import fp4_inductor
from fp4_inductor._replay import Runner
from fp4_inductor.generation import session
from lowering_tests.generation.conftest import build
from lowering_tests.generation.standin import Replaying

torch.manual_seed(3)
IDS = torch.randint(3, 128, (3, 9))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 5 + [1] * 4])


@pytest.fixture
def device(monkeypatch, over_static):
    made = Replaying()
    monkeypatch.setattr(session, "device_for", lambda device: made)
    return made


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_replays_make_the_tokens_of_transformers(device, family, padded):
    """Windows of 16 become full on the way: two graphs. A position or a length that is baked into a graph would repeat the first one's."""
    model = build(family)
    options = dict(max_new_tokens=26, do_sample=False) | ({"attention_mask": MASK} if padded else {})
    theirs = model.generate(IDS, **options)
    assert torch.equal(fp4_inductor.generate(model, IDS, **options), theirs)
    record = fp4_inductor.generation_record(model)
    phases = 1 if family == "llama" else 2
    assert (record.steps, record.captures, len(device.graphs)) == (25, phases, phases)
    assert record.replays == 25 - phases * Runner.WARM
    assert torch.equal(fp4_inductor.generate(model, IDS, **options), theirs)
    record = fp4_inductor.generation_record(model)
    assert (record.replays, record.captures) == (25, 0)


def test_other_numbers_are_the_same_graph(device):
    model = build("llama")
    run = lambda **options: fp4_inductor.generate(model, IDS, max_new_tokens=8, do_sample=True, top_k=0, **options)  # noqa: E731
    run(temperature=0.5, seed=1)
    for options in ({"temperature": 3.0, "seed": 1}, {"temperature": 0.5, "seed": 2}, {"temperature": 0.5, "seed": 1, "pad_token_id": 1, "eos_token_id": 77}):
        run(**options)
        assert fp4_inductor.generation_record(model).captures == 0
    assert not torch.equal(run(temperature=3.0, seed=1), run(temperature=0.5, seed=1))
    assert len(device.graphs) == 1
    run(temperature=0.5, top_p=0.9, seed=1)
    assert len(device.graphs) == 2


@pytest.mark.parametrize("own", [True, False])
def test_released_graphs_are_gone(device, own):
    """torch.distributed.destroy_process_group waits for the graphs that hold a sum of NCCL."""
    model = build("llama")
    cache = None if own else StaticCache(config=model.config, max_cache_len=64)
    run = lambda: fp4_inductor.generate(model, IDS, max_new_tokens=8, do_sample=False, past_key_values=cache)  # noqa: E731
    tokens = run()
    graphs = [weakref.ref(graph) for graph in device.graphs]
    device.graphs.clear()
    assert graphs and graphs[0]() is not None
    fp4_inductor.release_memory(model if own else cache)
    assert [graph() for graph in graphs] == [None] * len(graphs)
    if cache is not None:
        cache.reset()
    assert torch.equal(run(), tokens)
    assert fp4_inductor.generation_record(model).captures == 1
    fp4_inductor.release_memory(build("llama"))  # nothing is kept on it


@pytest.mark.parametrize("options", [{"temperature": 0.9, "top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3}, {"min_new_tokens": 12, "eos_token_id": 5}])
def test_replayed_samples_are_those_of_plain_steps(device, options):
    model = build("llama")
    options = dict(max_new_tokens=16, do_sample=True, seed=5, pad_token_id=0) | options
    replayed = fp4_inductor.generate(model, IDS, **options)
    assert fp4_inductor.generation_record(model).replays > 0
    device.captures = False
    assert torch.equal(fp4_inductor.generate(build("llama"), IDS, **options), replayed)
    assert len(device.graphs) == 1


def test_a_step_that_reads_on_the_host_cannot_be_captured(device):
    """The stand-in notices it, as CUDA does: else the other tests would show less than they say."""
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(lambda: x.sum().item())
    before = x.clone()
    graph = device.capture(lambda: x.add_(1))
    assert torch.equal(x, before)
    graph.replay()
    graph.replay()
    assert torch.equal(x, before + 2)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_step_that_cannot_be_captured_runs_as_it_is_and_says_so(device, family, monkeypatch):
    """Half of the layers have counted the step in Python when the other one fails."""
    model = build(family)
    options = dict(max_new_tokens=14, do_sample=False)
    wanted = model.generate(IDS, **options)
    layer = model.model.layers[1]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda hidden, *args, **kwargs: forward(hidden * (1 if hidden.sum().item() else 0), *args, **kwargs))
    assert torch.equal(fp4_inductor.generate(model, IDS, **options), wanted)
    record = fp4_inductor.generation_record(model)
    assert record.replays == record.captures == 0
    assert len(record.notes) == 2 and record.notes[1].startswith("the step is not captured: aten._local_scalar_dense.default is not permitted")


def test_the_host_looks_late_and_takes_the_rest_back(device):
    model = build("llama")
    free = model.generate(IDS[:1], max_new_tokens=40, do_sample=False)
    eos = int(free[0, 9 + 4])
    first = (free[0, 9:] == eos).nonzero()[0].item() + 1
    options = dict(max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0)
    theirs = model.generate(IDS[:1], **options)
    cache = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(fp4_inductor.generate(model, IDS[:1], past_key_values=cache, check_every=4, **options), theirs)
    record = fp4_inductor.generation_record(model)
    assert record.tokens == first and record.overrun > 0 and record.steps == first + record.overrun - 1
    assert int(cache.get_seq_length()) == 9 + first - 1
    # The cache is what it would be without the steps that were too many: a conversation goes on.
    more = torch.cat([theirs, IDS[1:2]], dim=1)
    again = fp4_inductor.generate(model, more, past_key_values=cache, **options)
    assert torch.equal(again, model.generate(more, **options))
