"""generate() on a GPU: tokens beside Transformers' loop, one CUDA graph, and replays that are equal to the bit."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from fp4_inductor._replay import Runner

transformers = pytest.importorskip("transformers")

from lowering_tests.generation.conftest import build, over_static, told  # noqa: E402, F401  (imports transformers)
from lowering_tests.generation.texts import drafting, spelled_wrong  # noqa: E402

pytestmark = pytest.mark.gpu

IDS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 5 + [1] * 4])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_tokens_and_replays(family, static, padded, request):
    """float32: the order of sums differs between compiled and eager code, which greedy tokens of these models bear."""
    if static:
        request.getfixturevalue("over_static")
    model, ids = build(family).cuda(), IDS.cuda()
    options = dict(max_new_tokens=40, do_sample=False) | ({"attention_mask": MASK.cuda()} if padded else {})
    wanted = model.generate(ids, **options)
    assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)
    record = fp4_inductor.generation_record(model)
    phases = 2 if static and family == "gemma3" else 1  # before and after its windows are full
    assert record.notes == (["over a StaticCache: a test"] if static else ['attention: "fp4_inductor" in the place of "sdpa"'])
    assert (record.steps, record.captures, record.replays) == (39, phases, 39 - phases * Runner.WARM)
    assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)
    assert fp4_inductor.generation_record(model).replays == 39


def test_samples_are_equal_to_the_bit_from_call_to_call():
    model, ids = build("llama").cuda().bfloat16(), IDS.cuda()
    options = dict(max_new_tokens=100, do_sample=True, temperature=1.2, top_p=0.95, seed=1)
    first = fp4_inductor.generate(model, ids, **options)
    for _ in range(100):  # ten thousand replays
        assert torch.equal(fp4_inductor.generate(model, ids, **options), first)
    assert not torch.equal(fp4_inductor.generate(model, ids, **options | {"seed": 2}), first)


def test_quantized_with_a_late_look_and_a_cache_of_the_caller():
    model = fp4_inductor.quantize_model(build("llama").cuda().bfloat16(), fp4_inductor.NVFP4Config("amax"), progress=False)
    ids = IDS[:1].cuda()
    # One cache for both, which has its tensors: over an empty one the prompt is not compiled, over a longer one attention sums in other parts, and in
    # bfloat16 these models bear no other rounding.
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    fp4_inductor.generate(model, ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
    cache.reset()
    free = fp4_inductor.generate(model, ids, past_key_values=cache, max_new_tokens=40, do_sample=False)
    eos = int(free[0, 9 + 10])
    cache.reset()
    got = fp4_inductor.generate(model, ids, past_key_values=cache, max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert torch.equal(got, free[:, : got.shape[1]]) and int(got[0, -1]) == eos
    assert fp4_inductor.generation_record(model).overrun > 0
    assert int(cache.get_seq_length()) == got.shape[1] - 1


def test_nan_is_told_and_the_next_call_runs():
    model, ids = build("llama").cuda(), IDS.cuda()
    options = dict(max_new_tokens=20, do_sample=False)
    wanted = fp4_inductor.generate(model, ids, **options)
    head = model.lm_head.weight.data.clone()
    model.lm_head.weight.data[5] = float("nan")
    with pytest.raises(fp4_inductor.errors.NonFiniteError, match="token 1 "):
        fp4_inductor.generate(model, ids, **options)
    model.lm_head.weight.data.copy_(head)
    assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_prompt_lookup_makes_the_tokens_of_the_loop_without_it(family, sample, told):  # noqa: F811
    """One graph, of fewer steps, over a cache of the caller, whose windows of 16 tokens slide; then another prompt by the same graph."""
    model, ids = build(family).cuda(), IDS[:1].cuda()
    options = dict(max_new_tokens=60, do_sample=False, pad_token_id=0) | (
        dict(do_sample=True, top_p=0.9, top_k=0, repetition_penalty=1.1, seed=1) if sample else {}
    )
    cache = fp4_inductor.KVCache(model, 128)
    wanted = fp4_inductor.generate(model, ids, past_key_values=cache, **options)
    assert sample or torch.equal(wanted, model.generate(ids, **options))
    for every, at_most in ((100, 16), (6, 40), (100, 16)):
        told(torch.cat([spelled_wrong(wanted, every), ids], 1))
        cache.reset()
        assert torch.equal(fp4_inductor.generate(model, ids, past_key_values=cache, **options, **drafting(3, 16)), wanted)
        record = fp4_inductor.generation_record(model)
        assert record.notes == [] and record.steps <= at_most and record.accepted == 59 - record.steps
        assert int(cache.get_seq_length()) == 9 + 60 - 1
    assert (record.captures, record.replays) == (0, record.steps)
    eos = int(wanted[0, 9 + 20])
    ended = 9 + 1 + (wanted[0, 9:] == eos).nonzero()[0].item()
    cache.reset()
    assert torch.equal(fp4_inductor.generate(model, ids, past_key_values=cache, eos_token_id=eos, **options, **drafting(3, 16)), wanted[:, :ended])
    assert int(cache.get_seq_length()) == ended - 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_prompt_lookup_of_a_quantized_model(family, told):  # noqa: F811
    """bfloat16, attention in one launch: equal to the bit from call to call, and drafts of its own answer are right."""
    model = fp4_inductor.quantize_model(build(family).cuda().bfloat16(), fp4_inductor.NVFP4Config("amax"), progress=False)
    ids = IDS[:1].cuda()
    options = dict(max_new_tokens=60, do_sample=False, pad_token_id=0) | drafting(3, 4)
    first = fp4_inductor.generate(model, ids, **options)
    for _ in range(20):
        assert torch.equal(fp4_inductor.generate(model, ids, **options), first)
    record = fp4_inductor.generation_record(model)
    assert record.notes == [] and record.replays == record.steps and record.overrun == 0
    told(torch.cat([first, ids], 1))
    fp4_inductor.generate(model, ids, **options)
    assert fp4_inductor.generation_record(model).accepted > 0


@pytest.mark.parametrize(("family", "quantized"), [("llama", False), ("llama", True), ("qwen3_moe", True)])
def test_padded_prompts_are_replayed(family, quantized):
    """As they are and padded, of an empty cache and behind tokens: the same tokens from float32, the same bits from replay to replay."""
    model = build(family, max_position_embeddings=2048).cuda()
    if quantized:
        model = fp4_inductor.quantize_model(model.bfloat16(), fp4_inductor.NVFP4Config("amax"), progress=False)
    cache = fp4_inductor.KVCache(model, 1024)
    text = torch.randint(3, 128, (1, 700), generator=torch.Generator().manual_seed(4)).cuda()
    found, said = {}, {}
    for pad in (False, True, True, True):
        tokens, how = [], []
        for first, second in ((9, 120), (40, 200), (300, 310), (128, 700)):
            cache.reset()
            for end in (first, second):
                options = dict(attention_mask=torch.ones_like(text[:, :end]), past_key_values=cache, max_new_tokens=1, do_sample=False)
                out = fp4_inductor.generate(model, text[:, :end], pad_prompts=pad, **options)
                tokens.append(int(out[0, -1]))
                how.append(fp4_inductor.generation_record(model).prompt.partition(" (")[0])
                assert int(cache.counter.position) == end
        found.setdefault(pad, []).append(tokens)
        said[pad] = how
    assert found[True][0] == found[True][1] == found[True][2]
    assert quantized or found[False][0] == found[True][0]
    assert set(said[False]) == {"as it is"} and {how.rpartition(", ")[2] for how in said[True]} == {"replayed"}


def test_steps_are_captured_behind_a_prompt_that_cannot_be():
    """Transformers' own experts ask the GPU how many tokens each has, where there are many."""
    model, ids = build("qwen3_moe").cuda(), IDS.cuda()
    options = dict(max_new_tokens=20, do_sample=False)
    wanted = model.generate(ids, **options)
    for _ in range(2):
        fp4_inductor.generate(model, ids, **options | {"max_new_tokens": 1})
    assert [note for note in fp4_inductor.generation_record(model).notes if note.startswith("the prompt is not captured: ")]
    assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)
    record = fp4_inductor.generation_record(model)
    assert record.captures == 1 and record.replays == 19 - Runner.WARM
