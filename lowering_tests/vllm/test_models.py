"""Every kind of checkpoint inside vLLM gives the tokens that Transformers gives with the same weights, in float32: no ties, no roundings."""

from __future__ import annotations

import pytest
import torch

import fp4_inductor
from lowering_tests.vllm import served
from lowering_tests.vllm.served import PROMPTS, by_transformers, differences, engine, in_process

INSIDE = pytest.mark.skipif(not in_process(), reason="the worker is another process")
NEAR = 1e-3  # nats; float32 in another order: 2e-5 seen


def assert_equal(got, want) -> None:
    """All tokens are equal, and logprobs to ``NEAR``."""
    common, worst, _ = differences(got, want)
    assert common == [len(tokens) for tokens, _ in want]
    assert worst < NEAR


def alone(folder, prompts=PROMPTS):
    return by_transformers(fp4_inductor.load_pretrained(folder, dtype=torch.float32).float(), prompts)


ASKED = {"quantization": "fp4_inductor"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-modelopt-nvfp4", ASKED),
        ("llama-compressed-tensors-nvfp4", ASKED),
        ("llama-mixed", ASKED),  # o_proj and down_proj in FP8
        ("mixtral-modelopt-nvfp4", ASKED),
        ("dense-compressed", ASKED),
        ("moe-modelopt", ASKED),
        ("moe-transformers", {}),  # our own say so themselves
        ("sparse-transformers", {}),
        ("sparse-native", ASKED),
        ("moe_sparse-transformers", {}),
        ("dense-fp8-transformers", {}),
        ("dense-nvfp4-transformers", {}),
        ("dense-nvfp4-modelopt", ASKED),
        ("dense-nvfp4-compressed", ASKED),
        ("gptoss-modelopt", ASKED),  # biases, its activation, sinks in attention
        pytest.param("gptoss-native", ASKED, marks=pytest.mark.slow),
        ("gptoss_sparse-transformers", {}),
    ],
)
def test_tokens_are_those_of_transformers(folders, name, options):
    folder = folders(name)
    with engine(folder, dtype="float32", **options) as llm:
        got = llm.ask()
    assert_equal(got, alone(folder))


@pytest.mark.slow  # test_compiled.py compiles, and several scales are served uncompiled
@INSIDE
def test_compiled_with_three_scales_in_a_layer(folders):
    """q/k/v and gate/up with scales of their own are a launch each and fuse; what was loaded is what load_pretrained loads, bit for bit."""
    from fp4_inductor import passes

    folder = folders("dense-transformers")
    before = passes.matches().get("linear_glu", 0)
    fp4_inductor.decisions(clear=True)
    with engine(folder, dtype="float32", enforce_eager=False) as llm:
        got = llm.ask()
        layers = {name: m for name, m in llm.model.named_modules() if hasattr(m, "fp4_rows")}
        parts = {name: [t.clone() for t in (m.weight, m.weight_scale, m.weight_global_scale)] for name, m in layers.items()}
        rows = {name: m.fp4_rows for name, m in layers.items()}
    assert passes.matches()["linear_glu"] - before == 5
    lowered = fp4_inductor.decisions().rows
    assert [("3 global scales" in row.note) for row in lowered if row.n == 320] == [True] * 5  # q, k and v in one call
    assert {row.decision for row in lowered} <= {"proven", "runtime"}
    model = fp4_inductor.load_pretrained(folder, dtype=torch.float32)
    own = dict(model.named_modules())
    assert len(parts) == 20
    different = 0
    for name, (codes, scale, g) in parts.items():
        parent, _, last = name.rpartition(".")
        members = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(last, (last,))
        stored = [own[f"{parent}.{member}"] for member in members]
        assert torch.equal(codes, torch.cat([m.qdata for m in stored]))
        assert torch.equal(scale.view(torch.uint8), torch.cat([m.scale for m in stored]).view(torch.uint8))
        assert g.dtype == torch.float32
        wanted = torch.stack([m.global_scale for m in stored])
        assert torch.equal(g.expand(len(members)) if rows[name] is None else g, wanted)
        different += rows[name] is not None
    assert different >= 5
    assert_equal(got, by_transformers(model.float()))


def test_bfloat16_within_ties(folders):
    folder = folders("dense-modelopt")
    with engine(folder, **ASKED) as llm:
        got = llm.ask([list(b"It is a truth universally acknowledged"), list(b"Mr. Darcy"), list(b"She was not")])
    want = by_transformers(fp4_inductor.load_pretrained(folder), [list(b"It is a truth universally acknowledged"), list(b"Mr. Darcy"), list(b"She was not")])
    served.assert_same(got, want, 0.4)


@INSIDE
def test_dense_checkpoint_is_quantized_while_it_loads(folders):
    """The same numbers as quantize_model gives with one scale for merged layers."""
    from transformers import AutoModelForCausalLM

    from lowering_tests.vllm.conftest import ASSETS

    with engine(ASSETS / "austen_dense", dtype="float32", **ASKED) as llm:
        got = llm.ask()
        kinds = {type(m.quant_method).__name__ for m in llm.model.modules() if hasattr(m, "quant_method")}
    assert "OnlineLinearMethod" in kinds
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "austen_dense", dtype=torch.float32)
    config = fp4_inductor.NVFP4Config(scale_search="four_over_six", siblings="shared")
    assert_equal(got, by_transformers(fp4_inductor.quantize_model(model, config, progress=False)))


def test_lora(folders, tmp_path):
    """An adapter on quantized layers adds what it adds to the same model in Transformers."""
    peft = pytest.importorskip("peft")
    from vllm.lora.request import LoRARequest

    folder = folders("dense-modelopt")
    model = fp4_inductor.load_pretrained(folder, dtype=torch.float32).float()
    names = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=32, target_modules=names, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    want = by_transformers(adapted)
    with engine(folder, dtype="float32", enable_lora=True, max_lora_rank=8, **ASKED) as llm:
        plain = llm.ask()
        got = llm.ask(lora_request=LoRARequest("adapter", 1, str(tmp_path / "adapter")))
    assert_equal(got, want)
    assert plain != got
