"""What save_pretrained writes for each kind of packed weight, and folders that earlier versions wrote."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import fp4_inductor
from fp4_inductor import FP8Linear, NVFP4Config, Sparse24Config, Sparse24Linear, errors
from fp4_inductor.modules import FP4Experts, Sparse24ExpertWeight
from fp4_inductor.modules.marker import markers_of
from fp4_inductor.modules.packed import PackedWeight
from lowering_tests.foreign import PLAIN, assert_same, logits, raw, write

AUTO = transformers.AutoModelForCausalLM
FP8 = NVFP4Config("four_over_six", lm_head="fp8")
SPARSE = Sparse24Config(pruning="magnitude", accept_loss=True)
HALF = Sparse24Config(pruning="magnitude", accept_loss=True, layers=["mlp.up_proj"])
DOWN = Sparse24Config(pruning="magnitude", accept_loss=True, layers=["mlp.experts.down_proj"])
# Biases, padded sizes, heads tied to the embedding, experts in part.
CASES = {
    "FP8 head": ("llama", FP8),
    "FP8 head, tied": ("qwen2", FP8),
    "NVFP4 head, tied": ("qwen3", NVFP4Config("four_over_six", lm_head="nvfp4")),
    "2:4": ("llama", SPARSE),
    "2:4 with biases": ("qwen2", SPARSE),
    "2:4 in part": ("llama", HALF),
    "2:4 Conv1D": ("gpt2", SPARSE),
    "2:4 experts": ("mixtral", SPARSE),
    "2:4 experts in part": ("qwen3_moe", DOWN),
    "2:4 experts with biases": ("gpt_oss", SPARSE),
}
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")


def quantized(tiny, case: str) -> nn.Module:
    family, config = CASES[case]
    return fp4_inductor.quantize_model(tiny(family, torch.bfloat16), config, progress=False)


def formats(model) -> dict[str, str]:
    return {name: m.storage().name for name, m in model.named_modules() if isinstance(m, PackedWeight)}


@pytest.mark.parametrize("case", CASES)
def test_round_trip(tiny, tmp_path, case):
    model = quantized(tiny, case)
    model.save_pretrained(tmp_path / "a")
    again = AUTO.from_pretrained(tmp_path / "a", dtype="auto")
    assert formats(again) == formats(model)
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "b", max_shard_size="30kB")
    assert_same(fp4_inductor.load_pretrained(tmp_path / "b"), model)
    if "2:4" in case:
        assert any(isinstance(m, (Sparse24Linear, Sparse24ExpertWeight)) for m in again.modules())
    if "FP8" in case:
        assert isinstance(again.lm_head, FP8Linear)


def test_experts_without_a_gate(tiny, tmp_path):
    """transformers keeps a tensor of this architecture in float32 when it loads: compared is what was loaded."""
    fp4_inductor.quantize_model(tiny("nemotron_h", torch.bfloat16), SPARSE, progress=False).save_pretrained(tmp_path / "a")
    model = AUTO.from_pretrained(tmp_path / "a", dtype="auto")
    model.save_pretrained(tmp_path / "b")
    again = AUTO.from_pretrained(tmp_path / "b", dtype="auto")
    assert any(isinstance(m, Sparse24ExpertWeight) for m in again.modules())
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))


def test_a_model_that_scales_its_weights_in_place(tmp_path):
    """RWKV divides some of them by powers of two before it runs, and multiplies before it trains."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.RwkvConfig(vocab_size=128, rescale_every=1, **sizes)
    model = fp4_inductor.quantize_model(transformers.RwkvForCausalLM._from_config(config, dtype=torch.bfloat16).eval(), PLAIN, progress=False)
    model.save_pretrained(tmp_path)
    again = AUTO.from_pretrained(tmp_path, dtype="auto")
    before = again.rwkv.blocks[1].attention.output.global_scale.clone()
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(again.rwkv.blocks[1].attention.output.global_scale, before / 2)


@pytest.mark.parametrize("inner", [40, 24])
def test_experts_whose_sizes_are_padded(tmp_path, inner):
    """To multiples of 32 if they are 2:4."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": inner}
    config = transformers.MixtralConfig(vocab_size=128, num_local_experts=4, num_experts_per_tok=2, head_dim=12, **sizes)
    dense = AUTO.from_config(config, dtype=torch.bfloat16).eval()
    for config in (PLAIN, SPARSE):
        model = fp4_inductor.quantize_model(copy.deepcopy(dense), config, progress=False)
        model.save_pretrained(tmp_path)
        again = AUTO.from_pretrained(tmp_path, dtype="auto")
        assert_same(again, model)
        assert torch.equal(logits(again), logits(model))


def first_version(model, folder):
    """Names and config of version 1: no markers."""
    model.save_pretrained(folder / "now")
    config = json.loads((folder / "now" / "config.json").read_text())
    assert config["quantization_config"]["version"] == 2
    config["quantization_config"]["version"] = 1
    return write(folder / "then", {name: t for name, t in raw(folder / "now").items() if name not in markers_of(model)}, config)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gpt_oss"])
def test_the_first_version_is_still_read(tiny, tmp_path, family):
    model = fp4_inductor.quantize_model(tiny(family, torch.bfloat16), PLAIN, progress=False)
    folder = first_version(model, tmp_path)
    assert_same(AUTO.from_pretrained(folder, dtype="auto"), model)
    assert_same(fp4_inductor.load_pretrained(folder), model)


def test_a_version_to_come_is_refused(tiny, tmp_path):
    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), PLAIN, progress=False)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["version"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(errors.CheckpointError, match=r"version is not one that can be read; got 3; accepted: \[1, 2\]"):
        AUTO.from_pretrained(tmp_path)


def _spoil(name: str, value: int):
    def change(state: dict) -> None:
        key = next(n for n in state if n.endswith(name))
        state[key].view(torch.uint8).view(-1)[3] = value

    return change


def _cut(name: str, rows: slice):
    def change(state: dict) -> None:
        key = next(n for n in state if n.endswith(name))
        state[key] = state[key][rows].contiguous()

    return change


def _move(name: str, to: str):
    def change(state: dict) -> None:
        key = next(n for n in state if n.endswith(name))
        state[key.removesuffix(name) + to] = state.pop(key)

    return change


DAMAGE = {
    "metadata that is no 2:4": ("2:4", _spoil(".meta", 0x00), "meta|2:4|nibble"),
    "metadata of an expert": ("2:4 experts", _spoil("down_proj.meta", 0xFF), "meta|2:4|nibble"),
    "a NaN scale": ("2:4", _spoil(".scale", 0x7F), "NaN or negative block scale"),
    "no metadata": ("2:4", _move(".meta", ".meat"), r"meta is missing"),
    "fewer rows of metadata": ("2:4", _cut(".meta", slice(1, None)), "meta has the wrong shape or dtype"),
    "values of another K": ("2:4", _cut(".values", (slice(None), slice(4))), "wrong shape or dtype|no packed matrix"),
    "NaN in an FP8 weight": ("FP8 head", _spoil("lm_head.qdata", 0x7F), "holds NaN"),
    "an FP8 head without scales": ("FP8 head", _move("lm_head.scale", "lm_head.scales"), r"lm_head\.scale is missing"),
    "an FP8 head with fewer scales": ("FP8 head", _cut("lm_head.scale", slice(1, None)), r"lm_head\.scale has the wrong shape"),
    "a dense weight beside": ("2:4", lambda state: state.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64)}), "stored twice"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(tiny, tmp_path, damage):
    case, change, match = DAMAGE[damage]
    quantized(tiny, case).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(errors.CheckpointError, match=match):
        AUTO.from_pretrained(tmp_path)


def test_sparse_experts_become_fp4_experts(tiny, tmp_path):
    """The class of each weight is that on disk, not that of its neighbour."""
    model = quantized(tiny, "2:4 experts in part")
    model.save_pretrained(tmp_path)
    kinds = {(m.first.storage().name, m.down_proj.storage().name) for m in AUTO.from_pretrained(tmp_path).modules() if isinstance(m, FP4Experts)}
    assert kinds == {("nvfp4", "sparse24_nvfp4")}
