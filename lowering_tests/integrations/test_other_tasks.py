"""A checkpoint read as a model of another task: without its head, or with a head that Transformers initialises and names."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers

import fp4_inductor
from fp4_inductor import errors
from fp4_inductor.modules import FP4Linear
from lowering_tests.foreign import IDS, PLAIN, assert_same, raw, write

AUTO = {
    "base": transformers.AutoModel,
    "causal": transformers.AutoModelForCausalLM,
    "classify": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "masked": transformers.AutoModelForMaskedLM,
}
BERT = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}


def base_of(model):
    return getattr(model, model.base_model_prefix, model)


def make(family: str, task: str):
    torch.manual_seed(0)
    fields = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = {
        "llama": lambda: transformers.LlamaConfig(**fields, pad_token_id=0),
        "qwen2": lambda: transformers.Qwen2Config(**fields, tie_word_embeddings=True, pad_token_id=0),
        "mixtral": lambda: transformers.MixtralConfig(**fields, num_local_experts=4, num_experts_per_tok=2, pad_token_id=0),
        "bert": lambda: transformers.BertConfig(**BERT),
    }[family]()
    model = AUTO[task].from_config(config, dtype=torch.bfloat16).eval()
    return fp4_inductor.quantize_model(model, PLAIN, progress=False)


CASES = [
    ("llama", "causal", "base", []),
    ("llama", "causal", "classify", ["score.weight"]),
    ("llama", "base", "causal", ["lm_head.weight"]),
    ("llama", "classify", "causal", ["lm_head.weight"]),
    ("llama", "classify", "base", []),
    ("qwen2", "base", "causal", []),
    ("mixtral", "causal", "base", []),
    ("mixtral", "base", "classify", ["score.weight"]),
    ("bert", "masked", "base", ["pooler.dense.bias", "pooler.dense.weight"]),
    ("bert", "masked", "classify", ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]),
    ("bert", "classify", "masked", ["cls.predictions.bias", "cls.predictions.transform"]),
]


@pytest.mark.parametrize(("family", "saved", "read", "new"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_another_task(tmp_path, family, saved, read, new):
    model = make(family, saved)
    model.save_pretrained(tmp_path)
    if new:
        with pytest.warns(UserWarning, match=f"not in the checkpoint, newly initialized:.*{re.escape(new[0].rpartition('.')[0])}"):
            again = AUTO[read].from_pretrained(tmp_path, dtype="auto")
    else:
        again = AUTO[read].from_pretrained(tmp_path, dtype="auto")
    assert any(isinstance(m, FP4Linear) for m in again.modules())
    left, right = base_of(again), base_of(model)
    theirs = right.state_dict()
    for name, t in left.state_dict().items():
        if "pooler" not in name:
            assert torch.equal(t.view(torch.uint8) if t.dim() else t, theirs[name].view(torch.uint8) if t.dim() else theirs[name]), name
    if "pooler" not in "".join(new):
        with torch.no_grad():
            assert torch.equal(left(input_ids=IDS)[0], right(input_ids=IDS)[0])
    for name in new:
        weights = [p for n, p in again.named_parameters() if n.startswith(name) and n.endswith("weight") and "norm" not in n.lower()]
        assert all(w.isfinite().all() and 0.0 < float(w.float().std()) < 1.0 for w in weights)  # initialised, not left as memory was
    assert any("newly initialized" in note for note in fp4_inductor.report(again).notes) == bool(new)


def test_load_pretrained_asks_for_the_class(tmp_path):
    """Whoever names none gets no random head; whoever names one does, with a warning; a head that is not needed is no matter."""
    make("llama", "base").save_pretrained(tmp_path / "base")
    with pytest.raises(errors.CheckpointError, match=r"lm_head\.weight: not in the checkpoint"):
        fp4_inductor.load_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match=r"newly initialized: lm_head\.weight"):
        assert fp4_inductor.load_pretrained(tmp_path / "base", model_class=AUTO["causal"]).lm_head.weight.isfinite().all()
    model = make("llama", "causal")
    model.save_pretrained(tmp_path / "causal")
    again = fp4_inductor.load_pretrained(tmp_path / "causal", model_class=AUTO["base"])
    assert_same(again, model.model)
    assert any("lm_head.weight" in note for note in fp4_inductor.report(again).notes)


@pytest.mark.parametrize("lost", ["model.layers.1.self_attn.q_proj", "model.embed_tokens", "model.norm", "model.layers.0.input_layernorm"])
def test_what_is_lost_is_no_head(tmp_path, lost):
    make("llama", "causal").save_pretrained(tmp_path / "a")
    state = {name: t for name, t in raw(tmp_path / "a").items() if not name.startswith(f"{lost}.")}
    write(tmp_path / "b", state, json.loads((tmp_path / "a" / "config.json").read_text()))
    for auto in (AUTO["causal"], AUTO["base"], AUTO["classify"]):
        with pytest.raises(errors.CheckpointError, match="not in the checkpoint"):
            auto.from_pretrained(tmp_path / "b")


def test_of_the_same_task_nothing_is_forgiven(tmp_path):
    make("llama", "causal").save_pretrained(tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    state = raw(tmp_path / "a")
    write(tmp_path / "more", state | {"score.weight": torch.zeros(2, 64)}, config)
    write(tmp_path / "less", {name: t for name, t in state.items() if name != "lm_head.weight"}, config)
    for folder, match in (("more", r"score\.weight: not in the model"), ("less", r"lm_head\.weight: not in the checkpoint")):
        with pytest.raises(errors.CheckpointError, match=match):
            AUTO["causal"].from_pretrained(tmp_path / folder)
