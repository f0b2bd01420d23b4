"""GGUF of many architectures: values equal to what transformers dequantizes from the same file, FP4 kept packed; gpt-oss in MXFP4."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf")

import fp4_inductor
from fp4_inductor import FP4Linear, errors
from fp4_inductor.modules import FP4Experts
from lowering_tests.foreign import dequantized as as_dense
from lowering_tests.foreign import logits, relative
from lowering_tests.gguf_files import write_gpt_oss, write_random

BF16 = 2.0**-7
TINY = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
# architecture in the file -> (config class, its arguments, FP4 weights that stay packed in a layer)
ARCHITECTURES = {
    "llama": ("LlamaConfig", TINY, 7),
    "qwen2": ("Qwen2Config", TINY, 7),
    "qwen3": ("Qwen3Config", TINY | {"head_dim": 32}, 7),
    "phi3": ("Phi3Config", TINY | {"pad_token_id": 0}, 4),
    "starcoder2": ("Starcoder2Config", TINY, 6),
    "gemma2": ("Gemma2Config", TINY | {"head_dim": 16}, 7),
    "gemma3": ("Gemma3TextConfig", TINY | {"head_dim": 16}, 7),
    "nemotron": ("NemotronConfig", TINY, 6),
    "stablelm": ("StableLmConfig", TINY, 7),
    "gpt2": ("GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128}, 4),
    "bloom": ("BloomConfig", {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}, 4),
    "qwen3moe": ("Qwen3MoeConfig", MOE | {"norm_topk_prob": True}, 4),
}


def build(config_name: str, options: dict):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_values_transformers_dequantizes(arch, tmp_path):
    """Its own loader, its own rearrangements, to float32; here the FP4 weights stay packed and are dequantized for the comparison."""
    import transformers

    config_name, options, packed = ARCHITECTURES[arch]
    kind = "MXFP4" if arch in ("qwen2", "gpt2", "qwen3moe") else "NVFP4"
    model = build(config_name, options)
    write_random(model, tmp_path / "m.gguf", arch, kind)
    # Its map of the metadata has gaps (head_dim of qwen3): it is given the configuration.
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=model.config, dtype=torch.float32)
    got = fp4_inductor.load_pretrained(tmp_path / "m.gguf", dtype=torch.float32)
    layers = [m for m in got.modules() if isinstance(m, FP4Linear)]
    experts = [m for m in got.modules() if isinstance(m, FP4Experts)]
    assert len(layers) == packed * 2
    assert len(experts) == (2 if "moe" in arch else 0)
    state, ours = want.state_dict(), as_dense(got, got.config).state_dict()
    assert state.keys() == ours.keys()
    for name, t in state.items():
        assert torch.equal(t.float(), ours[name].float()), name
    assert relative(logits(got), logits(want)) < 1e-4


def gpt_oss():
    options = TINY | {"head_dim": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    return build("GptOssConfig", options | {"layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 4096})


@pytest.mark.parametrize(("kind", "scales"), [("MXFP4", False), ("NVFP4", False), ("NVFP4", True)])
def test_gpt_oss(tmp_path, kind, scales):
    """transformers cannot read this file itself: the values are those of gguf-py's decoder, put where the converter took them from."""
    dense = write_gpt_oss(gpt_oss(), tmp_path / "m.gguf", kind, scales=scales)
    model = fp4_inductor.load_pretrained(tmp_path / "m.gguf", dtype=torch.float32)
    c = model.config
    assert (c.num_local_experts, c.head_dim, c.sliding_window, c.num_experts_per_tok) == (4, 64, 16, 2)
    assert c.rope_parameters["rope_type"] == "yarn"
    assert (c.rope_parameters["factor"], c.rope_parameters["original_max_position_embeddings"]) == (8.0, 512)
    assert sum(isinstance(m, FP4Experts) for m in model.modules()) == 2
    ours = as_dense(model, c)
    state = ours.state_dict()
    assert dense.keys() == state.keys()
    for name, t in dense.items():
        assert torch.equal(t, state[name]), name
    assert relative(logits(model), logits(ours)) < 1e-4
    notes = fp4_inductor.report(model).text(1000)
    assert ("input scales of GGUF experts: 6 tensors ignored" in notes) == scales


def edited(tmp_path, monkeypatch, **changes):
    """A gpt-oss file some of whose tensors are left out (None) or written otherwise."""
    import gguf

    add = gguf.GGUFWriter.add_tensor

    def changed(self, name, tensor, *args, **kwargs):
        for end, change in changes.items():
            if name.endswith(end):
                if change is None:
                    return
                tensor, kwargs = change(tensor), {}
        add(self, name, tensor, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    write_gpt_oss(gpt_oss(), tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def test_experts_in_another_type_become_dense(tmp_path, monkeypatch):
    """One of three in float32: all of that layer's experts are dequantized, none silently dropped."""
    import numpy as np

    zeros = np.zeros((4, 64, 64), np.float32)
    path = edited(tmp_path, monkeypatch, **{"blk.0.ffn_up_exps.weight": lambda t: zeros})
    model = fp4_inductor.load_pretrained(path, strict=False, dtype=torch.float32)
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert not isinstance(experts[0], FP4Experts)
    assert isinstance(experts[1], FP4Experts)
    assert not experts[0].gate_up_proj[..., 1::2].any()
    assert experts[0].gate_up_proj[..., ::2].any()
    assert any("experts" in s.name for s in fp4_inductor.report(model).uncovered)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"blk.1.ffn_up_exps.weight": None}, r"blk\.1\.ffn_up_exps\.weight"),
        ({"blk.1.ffn_down_exps.bias": None}, r"blk\.1\.ffn_down_exps\.bias"),
        ({"blk.0.ffn_gate_exps.bias": lambda t: t[:, :32].copy()}, r"blk\.0\.ffn_up_exps\.bias"),
        ({"blk.0.attn_q.weight": None}, r"q_proj\.weight: not in the checkpoint"),
        ({"blk.0.attn_q.weight": lambda t: t[:64].copy()}, r"the shape of model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
)
def test_incomplete_files(tmp_path, monkeypatch, changes, match):
    path = edited(tmp_path, monkeypatch, **changes)
    with pytest.raises(errors.FP4Error, match=match) as caught:
        fp4_inductor.load_pretrained(path)
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)


def test_an_architecture_transformers_does_not_read(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(errors.CheckpointError, match=r"architecture rwkv7.*GGUF support"):
        fp4_inductor.load_pretrained(tmp_path / "m.gguf")


def test_a_tensor_of_another_type(tmp_path):
    """A float32 weight whose type says NVFP4 would be read from a seventh of its bytes: the tensor behind it is then not where it should be."""
    write_gpt_oss(gpt_oss(), tmp_path / "m.gguf")
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    assert data[at] == 0
    data[at] = 40
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(errors.CheckpointError, match="is not where the tensor before it ends"):
        fp4_inductor.load_pretrained(tmp_path / "m.gguf")
    write_gpt_oss(gpt_oss(), tmp_path / "n.gguf")
    with open(tmp_path / "n.gguf", "ab") as file:
        file.write(bytes(64))
    with pytest.raises(errors.CheckpointError, match="bytes after the last tensor"):
        fp4_inductor.load_pretrained(tmp_path / "n.gguf")


def test_an_array_that_claims_to_be_endless(tmp_path):
    """gguf-py loops over it for ever."""
    import struct

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 2**60)
    (tmp_path / "m.gguf").write_bytes(head + b"\0" * 64)
    with pytest.raises(errors.CheckpointError, match="more elements than the file has room for"):
        fp4_inductor.load_pretrained(tmp_path / "m.gguf")


def test_config_json_cannot_name_gguf(tmp_path):
    import json
    import shutil

    from lowering_tests.foreign import MODELOPT

    shutil.copytree(MODELOPT, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gguf"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CheckpointError, match=r"a \.gguf file, named to load_pretrained"):
        fp4_inductor.load_pretrained(tmp_path)
