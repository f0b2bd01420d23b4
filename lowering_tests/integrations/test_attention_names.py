"""Places of Transformers that go by the name of the attention implementation: continuous batching, context parallelism, models' own code."""

from __future__ import annotations

import ast
import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.decoding import attention
from fp4_inductor.decoding.attention import NAME

ASSETS = Path(__file__).parents[2] / "examples" / "assets"
PROMPTS = [[1, 5, 9, 20, 33], [7, 8, 9], [1, 100, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [64]]
NEW = 12


def from_assets(name):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / name, dtype=torch.bfloat16).eval()


def quantized(model, **options):
    return fp4_inductor.quantize_model(model, NVFP4Config("amax", **options), progress=False)


def batch(model, prompts=PROMPTS, **options):
    """The tokens that ``generate_batch`` adds to each prompt, in the order of the prompts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(block_size=32, num_blocks=16, max_batch_tokens=64)  # the default takes most of the memory that is free
    answers = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=small, progress_bar=False, **options)
    by_prompt = {tuple(a.prompt_ids): a for a in answers.values()}
    assert all(a.error is None for a in by_prompt.values())
    return [by_prompt[tuple(p)].generated_tokens for p in prompts]


def alone(model, prompt):
    """The tokens that ``generate`` adds to one prompt."""
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(prompt) :]


def untied_difference(model, prompt, want, got):
    """Where two greedy answers part although the model prefers one token; None if there is no such place.

    A tie is a preference below one step of bfloat16: attention over a packed batch adds in another order.
    """
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)
    if at is None:
        return None
    logits = model(torch.tensor([prompt + want[:at]])).logits[0, -1].float()
    step = 2.0**-7 * logits.abs().max()
    return None if (logits[want[at]] - logits[got[at]]).abs() <= step else (at, want[at], got[at])


# --- continuous batching -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asset", ["austen_dense", "austen_moe"])
def test_generate_batch_gives_the_tokens_of_generate(asset, tmp_path):
    """After quantize_model and after load_pretrained; the attention is afterwards what it was."""
    model = quantized(from_assets(asset))
    model.save_pretrained(tmp_path)
    for subject in (model, fp4_inductor.load_pretrained(tmp_path, torch_dtype=torch.bfloat16)):
        assert subject.config._attn_implementation == NAME
        want = [alone(subject, p).tolist() for p in PROMPTS]
        got = batch(subject)
        assert subject.config._attn_implementation == NAME
        assert [untied_difference(subject, *case) for case in zip(PROMPTS, want, got, strict=True)] == [None] * len(PROMPTS)
        assert sum(w == g for w, g in zip(want, got, strict=True)) >= len(PROMPTS) - 1, "one tie among four answers"


def test_a_prompt_of_a_batch_does_not_see_the_others():
    """The mask is there: without one, packed prompts attend to each other and the answers of a batch depend on it."""
    model = quantized(from_assets("austen_dense"))
    assert batch(model, PROMPTS[:1])[0] == batch(model, [*PROMPTS[:1], [5] * 11])[0]


def test_a_manager_that_is_kept_serves_again():
    model = quantized(from_assets("austen_dense"))
    first = batch(model, persistent_manager=True)
    assert model.config._attn_implementation == NAME
    assert batch(model, persistent_manager=True) == first
    model.destroy_cached_continuous_batching_manager()
    assert model.config._attn_implementation == NAME


def llava():
    import transformers

    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    text = transformers.LlamaConfig(**sizes, vocab_size=128, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    vision = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=127)).eval()


def names_of(model):
    config = model.config
    return {"": config._attn_implementation} | {key: getattr(config, key)._attn_implementation for key in config.sub_configs}


def test_every_part_of_a_multimodal_model_gets_its_attention_back():
    model = quantized(llava())
    names = {"": "sdpa", "text_config": NAME, "vision_config": "sdpa"}
    assert names_of(model) == names
    assert len(batch(model)) == len(PROMPTS)
    assert names_of(model) == names


def test_a_manager_that_cannot_be_made_leaves_the_attention(tiny, monkeypatch):
    from transformers.generation.continuous_batching import continuous_api

    seen = []

    def refuse(requested_attention_implementation):
        seen.append(requested_attention_implementation)
        raise ValueError("no")

    model = quantized(tiny("llama"))
    monkeypatch.setattr(continuous_api, "is_flash_attention_requested", refuse)  # the first thing that the choice asks
    with pytest.raises(ValueError, match="no"):
        batch(model)
    assert seen == ["sdpa"]
    assert model.config._attn_implementation == NAME


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_models_are_served_as_ever(tiny, name):
    model = tiny("llama")
    model.set_attn_implementation(name)
    want = alone(model, PROMPTS[0]).tolist()
    assert batch(model, PROMPTS[:1])[0] == want
    assert model.config._attn_implementation == name


# --- others that go by the name --------------------------------------------------------------------------------------


def test_context_parallelism_gets_sdpa(tiny):
    """Transformers' Trainer refuses any other name; training runs "sdpa" anyway."""
    from transformers import Trainer

    def prepare(model, **parallel):
        inputs = {"input_ids": torch.arange(4).view(1, 4), "labels": torch.arange(4).view(1, 4)}
        accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(**parallel), maybe_context_parallel=lambda **_: None)
        return Trainer._prepare_context_parallel_inputs(SimpleNamespace(accelerator=accelerator), model, inputs)[1]

    model = quantized(tiny("llama"))
    prepare(model, cp_enabled=False)
    assert model.config._attn_implementation == NAME
    assert "shift_labels" in prepare(model, cp_enabled=True, cp_backend="torch")
    assert model.config._attn_implementation == "sdpa"


def test_speculative_decoding_with_a_quantized_model_on_either_side(tiny):
    torch.manual_seed(1)
    target, draft = tiny("llama"), quantized(tiny("llama"))
    ids = torch.arange(3, 9).view(1, 6)
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for model, assistant in ((target, draft), (draft, target)):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), model.generate(ids, **options))
    assert torch.equal(draft.generate(ids, prompt_lookup_num_tokens=2, **options), draft.generate(ids, **options))


def test_export_and_a_model_of_the_same_config(tiny):
    model = quantized(tiny("llama"))
    ids = torch.arange(3, 9).view(1, 6)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    assert torch.equal(program.module()(input_ids=ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    again = type(model)(model.config)
    assert again.config._attn_implementation == NAME and again(ids).logits.isfinite().all()


@pytest.mark.parametrize("make", ["BartForConditionalGeneration", "WhisperForConditionalGeneration"])
def test_an_encoder_and_a_decoder_of_one_config(make):
    import transformers

    sizes = dict(vocab_size=64, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(encoder_ffn_dim=64, decoder_ffn_dim=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    if make.startswith("Bart"):
        config, inputs = transformers.BartConfig(**sizes, max_position_embeddings=64), {"input_ids": torch.arange(3, 11).view(2, 4)}
    else:
        more = dict(num_mel_bins=8, max_source_positions=20, max_target_positions=32, suppress_tokens=[], begin_suppress_tokens=[])
        config, inputs = transformers.WhisperConfig(**sizes, **more), {"input_features": torch.randn(2, 8, 40)}
    answers = []
    for choice in ("auto", "keep"):
        torch.manual_seed(0)
        model = quantized(getattr(transformers, make)(copy.deepcopy(config)).eval(), attention=choice)
        assert model.config._attn_implementation == (NAME if choice == "auto" else "sdpa")
        for options in ({}, {"num_beams": 2}):
            answers.append(model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options))
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])


def test_no_comparison_of_names_in_transformers_is_overlooked():
    """A model whose code compares the implementation with "sdpa", on one line or on several, is left alone."""
    import transformers

    def compares(node):
        parts = list(ast.walk(node)) if isinstance(node, ast.Compare) else []
        names = {getattr(part, "attr", None) or getattr(part, "id", None) for part in parts}
        return any(str(name).endswith("attn_implementation") for name in names) and any(getattr(part, "value", None) == "sdpa" for part in parts)

    near = re.compile(r"attn_implementation\s*(==|!=|in\b|not\s+in\b)|(==|!=)\s*[\w.]*attn_implementation")  # few sources are worth parsing
    comparing = {}
    for path in sorted((Path(transformers.__file__).parent / "models").rglob("modeling_*.py")):
        source = path.read_text()
        if near.search(source) and any(map(compares, ast.walk(ast.parse(source)))):
            comparing[path.parent.name] = attention._ASKS_BY_NAME.search(source) is not None
    assert {"falcon", "deepseek_v32"} <= comparing.keys()
    assert [name for name, found in comparing.items() if not found] == []
