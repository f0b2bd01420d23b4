"""scale_search="gptq" of whole models: the weights of tokens, what is rounded with what text, what falls back and is said, what is refused."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_inductor
from fp4_inductor import NVFP4Config, Sparse24Config, errors, quantize_model
from fp4_inductor.models import gptq, prune, self_calibration, token_weights
from fp4_inductor.models.calibrate import statistics
from fp4_inductor.models.chain import Chain, find_chain, recording
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.walk import walk
from fp4_inductor.modules import FP4Linear


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    monkeypatch.setattr(gptq, "SEQUENCES", 16)
    monkeypatch.setattr(gptq, "TOKENS", 32)


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.reshape(-1).view(torch.uint8) for name, t in model.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = bits(a), bits(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def quantized(model: nn.Module, config: NVFP4Config | None = None, **options) -> nn.Module:
    return quantize_model(copy.deepcopy(model), config or NVFP4Config("gptq"), progress=False, **options)


def note(model: nn.Module) -> str:
    return next(line for line in fp4_inductor.report(model).notes if line.startswith('scale_search="gptq"'))


class Two(nn.Module):
    """No language model: two layers, of which the second sees one row of each sample."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x):
        return self.second(self.first(x)[:, 0])


# --- weights of tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chained", [True, False], ids=["block by block", "at once"])
def test_weights_are_the_squared_gradients_of_the_loss(tiny, chained):
    model = tiny("llama", torch.float32).train()
    model.model.norm.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    forwards = {name: vars(m).get("forward") for name, m in model.named_modules()}
    ids = torch.randint(128, (3, 12))
    batches = [{"input_ids": ids[:2]}, ids[2:]]
    plan = make_plan(model)
    chain = find_chain(model, plan.targets) if chained else Chain([], broken="on purpose")
    found = token_weights.fisher(model, plan.targets, batches, chain, False)
    assert found.reason == ""
    # Everything is as it was.
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert {name: vars(m).get("forward") for name, m in model.named_modules()} == forwards
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())

    # Another way to the same: what a small addition to one layer's output does to the loss.
    model.eval()
    for target in (plan.targets[0], plan.targets[5], plan.targets[-1]):
        added = torch.zeros(3, 12, target.module.out_features, requires_grad=True)
        handle = target.module.register_forward_hook(lambda module, args, output, added=added: output + added)
        F.cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
        handle.remove()
        want = added.grad.square().sum(-1)
        x = torch.zeros(2, 12, 8), torch.zeros(1, 12, 8)
        got = torch.cat([found(target.name, b, [x[b]])[0].view(-1, 12) for b in range(2)])
        torch.testing.assert_close(got, want / want.mean(), rtol=1e-4, atol=1e-6)
    # Nothing follows the last token: in the last block nobody but itself reads it.
    assert not found(plan.targets[-1].name, 1, [x[1]])[0][-1]
    assert found.unknown == set()


def test_padding_does_not_count(tiny):
    model = tiny("llama", torch.float32)
    plan = make_plan(model)
    ids = torch.randint(128, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    found = token_weights.fisher(model, plan.targets, [{"input_ids": ids, "attention_mask": mask}], Chain([], broken="on purpose"), False)
    v = found(plan.targets[-1].name, 0, [torch.zeros(2, 12, 8)])[0].view(2, 12)
    assert (v[0, :11] > 0).all()
    assert (v[1, :7] > 0).all()
    assert not v[1, 7:].any()


def test_hessians_are_weighted(tiny):
    model = tiny("llama", torch.float32)
    plan = make_plan(model)
    target = plan.targets[0]
    chain = find_chain(model, plan.targets)
    batches = [torch.randint(128, (2, 10)), torch.randint(128, (1, 10))]
    seen = []
    with recording(chain), target.module.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1))):
        statistics(model, plan.targets, batches, strict=True)
    weights = [torch.rand(20), torch.rand(10)]
    broken = Chain([], broken="on purpose")
    want = sum(x.T @ (v[:, None] * x) for x, v in zip(seen, weights, strict=True)) / 30
    for way in (chain, broken):
        weigh = lambda name, batch, inputs: [weights[batch]]  # noqa: E731
        found = {g[0].name: m for _, g, m in walk(model, way, plan.groups, batches, sequential=False, progress=False, desc="", weigh=weigh)}
        torch.testing.assert_close(found[target.name].mean(), want, rtol=1e-4, atol=1e-6)
        assert len(found) == len(plan.groups)


def test_input_norms_take_large_tokens_back():
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0], [200.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(token_weights.input_norms(x), torch.tensor([1.0, 0.25, 1.0, 1 / 40000, 1.0]))


@pytest.mark.parametrize(("device", "parameters", "wanted"), [("cpu", 10, 16), ("cuda", 10, gptq.SEQUENCES_GPU), ("cuda", self_calibration.SMALL, 16)])
def test_a_small_model_on_a_gpu_gets_more_text(device, parameters, wanted):
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device(device), numel=lambda: parameters)]))
    assert gptq.form_of(model) == (wanted, gptq.TOKENS, True)
    short = (gptq.SEQUENCES_SHORT, gptq.TOKENS_SHORT, True) if device == "cpu" else (wanted, gptq.TOKENS, False)
    assert gptq.form_of(model, short_on=torch.device(device)) == short


# --- whole models -------------------------------------------------------------------------------------------------


def test_two_runs_are_the_same_and_better_than_the_default(tiny, monkeypatch):
    monkeypatch.setattr(gptq, "SEQUENCES", 32)
    model = tiny("llama", torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform: there is something to lose
    first, second = quantized(model), quantized(model)
    assert same(first, second)
    default = quantized(model, NVFP4Config("activation", calibration="self"))
    ids = self_calibration.write(model, 32, 32, random_first=32)[0]["input_ids"]

    def kl(m: nn.Module) -> float:
        p, q = (F.log_softmax(n(input_ids=ids, use_cache=False).logits.float(), -1) for n in (model, m))
        return float(F.kl_div(q, p, log_target=True, reduction="sum")) / ids.numel()

    with torch.no_grad():
        assert kl(first) < 0.9 * kl(default)


def test_the_report_names_text_weights_and_time(tiny):
    model = quantized(tiny("llama", torch.bfloat16))
    report = fp4_inductor.report(model)
    assert "scale_search=gptq" in report.config
    what = "512 tokens that the model wrote itself, tokens weighted by the Fisher information of the model, the rows of 14 layers together; "
    assert f'scale_search="gptq" over {what}' in note(model)
    assert all(layer.relative_error < 0.5 for layer in report.layers)
    assert len(report.layers) == 14


def test_text_that_is_given_joins_the_models_own(tiny):
    model = tiny("llama", torch.bfloat16)
    given = [torch.randint(128, (4, 32))]
    both = quantized(model, NVFP4Config("gptq", calibration=iter(given)))
    assert "512 tokens that the model wrote itself and 1 given batches, " in note(both)
    assert not same(both, quantized(model))
    assert same(quantized(model), quantized(model, NVFP4Config("gptq", calibration="self")))


def test_a_checkpoint_keeps_it(tiny, tmp_path):
    model = quantized(tiny("llama", torch.bfloat16))
    fp4_inductor.save(model, tmp_path / "saved")
    loaded = fp4_inductor.load(tiny("llama", torch.bfloat16), tmp_path / "saved")
    assert same(model, loaded)
    ids = torch.randint(128, (2, 9))
    assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_other_decoders(tiny, name):
    assert "the Fisher information of the model" in note(quantized(tiny(name, torch.bfloat16)))


def test_siblings_share_one_global_scale(tiny):
    model = quantized(tiny("llama", torch.bfloat16), NVFP4Config("gptq", siblings="shared"))
    for block in model.model.layers:
        g = [getattr(block.self_attn, name).global_scale.item() for name in ("q_proj", "k_proj", "v_proj")]
        assert len(set(g)) == 1


def test_an_output_head_too(tiny):
    for head in ("nvfp4", "fp8"):
        model = quantized(tiny("llama", torch.bfloat16), NVFP4Config("gptq", lm_head=head))
        row = next(layer for layer in fp4_inductor.report(model).layers if layer.name == "lm_head")
        assert row.format == head
        assert row.kl is not None


# --- falling back, in words ---------------------------------------------------------------------------------------


def test_a_model_without_a_backward_pass_is_weighted_by_norms(tiny):
    model = tiny("llama", torch.bfloat16)
    model.model.layers[1].mlp.forward = torch.no_grad()(model.model.layers[1].mlp.forward)
    model.model.layers[1].self_attn.forward = torch.no_grad()(model.model.layers[1].self_attn.forward)
    # Half of the layers still have a gradient: only the others fall back.
    report = fp4_inductor.report(quantize_model(model, NVFP4Config("gptq"), progress=False))  # not a copy: it would call this one's
    assert any("(in 7 layers that no gradient reached by the norm of their inputs: " in line for line in report.notes)


def test_a_backward_pass_that_fails_is_said(tiny, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    monkeypatch.setattr(type(model), "get_input_embeddings", lambda self: (_ for _ in ()).throw(NotImplementedError("none here")))
    plan = make_plan(model)
    found = token_weights.fisher(model, plan.targets, [torch.zeros(1, 8).long()], Chain([], broken="on purpose"), False)
    assert found.reason == "the backward pass failed with NotImplementedError: none here"
    x = torch.randn(1, 8, 64)
    assert torch.equal(found(plan.targets[0].name, 0, [x])[0], token_weights.input_norms(x))


def test_batches_without_token_ids_are_weighted_by_norms(tiny):
    model = tiny("llama", torch.bfloat16)
    done = quantized(model, NVFP4Config("gptq", calibration=[{"inputs_embeds": torch.randn(2, 16, 64).bfloat16()}]))
    assert "by the norm of their inputs, because LlamaForCausalLM gave no logits for each token of input_ids; " in note(done)


def test_no_model_of_language():
    torch.manual_seed(0)
    model = Two()
    batches = [torch.randn(8, 40, 32)]
    done = quantize_model(copy.deepcopy(model), NVFP4Config("gptq", calibration=batches), progress=False)
    assert isinstance(done.first, FP4Linear)
    assert note(done).startswith(
        'scale_search="gptq" over 1 given batches, without own text because Two has no generate(), tokens weighted by '
        "the norm of their inputs, because Two is no causal language model of transformers; "
    )
    assert '1 layers met fewer than 256 tokens (second: 8): "activation" for them' in fp4_inductor.report(done).notes
    sweep = quantize_model(copy.deepcopy(model), NVFP4Config("activation", calibration=batches), progress=False)
    assert torch.equal(done.second.qdata, sweep.second.qdata)
    assert not torch.equal(done.first.qdata, sweep.first.qdata)
    x = batches[0]
    with torch.no_grad():
        error = [float((m.first(x) - model.first(x)).square().mean()) for m in (done, sweep)]
    assert error[0] < error[1]


# --- refused, and nothing changed -----------------------------------------------------------------------------------


def refused(model: nn.Module, kind: type[Exception], match: str, config: NVFP4Config, **options) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(kind, match=match):
        quantize_model(model, config, progress=False, **options)
    assert same(model, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bad_text_is_refused(tiny):
    model = Two()
    good = torch.randn(8, 40, 32)
    refused(model, errors.NonFiniteError, "NaN or Inf", NVFP4Config("gptq", calibration=[good, good.masked_fill(good > 3, float("nan"))]))
    refused(model, errors.NonFiniteError, "NaN or Inf", NVFP4Config("gptq", calibration=[good * 1e30]))
    refused(model, errors.CalibrationError, "too short", NVFP4Config("gptq", calibration=[good[:1]]))
    refused(model, errors.CalibrationError, "no batch", NVFP4Config("gptq", calibration=[]))
    refused(model, errors.CalibrationError, "no generate", NVFP4Config("gptq"))
    refused(model, errors.CalibrationError, "iterable of batches", NVFP4Config("gptq", calibration=good))
    refused(tiny("llama"), errors.CalibrationError, "longer than the model has positions", NVFP4Config("gptq", calibration=[torch.zeros(1, 129).long()]))
    refused(tiny("llama"), errors.CalibrationError, "forward failed", NVFP4Config("gptq", calibration=[torch.full((1, 8), 999)]))


def test_an_interrupted_run_changes_nothing(tiny, monkeypatch):
    model = tiny("llama", torch.bfloat16)
    real, calls = prune.gptq.quantize, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt("enough")
        return real(*args)

    monkeypatch.setattr(prune.gptq, "quantize", interrupted)
    refused(model, KeyboardInterrupt, "enough", NVFP4Config("gptq"))


def test_other_uses_are_refused():
    with pytest.raises(errors.ConfigError, match="needs calibration data"):
        Sparse24Config("existing", "gptq")
    with pytest.raises(errors.ConfigError, match="while a model loads"):
        fp4_inductor.FP4InductorConfig(scale_search="gptq")
    with pytest.raises(errors.ConfigError, match="unknown scale_search"):
        torch.ops.fp4.quantize(torch.zeros(16, 16), "gptq")
