"""Streamers: tokens in order, the end, and what is left when one of them, or a person, stops the loop."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import StaticCache, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

import fp4_inductor
from fp4_inductor.generation import caches
from fp4_inductor.generation.streaming import Look, Mail
from lowering_tests.generation.conftest import build
from lowering_tests.generation.standin import Replaying

IDS = torch.randint(3, 128, (3, 6), generator=torch.Generator().manual_seed(0))
GREEDY = dict(max_new_tokens=12, do_sample=False, pad_token_id=1)


class Kept(BaseStreamer):
    """Keeps what it gets; raises ``error`` instead of taking item number ``at``."""

    def __init__(self, at: int = -1, error: type[BaseException] = RuntimeError):
        self.got: list[torch.Tensor] = []
        self.ends = 0
        self.at, self.error = at, error

    def put(self, value):
        if len(self.got) == self.at:
            raise self.error("the streamer stops")
        assert value.device.type == "cpu" and not self.ends
        self.got.append(value)

    def end(self):
        self.ends += 1


def same(ours: Kept, theirs: Kept) -> bool:
    return ours.ends == theirs.ends == 1 and len(ours.got) == len(theirs.got) and all(map(torch.equal, ours.got, theirs.got))


@pytest.mark.parametrize("check_every", [1, 5, 100])
def test_a_streamer_gets_what_transformers_gives_it(llama, check_every):
    eos = int(llama.generate(IDS, **GREEDY)[1, 6 + 4])
    for options in (GREEDY, GREEDY | {"eos_token_id": eos}):
        for ids in (IDS, IDS[1:2]):
            ours, theirs, third = Kept(), Kept(), Kept()
            llama.generate(ids, streamer=theirs, **options)
            fp4_inductor.generate(llama, ids, streamer=ours, check_every=check_every, **options)
            assert same(ours, theirs)
            llama.generate(ids, custom_generate=fp4_inductor.generate_loop, check_every=check_every, streamer=third, **options)
            assert same(third, theirs)


def test_it_is_not_given_to_the_next_call(llama):
    """generate_loop looks for it in the caller: not in an older one."""
    streamer = Kept()
    llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, streamer=streamer, **GREEDY)
    count = len(streamer.got)
    llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, **GREEDY)
    assert len(streamer.got) == count and streamer.ends == 1


def test_transformers_loop_streams_too(llama):
    for run in (
        lambda **o: fp4_inductor.generate(llama, IDS, **o),
        lambda **o: llama.generate(IDS, custom_generate=fp4_inductor.generate_loop, **o),
    ):
        ours, theirs = Kept(), Kept()
        run(streamer=ours, max_time=1000.0, **GREEDY)
        llama.generate(IDS, streamer=theirs, **GREEDY)
        assert fp4_inductor.generation_record(llama).loop == "transformers" and same(ours, theirs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 6])
def test_a_streamer_that_raises_leaves_model_and_cache_usable(error, at):
    model = build("gemma3")
    wanted = model.generate(IDS, **GREEDY)
    cache = StaticCache(config=model.config, max_cache_len=32)
    for options in ({}, {"past_key_values": cache}):
        streamer = Kept(at, error)
        with pytest.raises(error, match="the streamer stops"):
            fp4_inductor.generate(model, IDS, streamer=streamer, check_every=3, **options, **GREEDY)
        assert len(streamer.got) == at and streamer.ends == 0
        if options:
            assert not caches.is_in_use(cache)
            cache.reset()
        assert torch.equal(fp4_inductor.generate(model, IDS, **options, **GREEDY), wanted)


@pytest.mark.parametrize("call", [1, 5])
def test_an_interrupt_inside_the_model(monkeypatch, call):
    """Ctrl-C between two layers, of the prompt or of a step: one has the token, the other has not."""
    model = build("gemma3")
    wanted = model.generate(IDS, **GREEDY)
    cache = StaticCache(config=model.config, max_cache_len=32)
    layer = model.model.layers[1]
    forward, calls = layer.forward, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    for options in ({}, {"past_key_values": cache}):
        calls.clear()
        monkeypatch.setattr(layer, "forward", interrupted)
        streamer = Kept()
        with pytest.raises(KeyboardInterrupt):
            fp4_inductor.generate(model, IDS, streamer=streamer, **options, **GREEDY)
        assert streamer.ends == 1  # who reads it in another thread does not wait for ever
        monkeypatch.undo()
        cache.reset()
        assert torch.equal(fp4_inductor.generate(model, IDS, **options, **GREEDY), wanted)


def test_a_block_keeps_its_own_status_while_a_later_one_is_under_way():
    tokens, status = torch.zeros(4, 2, dtype=torch.int64), torch.tensor([1, 0, 0])
    mail = Mail(Replaying(), tokens, status)
    for first in (10, 20, 30):
        mail.restart()
        for end, before in ((1, 0), (3, 1), (4, 3)):
            tokens[before:end] = first + end
            status.copy_(torch.tensor([end, end == 4, first]))
            mail.post(end)
            if before:
                assert mail.take() == Look(end=before, length=before, done=False, bad=first)
        assert mail.take() == Look(end=4, length=4, done=True, bad=first) and mail.under_way == 0
        assert mail.arrived[:, 0].tolist() == [first + 1, first + 3, first + 3, first + 4]


def test_a_reader_in_another_thread(llama):
    class Numbers:
        def decode(self, ids, **_):
            return "".join(f"{i} " for i in ids)

    streamer = TextIteratorStreamer(Numbers(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=lambda: fp4_inductor.generate(llama, IDS[:1], streamer=streamer, **GREEDY))
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert [int(word) for word in text.split()] == llama.generate(IDS[:1], **GREEDY)[0, 6:].tolist()
