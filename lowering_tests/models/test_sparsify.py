"""Sparse24Config on whole models: which layers, block by block, budgets, and what the report says."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, Sparse24Config, Sparse24Linear, errors, quantize_model
from fp4_inductor.formats import sparse24
from fp4_inductor.models.chain import find_chain, recording, skipping
from fp4_inductor.models.hessian import Moments, Watch
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.walk import walk

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")


def llama(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, "max_position_embeddings": 128, **changes})).eval()


def batches(count: int = 4, rows: int = 4, length: int = 32):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 128, (rows, length), generator=generator)} for _ in range(count)]


def formats(model) -> dict[str, str]:
    return {layer.name: layer.format for layer in fp4_inductor.report(model).layers}


def logits(model):
    with torch.no_grad():
        return model(**batches(1)[0], use_cache=False).logits


@pytest.mark.parametrize("pruning", ["magnitude", "wanda", "sparsegpt", "admm"])
def test_a_decoder(pruning):
    model = llama()
    dense = copy.deepcopy(model)
    quantize_model(model, Sparse24Config(pruning, calibration=batches(), accept_loss=True), progress=False)
    layers = [m for m in model.modules() if isinstance(m, FP4Linear)]
    assert len(layers) == 14
    assert all(type(m) is Sparse24Linear for m in layers)
    report = fp4_inductor.report(model)
    assert report.bits_per_weight == 3.5
    assert report.kl is not None
    assert report.kl > 0
    assert f"pruning={pruning}" in str(report)
    assert "3.5 bits sparse24_nvfp4" in str(report)
    assert all((i.output_error is not None) == (pruning != "magnitude") for i in report.layers)
    assert 0.05 < (logits(model) - logits(dense)).norm() / logits(dense).norm() < 0.9
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all("forward" not in vars(m) for m in model.modules())


def test_existing_keeps_every_value():
    model = llama()
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = sparse24.dequantize_sparse24(
                *sparse24.quantize_sparse24(module.weight.data, sparse24.magnitude_mask(module.weight.data), "mse"), torch.float32
            )
    want = logits(model)
    quantize_model(model, Sparse24Config(), progress=False)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    assert fp4_inductor.report(model).warnings == []


def test_layers_by_name_and_the_rest_dense():
    model = llama()
    quantize_model(model, Sparse24Config("sparsegpt", calibration=batches(), layers=["mlp.down_proj", "re:model.layers.1.*q_proj"]), progress=False)
    sparse = {name for name, f in formats(model).items() if f == "sparse24_nvfp4"}
    assert sparse == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj"}
    assert type(model.model.layers[0].mlp.up_proj) is FP4Linear


def test_existing_in_the_layers_that_are_named():
    model = llama()
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data *= sparse24.magnitude_mask(weight.data)
    quantize_model(model, Sparse24Config(layers=["model.layers.1.mlp.down_proj"]), progress=False)
    assert [name for name, f in formats(model).items() if f == "sparse24_nvfp4"] == ["model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize("pruning", ["wanda", "sparsegpt"])
def test_bits(pruning):
    for bits in (3.5, 4.0, 4.5):
        model = llama()
        quantize_model(model, Sparse24Config(pruning, calibration=batches(), bits=bits), progress=False)
        found = fp4_inductor.report(model).bits_per_weight
        largest = 96 * 64 / sum(i.params for i in fp4_inductor.report(model).layers)
        assert bits - largest <= found <= bits


def test_bits_without_calibration_go_by_weight_error():
    model = llama()
    model.model.layers[1].self_attn.o_proj.weight.data *= sparse24.magnitude_mask(model.model.layers[1].self_attn.o_proj.weight.data)
    quantize_model(model, Sparse24Config("magnitude", bits=4.45, accept_loss=True), progress=False)
    assert [name for name, f in formats(model).items() if f == "sparse24_nvfp4"] == ["model.layers.1.self_attn.o_proj"]


def opinionated():
    """A random model has no opinion; this one has, so that its KL is of a size."""
    model = llama()
    model.lm_head.weight.data *= 30
    return model


def test_max_kl_holds_and_uses_the_room():
    found = {}
    for limit in (0.08, 100.0):
        model = opinionated()
        quantize_model(model, Sparse24Config("sparsegpt", calibration=batches(), max_kl=limit), progress=False)
        report = fp4_inductor.report(model)
        found[limit] = report.bits_per_weight
        assert report.kl <= limit
    assert 3.5 < found[0.08] < 4.5
    assert found[100.0] == 3.5


def test_max_kl_below_what_dense_nvfp4_costs():
    model = opinionated()
    want = logits(model)
    with pytest.raises(errors.ConfigError, match="less than dense NVFP4 costs"):
        quantize_model(model, Sparse24Config("wanda", calibration=batches(), max_kl=1e-6), progress=False)
    assert torch.equal(logits(model), want)


def test_max_error():
    every = llama()
    quantize_model(every, Sparse24Config("sparsegpt", calibration=batches()), progress=False)
    limit = sorted(i.output_error for i in fp4_inductor.report(every).layers)[7]
    for max_error, want in ((0.0, {"nvfp4"}), (limit, {"nvfp4", "sparse24_nvfp4"}), (1.0, {"sparse24_nvfp4"})):
        model = llama()
        quantize_model(model, Sparse24Config("sparsegpt", calibration=batches(), max_error=max_error), progress=False)
        assert set(formats(model).values()) == want


def test_choosing_changes_no_weight():
    """Candidates are tried in the model itself: with nothing chosen it must be what dense NVFP4 gives."""
    one, other = llama(), llama()
    quantize_model(one, Sparse24Config("wanda", calibration=batches(), bits=4.5), progress=False)
    quantize_model(other, fp4_inductor.NVFP4Config("activation", calibration=batches()[:-1]), progress=False)
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


def test_a_loud_report():
    model = opinionated()
    with pytest.warns(errors.QualityWarning, match="nats a token against the dense model"):
        quantize_model(model, Sparse24Config("wanda", calibration=batches()), progress=False)
    report = fp4_inductor.report(model)
    assert str(report).startswith("  !! these weights cost")
    assert report.kl > 0.15
    with pytest.warns(errors.QualityWarning, match="its cost not measured"):
        quantize_model(llama(), Sparse24Config("magnitude", accept_loss=True), progress=False)


def test_a_quiet_report():
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.QualityWarning)
        quantize_model(llama(), Sparse24Config("sparsegpt", calibration=batches(), max_kl=0.01), progress=False)


def test_a_cache_does_not_grow():
    """use_cache is left at its default: the blocks are called with a cache, and run several times."""
    model = llama()
    assert model.config.use_cache
    quantize_model(model, Sparse24Config("sparsegpt", calibration=batches()), progress=False)
    assert not any("whole-model" in note for note in fp4_inductor.report(model).notes)


class Net(nn.Module):
    """No list of blocks; one layer twice, one weight in two layers, one that batches may not reach, K = 40."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.rare = nn.Linear(40, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 8)
        self.c.weight = self.b.weight

    def forward(self, x, rare=False):
        h = torch.relu(self.b(torch.relu(self.a(x))))
        h = self.c(h) + self.b(h)
        return self.rare(h) if rare else h


def test_a_model_without_blocks():
    torch.manual_seed(3)
    model, x = Net(), torch.randn(512, 40)
    want = model(x, rare=True)
    quantize_model(model, Sparse24Config("sparsegpt", calibration=[{"x": x, "rare": True}]), progress=False)
    assert {type(m) for m in (model.a, model.b, model.c, model.rare)} == {Sparse24Linear}
    assert model.a.padding == 24
    assert model.b.values is model.c.values
    assert (model(x, rare=True) - want).norm() / want.norm() < 0.6
    assert any("no list of blocks" in note for note in fp4_inductor.report(model).notes)
    assert fp4_inductor.report(model).kl is None


def test_a_layer_that_is_not_reached():
    model = Net()
    with pytest.raises(errors.CalibrationError, match="rare"):
        quantize_model(model, Sparse24Config("wanda", calibration=[torch.randn(256, 40)]), progress=False)
    assert not any(isinstance(m, FP4Linear) for m in model.modules())
    quantize_model(model, Sparse24Config("wanda", calibration=[torch.randn(256, 40)]), progress=False, strict=False)
    notes = {i.name: i.notes for i in fp4_inductor.report(model).layers}
    assert type(model.rare) is FP4Linear  # nothing is known about its inputs: dense
    assert any("not reached by calibration" in note for note in notes["rare"])


def test_gpt2_holds_its_weights_transposed():
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64)).eval()
    want = logits(model)
    quantize_model(model, Sparse24Config("sparsegpt", calibration=batches()), progress=False)
    assert type(model.transformer.h[0].mlp.c_fc) is Sparse24Linear
    assert (logits(model) - want).norm() / want.norm() < 0.7


# --- parts --------------------------------------------------------------------------------------------------------


def test_the_chain_is_found_and_replayed():
    model = llama(num_hidden_layers=3)
    chain = find_chain(model, make_plan(model).targets)
    assert [b.name for b in chain.blocks] == [f"model.layers.{i}" for i in range(3)]
    with torch.no_grad(), recording(chain):
        for b in batches(2):
            model(**b)
    assert chain.broken is None
    assert [len(b.calls) for b in chain.blocks] == [2, 2, 2]
    with torch.no_grad():
        h = chain.hidden[1]
        for b in chain.blocks:
            h = b(h, 1)
        want = model(**batches(2)[1], output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(model.model.norm(h), want)
        before = chain.blocks[0](chain.hidden[1], 1)
        with skipping(chain, 1, before):
            skipped = model(**batches(2)[1], use_cache=False).logits
        torch.testing.assert_close(skipped, model(**batches(2)[1], use_cache=False).logits)


def test_blocks_that_do_not_feed_each_other_are_no_chain():
    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

        def forward(self, x):
            return self.blocks[0](x) + self.blocks[1](x)

    model = Parallel()
    chain = find_chain(model, make_plan(model).targets)
    with recording(chain):
        model(torch.randn(4, 32))
    assert "blocks.1 is not fed" in chain.broken
    assert chain.hidden == []
    quantize_model(model, Sparse24Config("sparsegpt", calibration=[torch.randn(64, 32)]), progress=False)
    assert type(model.blocks[1][0]) is Sparse24Linear


def test_moments_are_exact_and_the_target_solves_least_squares():
    torch.manual_seed(4)
    layer, twin = nn.Linear(32, 16), nn.Linear(32, 16)
    x0, x = torch.randn(3, 50, 32), torch.randn(3, 50, 32)
    x = x0 + 0.3 * x
    target = make_plan(nn.Sequential(layer)).targets[0]
    target.module = layer
    watch = Watch([target], lambda t: twin)
    for a, b in zip(x0, x, strict=True):
        twin(a)
        layer(b)
        watch.add()
    watch.close()
    m: Moments = watch.moments[target.name]
    flat0, flat = x0.reshape(-1, 32), x.reshape(-1, 32)
    assert m.rows == 150
    torch.testing.assert_close(m.hessian, flat.t() @ flat)
    torch.testing.assert_close(m.cross, flat0.t() @ flat)
    want = torch.linalg.lstsq(flat.double(), flat0.double() @ layer.weight.double().t()).solution.t()
    got = m.target(layer.weight.detach())
    assert (got - want).norm() < 0.1 * (layer.weight - want).norm()  # but for the damping
    assert not layer._forward_pre_hooks


def test_the_walk_measures_what_changed_layers_feed_the_next():
    model = llama()
    plan = make_plan(model)
    data = batches(2)
    chain = find_chain(model, plan.targets)
    with torch.no_grad(), recording(chain):
        for b in data:
            model(**b)
    seen = []
    for place, (target,), moments in walk(model, chain, plan.groups, data, sequential=True, progress=False, desc=""):
        seen.append(target.name)
        changed = moments.cross is not None and not torch.allclose(moments.cross, moments.hessian, rtol=1e-3, atol=1e-4)
        assert changed == (target.name not in {f"model.layers.0.self_attn.{p}_proj" for p in "qkv"}), target.name
        assert place == target.name[: len("model.layers.0")]
        with torch.no_grad():
            target.module.weight.mul_(0.5)
    assert [n.split(".", 3)[3] for n in seen[:7]] == [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    assert len(seen) == 14
