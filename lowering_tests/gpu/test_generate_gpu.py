"""generate() on a GPU: tokens beside Transformers' loop, one CUDA graph, and replays that are equal to the bit."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from fp4_inductor.generation.device import Runner

transformers = pytest.importorskip("transformers")

from lowering_tests.generation.conftest import build  # noqa: E402  (imports transformers)

pytestmark = pytest.mark.gpu

IDS = torch.randint(3, 128, (3, 9), generator=torch.Generator().manual_seed(3))
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] * 5 + [1] * 4])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_tokens_and_replays(family, padded):
    """float32: the order of sums differs between compiled and eager code, which greedy tokens of these models bear."""
    model, ids = build(family).cuda(), IDS.cuda()
    options = dict(max_new_tokens=40, do_sample=False) | ({"attention_mask": MASK.cuda()} if padded else {})
    wanted = model.generate(ids, **options)
    assert torch.equal(fp4_inductor.generate(model, ids, **options), wanted)
    record = fp4_inductor.generation_record(model)
    phases = 2 if family == "gemma3" else 1  # before and after its windows are full
    assert record.notes == [] and (record.steps, record.captures, record.replays) == (39, phases, 39 - phases * Runner.WARM)
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
