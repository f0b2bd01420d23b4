"""Models whose layers share a block: one packed weight on disk and in memory, however many layers run it."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear
from fp4_inductor.errors import CheckpointError
from lowering_tests.foreign import PLAIN, assert_same, logits, raw, relative, write

BASE = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"],
    "n_mamba_heads": 4,
    "mamba_headdim": 32,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_ngroups": 1,
    "adapter_rank": 16,
}
ZAMBA = {
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "n_mamba_heads": 2,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
}
CASES = {
    "zamba2, one block": ("Zamba2Config", ZAMBA2 | {"num_mem_blocks": 1}),
    "zamba2, two blocks with adapters": ("Zamba2Config", ZAMBA2 | {"num_mem_blocks": 2, "use_shared_attention_adapter": True}),
    "zamba": ("ZambaConfig", ZAMBA),
}


def quantized(case: str) -> nn.Module:
    torch.manual_seed(0)
    name, fields = CASES[case]
    config = getattr(transformers, name)(**BASE | fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return fp4_inductor.quantize_model(model, PLAIN, strict=False, progress=False)


def sharing(model: nn.Module) -> dict[str, list[str]]:
    """The layers by the first of those that hold the same codes."""
    by_address: dict[int, list[str]] = {}
    for name, m in model.named_modules():
        if isinstance(m, FP4Linear):
            by_address.setdefault(m.qdata.data_ptr(), []).append(name)
    return {names[0]: names for names in by_address.values()}


@pytest.mark.parametrize("case", CASES)
def test_what_save_pretrained_wrote_is_read(tmp_path, case):
    model = quantized(case)
    assert max(map(len, sharing(model).values())) > 1
    model.save_pretrained(tmp_path / "a")
    again = type(model).from_pretrained(tmp_path / "a", dtype="auto")
    assert sharing(again) == sharing(model)
    assert_same(again, model)
    assert torch.equal(logits(again), logits(model))
    # What was loaded is as good as what was quantized.
    again.tie_weights()
    again.save_pretrained(tmp_path / "b")
    assert raw(tmp_path / "b").keys() == raw(tmp_path / "a").keys()
    assert_same(fp4_inductor.load_pretrained(tmp_path / "b"), model)


@pytest.mark.filterwarnings("ignore:export_pretrained")
def test_exports(tmp_path):
    model = quantized("zamba2, one block")
    fp4_inductor.export_pretrained(model, tmp_path)
    again = fp4_inductor.load_pretrained(tmp_path)
    assert sharing(again) == sharing(model)
    assert relative(logits(again), logits(model)) < 0.05


def test_a_weight_that_is_packed_here_and_dense_there_is_refused(tmp_path):
    model = quantized("zamba2, one block")
    model.save_pretrained(tmp_path / "a")
    packed = next(name for name, names in sharing(model).items() if len(names) > 1)
    follower = sharing(model)[packed][1]
    state = raw(tmp_path / "a") | {f"{follower}.weight": model.get_submodule(follower).dequantize()}
    write(tmp_path / "b", state, fp4_inductor.checkpoint.shards.read_json(tmp_path / "a" / "config.json"))
    with pytest.raises(CheckpointError, match="which is stored dense"):
        fp4_inductor.load_pretrained(tmp_path / "b")
