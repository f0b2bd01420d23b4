"""The attention implementation "fp4_inductor" of Transformers: where it is selected, what it leaves to "sdpa", and the graph of a decode step on CUDA."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4InductorConfig, NVFP4Config, Sparse24Config, errors
from fp4_inductor.decoding import attention
from fp4_inductor.decoding.attention import NAME, use_attention_backend
from fp4_inductor.kernels.select import ATTENTION_NOTE
from fp4_inductor.lowerings.journal import listen
from lowering_tests import fake_cuda

IDS = torch.arange(1, 9).view(2, 4)
GENERATE = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
SELECTED = 'attention: fp4.decode_attention for decode steps and over masks on CUDA, "sdpa" for all else'


def quantized(model, **options):
    return fp4_inductor.quantize_model(model, NVFP4Config("amax", **options), progress=False)


def notes(model):
    return [note for note in fp4_inductor.report(model).notes if note.startswith("attention")]


# --- selection --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3", "mixtral", "deepseek_v3"])
def test_a_decoder_is_switched_and_generates_what_it_did(tiny, family):
    """On a CPU it is "sdpa" itself: every bit."""
    ours, theirs = quantized(tiny(family)), quantized(tiny(family), attention="keep")
    assert ours.config._attn_implementation == NAME and theirs.config._attn_implementation == "sdpa"
    assert notes(ours) == [SELECTED]
    assert notes(theirs) == ['attention: as it was (attention="keep")']
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)
    for options in (GENERATE, GENERATE | {"cache_implementation": "static", "disable_compile": True}):
        if family == "deepseek_v3" and "cache_implementation" in options:
            continue  # its keys and values differ in width, which StaticCache does not take here
        assert torch.equal(ours.generate(IDS, **options), theirs.generate(IDS, **options))
    assert fp4_inductor.report(ours).text(1000).count(SELECTED) == 1


def test_padding_and_a_window_mask_as_with_sdpa(tiny):
    """The masks are "sdpa"'s: bool, None where they may be."""
    ours, theirs = quantized(tiny("mistral")), quantized(tiny("mistral"), attention="keep")
    padded = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(ours(IDS, attention_mask=padded).logits, theirs(IDS, attention_mask=padded).logits)
    assert torch.equal(ours.generate(IDS, attention_mask=padded, **GENERATE), theirs.generate(IDS, attention_mask=padded, **GENERATE))


def test_what_is_not_sdpa_stays(tiny):
    model = tiny("llama")
    model.set_attn_implementation("eager")
    quantized(model)
    assert model.config._attn_implementation == "eager"
    assert notes(model) == ['attention: as it was, it is "eager"; fp4.decode_attention takes the place of "sdpa"']
    assert notes(quantized(tiny("gpt_oss"))) == ['attention: as it was, it is "eager"; fp4.decode_attention takes the place of "sdpa"']


def test_encoders_and_other_modules_are_no_decoders():
    import transformers

    bert = transformers.BertModel(transformers.BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, vocab_size=50))
    assert use_attention_backend(bert) == []
    assert bert.config._attn_implementation == "sdpa"
    assert use_attention_backend(torch.nn.Linear(2, 2)) == []
    assert notes(quantized(torch.nn.Sequential(torch.nn.Linear(32, 32)))) == []


def test_code_that_asks_for_sdpa_by_name_is_left_alone(tiny, monkeypatch):
    """DeepSeek-V3.2, Falcon and others make their masks by the name of the implementation."""
    assert attention._ASKS_BY_NAME.search('if self.config._attn_implementation in ("eager", "sdpa"):')
    assert attention._ASKS_BY_NAME.search('if self.config._attn_implementation == "sdpa" and not output_attentions:')
    assert not attention._ASKS_BY_NAME.search("ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)")
    monkeypatch.setattr(attention, "_source", lambda module: 'if config._attn_implementation == "sdpa":')
    model = quantized(tiny("llama"))
    assert model.config._attn_implementation == "sdpa"
    assert notes(model) == ['attention: as it was, the model\'s code asks for "sdpa" by name']


def test_only_the_text_part_of_a_multimodal_model_is_switched():
    import transformers

    text = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    vision = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    assert use_attention_backend(model) == [SELECTED]
    assert model.config.text_config._attn_implementation == NAME
    assert model.config.vision_config._attn_implementation == model.config._attn_implementation == "sdpa"
    want = model(input_ids=IDS).logits
    assert use_attention_backend(model) == [SELECTED]  # once more changes nothing
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(input_ids=IDS).logits, want)


def test_sparse_config_and_bad_choices(tiny):
    with pytest.raises(errors.ConfigError, match=r"'sdpa'.*auto.*keep"):
        NVFP4Config(attention="sdpa")
    with pytest.raises(errors.ConfigError, match="attention"):
        Sparse24Config(attention=None)
    with pytest.raises(errors.ConfigError, match="attention"):
        fp4_inductor.load(tiny("llama"), "nowhere", attention="eager")
    model = fp4_inductor.quantize_model(tiny("llama"), Sparse24Config("magnitude", accept_loss=True, attention="keep"), progress=False)
    assert model.config._attn_implementation == "sdpa"
    model = fp4_inductor.quantize_model(tiny("llama"), Sparse24Config("magnitude", accept_loss=True), progress=False)
    assert model.config._attn_implementation == NAME


# --- saved and loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", "keep"])
def test_round_trips(tiny, tmp_path, choice):
    from transformers import AutoModelForCausalLM

    model = quantized(tiny("llama"), attention=choice)
    want, name = model(IDS).logits, NAME if choice == "auto" else "sdpa"
    model.save_pretrained(tmp_path / "hf")
    fp4_inductor.save(model, tmp_path / "native")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert "_attn" not in json.dumps(config)
    assert config["quantization_config"].get("attention", "auto") == choice
    loaded = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto"),
        fp4_inductor.load_pretrained(tmp_path / "hf"),
        fp4_inductor.load(tiny("llama"), tmp_path / "native", attention=choice),
    ]
    for other in loaded:
        assert other.config._attn_implementation == name
        assert torch.equal(other(IDS).logits, want)
        assert len(notes(other)) == 1
    turned = fp4_inductor.load_pretrained(tmp_path / "hf", attention="keep" if choice == "auto" else "auto")
    assert turned.config._attn_implementation != name


def test_quantizing_while_loading(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny("llama").save_pretrained(tmp_path)
    for choice, name in (("auto", NAME), ("keep", "sdpa")):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FP4InductorConfig(attention=choice))
        assert model.config._attn_implementation == name
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", quantization_config=FP4InductorConfig())
    assert eager.config._attn_implementation == "eager"


def test_a_saved_config_is_read_without_this_package(tiny, tmp_path):
    quantized(tiny("llama")).config.save_pretrained(tmp_path)
    code = f"import transformers, sys; c = transformers.AutoConfig.from_pretrained({str(tmp_path)!r}); del c.quantization_config; "
    code += "m = transformers.AutoModelForCausalLM.from_config(c); print(m.config._attn_implementation, 'fp4_inductor' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["sdpa", "False"]


# --- what the op is called for ------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Calls as on CUDA: ``(shape of the query, mask)`` of each that the op gets; the others reach "sdpa"."""
    seen = []

    def op(query, key, value, mask=None, scale=None):
        seen.append((tuple(query.shape), mask))
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.ops.fp4, "decode_attention", op)
    return seen


def operands(q=1, h=8, kv=2, d=64, value_d=None, dtype=torch.bfloat16, **options):
    return [torch.randn(2, n, s, w, dtype=dtype, **options) for n, s, w in ((h, q, d), (kv, 20, d), (kv, 20, value_d or d))]


class _Module:
    num_key_value_groups, is_causal = 4, True


MASK = torch.ones(2, 1, 1, 20, dtype=torch.bool)
OURS = {
    "a step over a StaticCache": ({}, MASK, {}),
    "a step over a DynamicCache": ({}, None, {}),
    "four queries": (dict(q=4), torch.ones(1, 1, 4, 20, dtype=torch.bool), {}),
    "four queries, a mask for each head": (dict(q=4), torch.ones(1, 8, 4, 20, dtype=torch.bool), {}),
    "a prompt over a mask": (dict(q=5), torch.ones(1, 1, 5, 20, dtype=torch.bool), {}),
    "options that say nothing": ({}, MASK, dict(sliding_window=7, position_ids=MASK, output_attentions=False, softcap=None, is_causal=True, scaling=0.3)),
}
THEIRS = {
    "a prompt without a mask": (dict(q=5), None, {}),
    "a prompt over a mask for each head": (dict(q=5), torch.ones(1, 8, 5, 20, dtype=torch.bool), {}),
    "a prompt over a mask that is added": (dict(q=5), torch.zeros(1, 1, 5, 20, dtype=torch.bfloat16), {}),
    "several queries without a mask": (dict(q=2), None, {}),
    "float32": (dict(dtype=torch.float32), MASK, {}),
    "training": (dict(requires_grad=True), MASK, {}),
    "dropout": ({}, MASK, dict(dropout=0.1)),
    "position bias": ({}, MASK, dict(position_bias=torch.zeros(2, 8, 1, 20, dtype=torch.bfloat16))),
    "an option nobody knows": ({}, MASK, dict(something_new=torch.zeros(8))),
    "attentions asked for": ({}, MASK, dict(output_attentions=True)),
    "values of another width": (dict(value_d=32), MASK, {}),
    "a width that is no multiple of 8": (dict(d=36), MASK, {}),
    "wide heads": (dict(d=512), MASK, {}),
}


@pytest.mark.parametrize("case", OURS)
def test_ours(calls, case):
    sizes, mask, options = OURS[case]
    q, k, v = operands(**sizes)
    got, weights = attention.attention_forward(_Module, q, k, v, mask, **options)
    assert len(calls) == 1 and calls[0][1] is mask and weights is None
    assert got.shape == (2, q.shape[2], 8, 64)


@pytest.mark.parametrize("case", THEIRS)
def test_theirs(calls, case):
    sizes, mask, options = THEIRS[case]
    got, _ = attention.attention_forward(_Module, *operands(**sizes), mask, **options)
    assert not calls
    assert got.shape[2] == 8


def test_other_devices_are_sdpas():
    assert not attention._is_ours(*operands(), MASK, 0.0, {})


# --- the graph --------------------------------------------------------------------------------------------------


def _read(x, index):
    """``x[index]`` by operators: torch's own entry asks for a CUDA device that is not there."""
    index = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index[at : at + 1] = [slice(None)] * (x.dim() - sum(i is not None for i in index) + 1)
    dim = 0
    for i in index:
        if i is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(i, slice):
            x, dim = torch.ops.aten.slice.Tensor(x, dim, i.start, i.stop, i.step or 1) if i != slice(None) else x, dim + 1
        else:
            x = x.select(dim, i)
    return x


@pytest.fixture
def decode_step(monkeypatch):
    """``decode_step(implementation, layers)``: the wrapper's code of one step of a tiny Qwen3 over a StaticCache on fake CUDA tensors; ``pdl``: all code,
    Inductor's own kernels beginning early.
    """
    import transformers
    from transformers.initialization import no_init_weights

    monkeypatch.setattr(torch.Tensor, "__getitem__", _read)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y, non_blocking=False: torch.ops.aten.copy_.default(x, y))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format))
    sizes = dict(vocab_size=256, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64)

    def code(implementation, layers, queries=1, dynamic=None, pdl=False):
        attention.register()
        config = transformers.Qwen3Config(**sizes, num_hidden_layers=layers, max_position_embeddings=512, dtype=torch.bfloat16)
        config._attn_implementation = implementation
        with fake_cuda.code_generation(config={"shape_padding": False, "joint_graph_constant_folding": False, "triton.enable_pdl": pdl}) as out:
            with torch.device("cuda"), no_init_weights():
                torch.set_default_dtype(torch.bfloat16)
                try:
                    model = transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False)
                finally:
                    torch.set_default_dtype(torch.float32)
                cache = transformers.StaticCache(config=config, max_cache_len=128)
                cache.early_initialization(batch_size=2, num_heads=2, head_dim=64, dtype=torch.bfloat16, device=torch.device("cuda"))
                ids, position = torch.ones(2, queries, dtype=torch.long), torch.zeros(1, queries, dtype=torch.long)
            step = torch.compile(
                lambda ids, position: model(input_ids=ids, past_key_values=cache, position_ids=position, use_cache=True).logits,
                fullgraph=True,
                dynamic=dynamic,
            )
            fake_cuda.call(step, ids, position)
        return out[0] if pdl else fake_cuda.call_body(out[0])

    return code


def test_a_decode_step_reads_the_cache_where_it_lies(decode_step):
    with listen() as entries:
        ours = decode_step(NAME, 2)
    theirs = decode_step("sdpa", 2)
    told = {(e.op, e.m, e.n, e.k, e.decision.row.kernel, e.decision.how, e.note) for e in entries}
    assert told == {("fp4.decode_attention", "4", 8, 64, "triton_decode_attention", "proven", ATTENTION_NOTE)}
    assert [e.module.rsplit(".", 2)[-2:] for e in entries] == [[str(i), "self_attn"] for i in range(2)]
    assert ours.count("torch.ops.fp4.decode_attention.default(") == 2
    lines = [line for line in ours.splitlines() if "decode_attention" in line]
    masks = {line.split("reinterpret_tensor(")[1] for line in lines}
    assert len(masks) == 1, "one mask for all layers"
    for line in lines:
        key, value = line.split("(", 1)[1].split(", ")[1:3]
        assert key.startswith("in") and value.startswith("in"), "the caches themselves, no copy of them"
    # expand, copy and score kernels that sdpa's expansion needs are gone
    assert ours.count(".run(") + 2 * 3 <= theirs.count(".run(")
    large = "(2, 8, 128, 64)"  # K or V of one layer, expanded to all heads
    assert large not in ours


def test_kernels_that_inductor_begins_early_all_wait_before_they_let_the_next(decode_step):
    """One that does not would let ours ahead of what computes their activations: benchmarks/README.md recommends the option."""
    kernels = re.findall(r"^def (triton_\w+)\((.*?)^'''", decode_step(NAME, 1, pdl=True), re.DOTALL | re.MULTILINE)
    assert len(kernels) >= 8
    for name, body in kernels:
        assert -1 < body.find("gdc_wait()") < body.find("gdc_launch_dependents()") < body.rfind("tl.store("), name


def test_a_prompt_and_a_symbolic_number_of_queries(decode_step):
    """The op picks its kernel at each call: a guard on the number of queries would be one more graph."""
    for options in (dict(queries=32), dict(queries=4), dict(queries=4, dynamic=True)):
        with listen() as entries:
            code = decode_step(NAME, 1, **options)
        assert code.count("torch.ops.fp4.decode_attention.default(") == 1, options
        kernels = {e.decision.row.kernel for e in entries if e.op == "fp4.decode_attention" and e.decision.row}
        assert kernels == ({"triton_masked_attention"} if options == dict(queries=32) else {"triton_decode_attention"} if len(options) == 1 else kernels)
