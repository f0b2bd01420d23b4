"""quantize_model on the tiny families: what is replaced, what is skipped and why, what strict refuses, right numbers."""

from __future__ import annotations

import copy

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config, errors
from fp4_inductor.models import families
from fp4_inductor.models.experts import recognise
from fp4_inductor.modules import FP4Experts, FP4ExpertWeight
from fp4_inductor.ops.activation import Activation

IDS = torch.arange(24).reshape(2, 12) % 128
# Every one of these has a plain nn.Linear (or a router module) that must never become FP4.
ROUTERS = {
    "deepseek_v3": ".mlp.gate",
    "ernie4_5_moe": ".mlp.gate",
    "glm4_moe": ".mlp.gate",
    "glm4_moe_lite": ".mlp.gate",
    "gpt_oss": ".mlp.router",
    "granitemoehybrid": ".router",
    "hunyuan_moe": ".mlp.gate.wg",
    "lfm2_moe": ".feed_forward.gate",
    "llama4": ".feed_forward.router",
    "minimax_m2": ".mlp.gate",
    "mixtral": ".mlp.gate",
    "nemotron_h": ".mixer.gate",
    "olmoe": ".mlp.gate",
    "qwen3_5_moe": ".mlp.gate",
    "qwen3_moe": ".mlp.gate",
    "qwen3_next": ".mlp.gate",
}


TRANSPOSED = {"GptOssExperts", "Llama4TextExperts"}  # [E, K, N]


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.double()


def _dequantized_twin(dense, quantized):
    """The dense model with the quantized weights written back: what the quantized one must compute."""
    twin = copy.deepcopy(dense)
    modules = dict(twin.named_modules())
    for name, layer in quantized.named_modules():
        if isinstance(layer, FP4Linear):
            weight = modules[name].weight.data
            w = layer.dequantize(weight.dtype)
            weight.copy_(w.t() if type(modules[name]).__name__ == "Conv1D" else w)
        elif isinstance(layer, FP4Experts):
            for part in (layer.first_name, "down_proj"):
                stored = layer.get_submodule(part)
                weight = modules[name].get_parameter(part).data
                transposed = type(modules[name]).__name__ in TRANSPOSED
                w = stored.dequantize(weight.dtype)
                assert w.shape == stored.shape, "the tiny models need no padding"
                weight.copy_(w.mT if transposed else w)
    return twin


def test_logits_are_those_of_the_dequantized_model(tiny, family):
    dense = tiny(family)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), progress=False)
    want = _logits(_dequantized_twin(dense, model))
    got = _logits(model)
    assert (got - want).norm() / want.norm() < 2e-5
    # and the quantization did something
    assert (got - _logits(dense)).norm() / want.norm() > 1e-3


def test_every_parameter_is_accounted_for(tiny, family):
    dense = tiny(family)
    total = sum(p.numel() for p in dense.parameters())
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), strict=False, progress=False)
    packed = (FP4Linear, FP4ExpertWeight)
    biases = sum(m.bias.numel() for m in model.modules() if isinstance(m, packed) and m.bias is not None)
    report = fp4_inductor.report(model)
    assert report.params + biases + sum(s.params for s in (*report.skipped, *report.uncovered)) == total
    assert all(s.reason for s in (*report.skipped, *report.uncovered))
    assert {i.name for i in report.layers} == {n for n, m in model.named_modules() if isinstance(m, packed)}


def test_every_family_is_covered_completely_under_strict(tiny, family):
    report = fp4_inductor.report(fp4_inductor.quantize_model(tiny(family), progress=False))
    assert report.coverage == 100.0
    assert not report.uncovered


def test_experts_are_in_the_report_with_their_errors(tiny, moe_family):
    dense = tiny(moe_family)
    stacks = {n: p for n, p in dense.named_parameters() if p.dim() == 3 and "experts" in n}
    shapes = {n: tuple(p.shape) for n, p in stacks.items()}
    assert stacks
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), progress=False)
    rows = {i.name: i for i in fp4_inductor.report(model).layers if i.name in shapes}
    assert rows.keys() == shapes.keys()
    for name, row in rows.items():
        assert sorted(row.shape) == sorted(shapes[name])
        assert row.params == stacks[name].numel()
        w = model.get_submodule(name).dequantize(torch.float32)
        w = w.mT if moe_family in ("gpt_oss", "llama4") else w
        assert row.relative_error == pytest.approx(float((w - stacks[name].detach()).norm() / stacks[name].detach().norm()), rel=1e-3)
        assert 0.05 < row.relative_error < 0.12
    # One global scale per expert: two experts of one layer differ.
    some = model.get_submodule(next(iter(rows)))
    assert some.global_scale.shape == (some.num_experts,)
    assert some.global_scale.unique().numel() == some.num_experts


def test_a_wrong_expert_cannot_hide(tiny, moe_family):
    model = fp4_inductor.quantize_model(tiny(moe_family), progress=False)
    clean = _logits(model)
    for m in model.modules():
        if isinstance(m, FP4ExpertWeight):
            for t in (m.qdata, m.scale.view(torch.uint8), m.global_scale):
                t.copy_(t.roll(1, 0))
    assert (_logits(model) - clean).norm() / clean.norm() > 1e-3


def test_routers_and_heads_stay(tiny, moe_family):
    model = fp4_inductor.quantize_model(tiny(moe_family), progress=False)
    quantized = {n for n, m in model.named_modules() if isinstance(m, FP4Linear)}
    assert not any(n.endswith(ROUTERS[moe_family]) for n in quantized)
    skipped = {s.name: s.reason for s in fp4_inductor.report(model).skipped}
    routers = [r for n, r in skipped.items() if n.removesuffix(".weight").endswith(ROUTERS[moe_family])]
    assert routers
    assert all(r.startswith("router") for r in routers)
    assert "lm_head" not in quantized
    assert skipped["lm_head.weight"].startswith(("output head", "tied to"))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_next", ["linear_attn.in_proj_ba", "mlp.shared_expert_gate", "linear_attn.conv1d"]),
        ("qwen3_5_moe", ["in_proj_a", "in_proj_b"]),
        ("lfm2_moe", ["conv.conv"]),
    ],
)
def test_sensitive_layers_of_linear_attention_stay(tiny, name, layers):
    report = fp4_inductor.report(fp4_inductor.quantize_model(tiny(name), progress=False))
    for layer in layers:
        assert any(s.name.endswith(f"{layer}.weight") for s in report.skipped), layer
        assert not any(i.name.endswith(layer) for i in report.layers), layer


def test_conv1d_is_exactly_the_transposed_linear(tiny):
    dense = tiny("gpt2", torch.bfloat16)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), fp4_inductor.NVFP4Config("four_over_six"), progress=False)
    for name, old in dense.named_modules():
        if type(old).__name__ != "Conv1D":
            continue
        new = model.get_submodule(name)
        want = FP4Linear.from_weight(old.weight.detach().t().contiguous(), old.bias.detach(), scale_search="four_over_six")
        assert isinstance(new, FP4Linear), name
        assert torch.equal(new.scale.view(torch.uint8), want.scale.view(torch.uint8))
        for part in ("qdata", "global_scale", "bias"):
            assert torch.equal(getattr(new, part), getattr(want, part)), f"{name}.{part}"
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3", "gpt2", "ernie4_5_moe", "lfm2_moe"])
def test_tied_embeddings_stay_tied_and_untouched(tiny, name):
    model = tiny(name)
    embedding = model.get_input_embeddings().weight
    bits = embedding.detach().clone()
    fp4_inductor.quantize_model(model, progress=False)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, bits)
    skipped = {s.name: s.reason for s in fp4_inductor.report(model).skipped}
    assert skipped["lm_head.weight"].startswith("tied to")


def test_activation_search_on_a_tiny_model(tiny, family):
    model = tiny(family)
    config = NVFP4Config("activation", calibration=[{"input_ids": IDS}])
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, config, progress=False))
    assert report.coverage == 100.0
    assert _logits(model).isfinite().all()


# --- experts whose computation is not known ----------------------------------------------------------------------


def _refused(model, name, config=None):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(errors.GatingError, match=name) as caught:
        fp4_inductor.quantize_model(model, config, progress=False)
    assert "strict=False" in str(caught.value)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    experts = {n: p.numel() for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n}
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, config, strict=False, progress=False))
    assert {s.name: s.params for s in report.uncovered} == experts
    assert report.coverage == pytest.approx(100.0 * report.params / (report.params + sum(experts.values())))
    assert not any(isinstance(m, FP4Experts) for m in model.modules())


# Dense NVFP4 leaves such a module its own functions (test_experts_in_parts.py); 2:4-sparse experts are run by fp4.moe alone.
SPARSE = Sparse24Config("magnitude", accept_loss=True)


def test_an_unknown_activation_is_a_named_error(tiny):
    model = tiny("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = torch.nn.Mish()
    _refused(model, "MixtralExperts._apply_gate is none of", SPARSE)


def test_an_unknown_gate_is_a_named_error(tiny, monkeypatch):
    model = tiny("olmoe")
    # As step3p7 has it: the clamp behind the activation.
    monkeypatch.setattr(
        type(model.model.layers[0].mlp.experts), "_apply_gate", lambda self, z: self.act_fn(z.chunk(2, -1)[0]).clamp(max=0.7) * z.chunk(2, -1)[1]
    )
    _refused(model, "OlmoeExperts._apply_gate is none of", SPARSE)


def test_experts_without_the_interface_are_a_named_error():
    class HandExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = torch.nn.Parameter(torch.randn(4, 64, 32)), torch.nn.Parameter(torch.randn(4, 32, 32))
            self.act_fn = torch.nn.SiLU()

    model = torch.nn.ModuleDict({"experts": HandExperts(), "dense": torch.nn.Linear(32, 32)})
    _refused(model, "HandExperts does not use transformers' experts interface")


@pytest.mark.parametrize(
    ("gate", "gated", "constants", "want"),
    [
        (lambda z: torch.nn.functional.gelu(z.chunk(2, -1)[0], approximate="tanh") * z.chunk(2, -1)[1], True, (), Activation("gelu_tanh")),
        (lambda z: torch.nn.functional.gelu(z[..., ::2]) * z[..., 1::2], True, (), Activation("gelu", interleaved=True)),
        (
            lambda z: torch.nn.functional.silu(z.chunk(2, -1)[0].clamp(max=7.0)) * z.chunk(2, -1)[1].clamp(-7.0, 7.0),
            True,
            (7.0,),
            Activation("silu", limit=7.0),
        ),
        (lambda z: z.chunk(2, -1)[0] * torch.sigmoid(1.702 * z.chunk(2, -1)[0]) * (z.chunk(2, -1)[1] + 1), True, (), Activation("swiglu_oai", 1.702)),
        (lambda z: z.relu() ** 2, False, (), Activation("relu2")),
        (lambda z: z.chunk(2, -1)[1] * torch.nn.functional.silu(z.chunk(2, -1)[0]), True, (), Activation("silu")),
        (lambda z: torch.nn.functional.silu(z.chunk(2, -1)[1]) * z.chunk(2, -1)[0], True, (), None),  # up first
        (lambda z: torch.nn.functional.silu(z.chunk(2, -1)[0].clamp(max=7.0)) * z.chunk(2, -1)[1], True, (7.0,), None),  # up is not clamped
        (lambda z: torch.nn.functional.leaky_relu(z), False, (), None),
        (lambda z: z.softmax(-1), False, (), None),
        (lambda z, w: z * w, False, (), None),
        (lambda z: z.float().sum(), False, (), None),
    ],
)
def test_a_gate_is_recognised_by_what_it_computes(gate, gated, constants, want):
    assert recognise(gate, gated, constants) == want


def test_an_expert_parameter_of_an_unknown_family_is_not_overlooked():
    class Strange(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = torch.nn.Linear(32, 32)
            self.bank = torch.nn.Parameter(torch.randn(4, 32, 64))

    with pytest.raises(errors.CoverageError, match=r"bank.*how Strange uses it is not known"):
        fp4_inductor.quantize_model(Strange(), progress=False)


@pytest.mark.parametrize("shape", [(1, 64, 64), (4, 8, 64), (4, 64, 3)])
def test_what_only_looks_like_experts_is_left_alone(shape):
    """Position embeddings [1, T, D] and small banks are no expert weights."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model.register_parameter("pos", torch.nn.Parameter(torch.zeros(shape)))
    assert fp4_inductor.report(fp4_inductor.quantize_model(model, progress=False)).coverage == 100.0


def test_families_are_found_by_file():
    names = [f.name for f in families()]
    assert len(names) == len(set(names))
    assert {"decoder", "gpt2", "gpt_oss", "llama4", "multimodal", "nemotron_h", "state_space"} <= set(names)
