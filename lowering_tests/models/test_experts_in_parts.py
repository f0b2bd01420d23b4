"""Experts that ``fp4.moe`` cannot compute: the weights are packed, the module's own functions compute the rest, and the model is its dequantized twin."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, errors
from fp4_inductor.integrations import experts as in_parts
from fp4_inductor.modules import FP4Experts
from fp4_inductor.tensors.base import FP4Tensor
from lowering_tests.models import model_types
from lowering_tests.models.conftest import BASE, build

FEW, MANY = torch.arange(6).reshape(2, 3) * 5 % 128, torch.arange(96).reshape(2, 48) * 5 % 128
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@use_experts_implementation
class NormalisingExperts(nn.Module):
    """As MuseSpark's: what each expert returns is normalised."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_local_experts
        self.gate_up_proj = nn.Parameter(torch.randn(self.num_experts, 2 * config.intermediate_size, config.hidden_size) / 8)
        self.down_proj = nn.Parameter(torch.randn(self.num_experts, config.hidden_size, config.intermediate_size) / 8)
        self.act_fn = nn.SiLU()
        self.post_expert_norm = nn.RMSNorm(config.hidden_size)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            token, k = torch.where(top_k_index == e)
            gate, up = nn.functional.linear(hidden_states[token], self.gate_up_proj[e]).chunk(2, -1)
            y = self.post_expert_norm(nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e]))
            out.index_add_(0, token, (y * top_k_weights[token, k, None]).to(out.dtype))
        return out


def _normalising():
    model = build("mixtral")
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp.experts = NormalisingExperts(model.config)
        layer.mlp.experts.has_post_expert_norm = True  # what the decorator of 5.23 sets
        nn.init.uniform_(layer.mlp.experts.post_expert_norm.weight, 0.5, 1.5)
    return model


def _activation(family: str, act: nn.Module):
    model = build(family)
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            module.act_fn = act
    return model


class _Saturating(nn.Module):
    """As Inkling 2's: the sigmoid sees the gate as it is, both factors saturate."""

    def forward(self, z):
        gate, up = z.float().chunk(2, -1)
        return (2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(up / 3)).to(z.dtype)


def _own_gate(family: str):
    model, gate = build(family), _Saturating()
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            object.__setattr__(module, "_apply_gate", gate.forward)
    return model


# Families of later versions of Transformers: model type -> what differs from BASE.
LATER = {
    "muse_spark_text": {
        "intermediate_size": 128, "head_dim": 16, "moe_hidden_size": 64, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "inkling2_text": {
        "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "unpadded_vocab_size": 128,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def _later(name: str):
    torch.manual_seed(0)
    model = model_types.first_model(CONFIG_MAPPING[name](**BASE | LATER[name])).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model


MODELS = {
    "another activation": lambda: _activation("mixtral", nn.Mish()),
    "no gate": lambda: _activation("nemotron_h", nn.Softsign()),
    "its own gate": lambda: _own_gate("olmoe"),
    "biases, transposed": lambda: _own_gate("gpt_oss"),
    "normalised": _normalising,
    **{name: functools.partial(_later, name) for name in LATER if name in CONFIG_MAPPING},
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """A quantized model, and its dense twin with the dequantized weights by Transformers' own implementation."""
    dense = MODELS[request.param]()
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), NVFP4Config("amax"), strict=True, progress=False)
    modules = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, FP4Linear):
            modules[name].weight.data.copy_(layer.dequantize(torch.float32))
    for name, p in model.named_parameters():
        if isinstance(p, FP4Tensor):
            dense.get_parameter(name).data.copy_(p.dequantize(torch.float32))
    # 5.17 normalises in the module's own loop only; the loops of others do not all call _apply_gate.
    dense.set_experts_implementation("eager" if request.param == "normalised" else "batched_mm")
    return model, dense


def result(model, ids=None, **inputs) -> torch.Tensor:
    """Logits, or what a model without a head returns."""
    return model(ids, **inputs)[0]


def packed(model) -> list[str]:
    return [n for n, p in model.named_parameters() if isinstance(p, FP4Tensor)]


def close(got: torch.Tensor, want: torch.Tensor, dtype=torch.float32) -> None:
    assert float((got.float() - want.float()).norm()) <= RELATIVE[dtype] * float(want.float().norm())


@pytest.mark.parametrize("ids", [FEW, MANY], ids=["few", "many"])
def test_it_is_its_dequantized_twin(pair, ids):
    model, dense = pair
    assert packed(model) and not any(isinstance(m, FP4Experts) for m in model.modules())
    report = fp4_inductor.report(model)
    assert report.coverage == 100.0
    rows = {r.name: r for r in report.layers if r.name in packed(model)}
    assert rows.keys() == set(packed(model)) and all(0.03 < r.relative_error < 0.2 and "stays and computes" in r.notes[0] for r in rows.values())
    with torch.no_grad():
        close(result(model, ids), result(dense, ids))


def test_gradients_of_its_inputs_are_the_twin_s(pair):
    grads = []
    for m in pair:
        x = m.get_input_embeddings()(MANY).detach().requires_grad_()
        result(m, inputs_embeds=x).square().sum().backward()
        grads.append(x.grad)
    close(*grads)


@pytest.mark.parametrize("ids", [FEW, MANY], ids=["few", "many"])
def test_in_one_graph(pair, ids):
    module = next(m for m in pair[0].modules() if in_parts_of(m))
    tokens = torch.randn(ids.numel(), module.gate_up_proj.shape[1 if module.is_transposed else 2] if module.has_gate else module.up_proj.shape[-1])
    chosen = torch.stack([torch.arange(2) + i % 3 for i in range(len(tokens))])
    weights = torch.rand(len(tokens), 2)
    torch.compiler.reset()
    with torch.no_grad():
        want = module(tokens, chosen, weights)
        close(torch.compile(module, fullgraph=True, backend="aot_eager")(tokens, chosen, weights), want)


def in_parts_of(module: nn.Module) -> bool:
    return any(isinstance(p, FP4Tensor) for p in module._parameters.values())


def test_an_id_of_no_expert_contributes_nothing(pair):
    module = next(m for m in pair[0].modules() if in_parts_of(m))
    width = module.down_proj.shape[2 if module.is_transposed else 1]
    for tokens in (4, 40):
        x, weights = torch.randn(tokens, width), torch.rand(tokens, 2)
        ids = torch.zeros(tokens, 2, dtype=torch.long)
        ids[:, 1] = 1
        weights[0, 1] = float("nan")
        other = ids.clone()
        other[0, 1], other[1, 1] = -1, module.down_proj.shape[0]
        names = in_parts_names(module)
        with torch.no_grad():
            got = in_parts.forward(module, names, x, other, weights)
            weights[0, 1] = weights[1, 1] = 0.0
            close(got, in_parts.forward(module, names, x, ids, weights))
        assert got.isfinite().all()


def in_parts_names(module):
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def test_saved_and_loaded(pair, tmp_path, request):
    model = pair[0]
    fp4_inductor.save(model, tmp_path)
    fresh = MODELS[request.node.callspec.params["pair"]]()
    loaded = fp4_inductor.load(fresh, tmp_path)
    with torch.no_grad():
        for ids in (FEW, MANY):
            assert torch.equal(result(loaded, ids), result(model, ids))


def test_in_bfloat16_by_calibration_and_generate():
    model = _normalising().to(torch.bfloat16)
    dense = copy.deepcopy(model)
    fp4_inductor.quantize_model(model, progress=False)
    notes = [n for r in fp4_inductor.report(model).layers for n in r.notes]
    assert any("NormalisingExperts stays and computes what fp4.moe does not: unweighted scales" in n for n in notes)
    with torch.no_grad():
        out = model.generate(FEW, max_new_tokens=4, do_sample=False)
    assert out.shape == (2, 7) and model.config._experts_implementation == "fp4_inductor"
    assert type(model.model.layers[0].mlp.experts) is type(dense.model.layers[0].mlp.experts)


def test_sizes_that_it_would_have_to_pad_are_refused():
    model = _activation("mixtral", nn.Mish())
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 24, 64))
        layer.mlp.experts.down_proj = nn.Parameter(torch.randn(4, 64, 24))
    with pytest.raises(errors.GatingError, match="none of the activations"):
        fp4_inductor.quantize_model(model, progress=False)
    assert not packed(model)


def test_a_weight_that_two_modules_share_is_refused():
    model = _activation("mixtral", nn.Mish())
    model.model.layers[0].mlp.experts.down_proj = model.model.layers[1].mlp.experts.down_proj
    with pytest.raises(errors.GatingError, match="none of the activations"):
        fp4_inductor.quantize_model(model, progress=False)
    assert not packed(model)
