"""LoRA by PEFT on quantized models: gradients are those of the dequantized weights, and what cannot work is refused before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import (
    AdaLoraConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    RandLoraConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from torch import nn

import fp4_inductor
from fp4_inductor import NVFP4Config, Sparse24Config, errors
from fp4_inductor.integrations.peft import FP4LoraLinear
from fp4_inductor.modules import FP4Linear, FP8Linear, SiblingLinear, Sparse24Linear
from fp4_inductor.passes.counters import matches, reset_matches
from lowering_tests.integrations.dense_twin import dequantized
from lowering_tests.models.conftest import build

IDS = torch.arange(24).reshape(2, 12) * 5 % 128
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def quantized(family: str = "llama", dtype: torch.dtype = torch.float32, config=None):
    torch.manual_seed(0)
    return fp4_inductor.quantize_model(build(family, dtype), config, progress=False)


def adapted(model: nn.Module, **options):
    """``model`` with a LoRA whose B is not zero, so that every adapter weight has a gradient."""
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": PROJECTIONS, **options}))
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return wrapped


def gradients(model: nn.Module, autocast: bool = False) -> dict[str, torch.Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two sets of gradients of the same tensors."""
    assert a.keys() == b.keys() and a
    assert all(g.abs().sum() > 0 for g in a.values())
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in a)


@pytest.fixture(scope="module")
def pair():
    """A quantized model with adapters, and its dense twin with the same adapters, in float32."""
    model = quantized()
    return adapted(copy.deepcopy(model)), adapted(dequantized(model))


def test_adapters_lie_on_quantized_layers_and_siblings_stay_together(pair):
    layers = [m for m in pair[0].modules() if isinstance(m, FP4LoraLinear)]
    assert len(layers) == 2 * len(PROJECTIONS)
    kinds = [type(m.base_layer) for m in layers]
    assert kinds.count(SiblingLinear) == 2 * 5 and kinds.count(FP4Linear) == 2 * 2
    assert {n.rpartition(".lora_")[0] != "" for n, p in pair[0].named_parameters() if p.requires_grad} == {True}


def test_gradients_are_those_of_the_dequantized_twin(pair):
    assert distance(gradients(pair[0]), gradients(pair[1])) < 1e-5


def test_under_autocast(pair):
    assert distance(gradients(pair[0], autocast=True), gradients(pair[1], autocast=True)) < 0.02


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(reentrant):
    model = adapted(quantized())
    model.train()
    plain = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert distance(gradients(model), plain) == 0


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_all_linear_means_quantized_layers_too(family):
    model = quantized(family)
    layers = {n for n, m in model.named_modules() if isinstance(m, FP4Linear)}
    wrapped = adapted(model, target_modules="all-linear")
    assert {n.removeprefix("base_model.model.") for n, m in wrapped.named_modules() if isinstance(m, FP4LoraLinear)} == layers
    gradients(wrapped)


def test_all_linear_mixes_dense_and_quantized_layers():
    model = build("llama", torch.float32)
    fp4_inductor.quantize_model(model, ignore=["down_proj"], progress=False)
    wrapped = adapted(model, target_modules="all-linear")
    lora = [type(m).__name__ for n, m in wrapped.named_modules() if n.endswith("_proj")]
    assert (lora.count("FP4LoraLinear"), lora.count("Linear")) == (12, 2)
    assert not any("lora" in n for n, _ in wrapped.base_model.model.lm_head.named_parameters())  # the head is left out, as in PEFT
    with pytest.raises(errors.UnsupportedOpError, match="12 quantized layers"):
        wrapped.merge_adapter()
    assert not any(getattr(m, "merged", False) for m in wrapped.modules())  # the dense layers neither


class _Layers(nn.Module):
    def __init__(self, k: int):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(k, 32), nn.Linear(32, k, bias=False), nn.LayerNorm(32)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("config", "k", "kind"),
    [
        (NVFP4Config(), 40, FP4Linear),
        (NVFP4Config(prefill="fp8"), 64, FP4Linear),
        (Sparse24Config("magnitude", accept_loss=True), 64, Sparse24Linear),
        ("fp8", 64, FP8Linear),
    ],
    ids=["padded", "prefill", "sparse", "fp8"],
)
def test_every_kind_of_layer(config, k, kind):
    torch.manual_seed(0)
    model = _Layers(k)
    if config == "fp8":
        model.first, model.second = (FP8Linear.from_weight(m.weight, m.bias) for m in (model.first, model.second))
    else:
        fp4_inductor.quantize_model(model, config, progress=False)
    assert type(model.first) is kind
    x = torch.randn(5, k)
    got = []
    for m in (model, dequantized(model)):
        wrapped = adapted(m, target_modules=["first", "second"])
        wrapped(x).square().sum().backward()
        got.append({n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None})
    assert distance(*got) < 1e-5


def test_adapters_are_saved_and_load_on_a_quantized_and_on_a_dense_base(tmp_path):
    model = quantized(dtype=torch.bfloat16)
    wrapped = adapted(copy.deepcopy(model))
    wrapped.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 200_000  # the adapters and nothing of the base
    with torch.no_grad():
        want = wrapped(IDS).logits
        assert torch.equal(PeftModel.from_pretrained(model, tmp_path)(IDS).logits, want)
        dense = PeftModel.from_pretrained(build("llama", torch.bfloat16), tmp_path)
    saved = {n: p for n, p in wrapped.named_parameters() if "lora_" in n}
    loaded = {n: p for n, p in dense.named_parameters() if "lora_" in n}
    assert saved.keys() == loaded.keys() and all(torch.equal(saved[n], loaded[n]) for n in saved)


def test_unload_gives_the_quantized_model_back():
    model = quantized()
    with torch.no_grad():
        before = model(IDS).logits
        assert torch.equal(adapted(model).unload()(IDS).logits, before)


def test_merging_is_refused_and_nothing_is_merged(pair):
    layer = pair[0].base_model.model.model.layers[0].self_attn.q_proj
    for merge in (pair[0].merge_and_unload, pair[0].merge_adapter, layer.merge):
        with pytest.raises(errors.UnsupportedOpError, match=r"layers\.(0-1\.self_attn\.\{q_proj,|0\.self_attn\.q_proj)[\s\S]*Keep the adapter beside"):
            merge()
    assert not layer.merged


@pytest.mark.parametrize(
    ("options", "named"),
    [({"use_dora": True}, "use_dora=True"), ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"), ({"init_lora_weights": "olora"}, "olora")],
)
def test_what_computes_with_the_base_weight_is_refused(options, named):
    model = quantized()
    with pytest.raises(errors.ConfigError, match=rf"{named}[\s\S]*q_proj"):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], **options))
    assert isinstance(model.model.layers[0].self_attn.q_proj, FP4Linear)


def test_an_adapter_that_a_layer_cannot_take_is_refused_by_name():
    model = quantized()
    with pytest.raises(errors.ConfigError, match=r"IA3 cannot adapt[\s\S]*layers\.0-1\.self_attn\.k_proj: SiblingLinear[\s\S]*exclude_modules"):
        get_peft_model(model, IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))
    assert isinstance(model.model.layers[0].self_attn.k_proj, SiblingLinear)
    routed = quantized("mixtral")
    with pytest.raises(errors.ConfigError, match=r"LoRA cannot adapt[\s\S]*layers\.0-1\.mlp\.experts\.down_proj: FP4ExpertWeight[\s\S]*high precision"):
        get_peft_model(routed, LoraConfig(target_modules=["q_proj", "down_proj"]))
    gradients(adapted(routed, target_modules=["q_proj", "o_proj"]))


METHODS = [VeraConfig, RandLoraConfig, LoHaConfig, LoKrConfig, OFTConfig, HRAConfig, AdaLoraConfig]


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_are_refused_by_name(method):
    config = method(target_modules=["down_proj"], **({"total_step": 10} if method is AdaLoraConfig else {}))
    model = quantized()
    with pytest.raises(errors.ConfigError, match=rf"{config.peft_type.value} cannot adapt[\s\S]*layers\.0-1\.mlp\.down_proj: FP4Linear[\s\S]*exclude_modules"):
        get_peft_model(model, config)
    assert type(model.model.layers[0].mlp.down_proj) is FP4Linear


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"modules_to_save": ["down_proj"]}, r"modules_to_save.*\n.*layers\.0-1\.mlp\.down_proj: FP4Linear"),
        ("llama", {"modules_to_save": ["layers.1"]}, r"modules_to_save.*\n.*model\.layers\.1: LlamaDecoderLayer"),
        ("llama", {"target_parameters": ["down_proj.weight"]}, r"target_parameters.*\n.*layers\.0-1\.mlp\.down_proj\.weight"),
        ("mixtral", {"target_parameters": ["mlp.experts.down_proj"]}, r"target_parameters.*\n.*layers\.0-1\.mlp\.experts\.down_proj"),
        ("mixtral", {"modules_to_save": ["experts"]}, r"modules_to_save.*\n.*layers\.0-1\.mlp\.experts: FP4Experts"),
    ],
)
def test_what_would_train_nothing_is_refused(family, options, named):
    model = quantized(family)
    with pytest.raises(errors.ConfigError, match=rf"{named}[\s\S]*quantize_model\(model, ignore="):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"], **options))
    assert isinstance(model.model.layers[0].self_attn.q_proj, SiblingLinear)


def test_a_copy_of_what_was_quantized_under_its_wrapper_is_refused():
    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], modules_to_save=["o_proj", "lm_head"]))
    fp4_inductor.quantize_model(model, progress=False)
    with pytest.raises(errors.ConfigError, match=r"layers\.0-1\.self_attn\.o_proj: ModulesToSaveWrapper"):
        model.add_adapter("other", LoraConfig(target_modules=["q_proj"], modules_to_save=["o_proj"]))
    model.add_adapter("other", LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))  # that one is dense


def test_modules_in_high_precision_are_trained_beside_adapters():
    wrapped = adapted(quantized(), target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    grads = gradients(wrapped)
    assert any("lm_head.modules_to_save" in n for n in grads) and not any("placeholder" in n for n in grads)


@pytest.mark.parametrize("options", [{"alora_invocation_tokens": [5]}, {"use_rslora": True}, {"lora_dropout": 0.5}, {"use_qalora": True}])
def test_variants_that_leave_the_base_weight_alone(options):
    gradients(adapted(quantized(), **options))


def test_a_batch_of_several_adapters():
    wrapped = adapted(quantized(), target_modules=["q_proj", "down_proj"]).eval()
    both = wrapped(IDS, adapter_names=["default", "__base__"]).logits
    assert torch.allclose(both[:1], wrapped(IDS[:1]).logits, atol=1e-5)
    with wrapped.disable_adapter():
        assert torch.allclose(both[1:], wrapped(IDS[1:]).logits, atol=1e-5)


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_are_trained_if_the_configuration_says_so(bias, tmp_path):
    model = quantized("qwen2")
    reference = gradients(adapted(dequantized(model), target_modules=["q_proj", "k_proj"], bias=bias))
    wrapped = adapted(copy.deepcopy(model), target_modules=["q_proj", "k_proj"], bias=bias)
    trained = {n for n, p in wrapped.named_parameters() if p.requires_grad and n.endswith("bias")}
    assert len(trained) == {"lora_only": 4, "all": 6}[bias]  # q, k; with v
    for name, p in wrapped.named_parameters():
        if name in trained:
            assert p.is_leaf and torch.equal(
                p, model.get_submodule(name.removeprefix("base_model.model.").replace(".base_layer", "").removesuffix(".bias")).bias
            )
    assert distance(gradients(wrapped), reference) < 1e-5
    with torch.no_grad():
        for p in wrapped.parameters():
            p += 0.01 * p.requires_grad
        wrapped.save_pretrained(tmp_path)
        assert torch.equal(PeftModel.from_pretrained(model, tmp_path)(IDS).logits, wrapped(IDS).logits)


def test_prepare_model_for_kbit_training():
    model = prepare_model_for_kbit_training(quantized(dtype=torch.bfloat16))
    assert not any(p.requires_grad for p in model.parameters())
    layer = model.model.layers[0].mlp.down_proj
    codes = layer.qdata.clone()
    gradients(adapted(model))
    assert torch.equal(layer.qdata, codes)


def test_a_second_adapter_and_switching():
    wrapped = adapted(quantized())
    with torch.no_grad():
        first = wrapped(IDS).logits
        wrapped.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
        wrapped.set_adapter("other")
        base = wrapped(IDS).logits  # B of the new adapter is zero
        assert not torch.equal(base, first)
        with wrapped.disable_adapter():
            assert torch.equal(wrapped(IDS).logits, base)
        wrapped.set_adapter("default")
        assert torch.equal(wrapped(IDS).logits, first)


def test_transformers_own_way_of_adding_adapters():
    model = quantized()
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    assert sum(isinstance(m, FP4LoraLinear) for m in model.modules()) == 4
    model(input_ids=IDS, labels=IDS).loss.backward()


def test_under_compile():
    torch.manual_seed(0)
    model = _Layers(64)
    fp4_inductor.quantize_model(model, progress=False)
    wrapped, x = adapted(model, target_modules=["first", "second"]), torch.randn(6, 64)

    def run(m):
        m.zero_grad()
        m(x).square().sum().backward()
        return {n: p.grad.clone() for n, p in wrapped.named_parameters() if p.grad is not None}

    eager = run(wrapped)
    torch.compiler.reset()
    assert distance(run(torch.compile(wrapped, fullgraph=True)), eager) < 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_under_compile(checkpointing):
    """One graph; with checkpointing several, since Transformers' hook makes the embeddings require a gradient, which no graph can return."""
    model = adapted(quantized(), target_modules="all-linear")
    model.train()
    eager = gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=not checkpointing, backend="aot_eager")
    model.zero_grad()
    compiled(input_ids=IDS, labels=IDS).loss.backward()
    assert distance({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, eager) < 1e-5


def test_siblings_are_one_call_beside_adapters():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32, bias=False)

        def forward(self, x):
            return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    torch.manual_seed(0)
    wrapped = adapted(fp4_inductor.quantize_model(Block(), progress=False), target_modules=["q_proj", "k_proj", "v_proj"])
    x = torch.randn(4, 64, requires_grad=True)
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True):  # a cached graph was rewritten when it was first compiled
        reset_matches()
        y = torch.compile(wrapped, fullgraph=True)(x)
    assert matches()["siblings"] == 1
    torch.testing.assert_close(y, wrapped(x), rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(wrapped(x).square().sum(), x)[0], rtol=1e-4, atol=1e-4)
