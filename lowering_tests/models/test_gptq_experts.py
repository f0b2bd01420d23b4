"""scale_search="gptq" of experts: the weights of tokens at both products, who is rounded with which tokens, who falls back and is said."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import NVFP4Config, quantize_model
from fp4_inductor.formats.nvfp4 import dequantize
from fp4_inductor.kernels.quantize import gptq as rounding
from fp4_inductor.models import gptq, prune, sparsify_experts, token_weights
from fp4_inductor.models.calibrate_experts import between, routed
from fp4_inductor.models.chain import Chain, find_chain
from fp4_inductor.models.expert_gradients import PairWeights, assignments
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.routed import RoutedInputs
from fp4_inductor.models.walk import walk
from fp4_inductor.modules import FP4Experts

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    monkeypatch.setattr(gptq, "SEQUENCES", 16)
    monkeypatch.setattr(gptq, "TOKENS", 32)
    for module in (prune, sparsify_experts):
        monkeypatch.setattr(module, "ENOUGH", 100)


class Shown(torch.nn.Module):
    """The definition of a module of experts, with a zero added to what each product of each expert gives."""

    def __init__(self, target):
        super().__init__()
        self.target, self.added = target, []

    def forward(self, hidden, *routing, **named):
        module, spec = self.target.module, self.target.spec
        shape, hidden = hidden.shape, hidden.flatten(0, -2)
        values = [*routing, *named.values()]
        experts = module.down_proj.shape[0]
        ids, weights = assignments(self.target, experts, hidden, values)
        out = torch.zeros_like(hidden)
        for e, rows in routed(self.target, experts, hidden, values):
            first, down = (getattr(module, n).detach()[e] for n in (spec.first, "down_proj"))
            first, down = (first.mT, down.mT) if spec.transposed else (first, down)
            z = hidden[rows] @ first.mT + (getattr(module, f"{spec.first}_bias")[e].detach() if spec.bias else 0)
            zeros = torch.zeros_like(z, requires_grad=True), torch.zeros(len(rows), len(down), requires_grad=True)
            y = spec.activation(z + zeros[0], down.shape[1]) @ down.mT + (module.down_proj_bias[e].detach() if spec.bias else 0)
            out = out.index_add(0, rows, (y + zeros[1]) * (weights[rows] * (ids[rows] == e)).sum(-1, keepdim=True))
            self.added.append((e, rows, zeros))
        return out.view(shape)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4"])
def test_weights_are_the_squared_gradients_at_both_products(tiny, kind):
    model = tiny(kind, torch.float32)
    plan = make_plan(model)
    ids = torch.randint(128, (3, 12))
    chain = find_chain(model, [*plan.targets, *plan.experts])
    found = token_weights.fisher(model, plan.targets, [ids], chain, False, plan.experts)
    assert found.reason == "" and not any(m._forward_hooks for m in model.modules())
    target = plan.experts[-1]
    shown = Shown(target)
    target.module.forward = shown.forward
    F.cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    (pairs,) = found.pairs(target.name, 0, 1)
    assert len(shown.added) > 1
    for e, rows, zeros in shown.added:
        want = torch.stack([z.grad.square().sum(-1) for z in zeros])
        assert want.sum() > 0
        torch.testing.assert_close(pairs.of(e, rows), want, rtol=1e-3, atol=1e-9)
    assert found.unknown == set()


def test_weights_go_with_the_tokens_they_were_measured_at():
    """What was not recorded, borrowed tokens included, weighs 1; the rest is 1 on average; a layer without a gradient goes by norms."""
    target = SimpleNamespace(spec=SimpleNamespace(dense=False), module=torch.nn.ParameterDict({"down_proj": torch.nn.Parameter(torch.zeros(3, 4, 4))}))
    hidden, ids = torch.randn(5, 4), torch.tensor([[0, 1], [1, 2], [1, 0], [2, 0], [1, 1]])
    v = torch.tensor([[1.0, 10.0], [20.0, 9.0], [30.0, 2.0], [9.0, 3.0], [40.0, 0.0]])
    recorded = ids.clone()
    recorded[0, 1] = 2  # row 0 went elsewhere then
    inputs = RoutedInputs(target, weighted=True)
    inputs.add([hidden, ids, torch.rand(5, 2)], None, PairWeights(recorded, v, 2 * v))
    assert [len(inputs.inputs(e)[0]) for e in range(3)] == [3, 4, 2]
    torch.testing.assert_close(inputs.weights(0, 0, hidden[:3]), torch.tensor([0.5, 1.0, 1.5]))
    torch.testing.assert_close(inputs.weights(1, 1, hidden[:5]), torch.tensor([1.0, 2 / 3, 1.0, 4 / 3, 1.0]))  # the last one is borrowed
    norms = RoutedInputs(target, weighted=True)
    norms.add([hidden, ids, torch.rand(5, 2)])
    assert torch.equal(norms.weights(1, 0, hidden[:4]), token_weights.input_norms(hidden[:4]))
    assert RoutedInputs(target).weights(1, 0, hidden) is None


def test_each_expert_is_rounded_by_its_own_tokens(tiny, monkeypatch):
    model = tiny("qwen3_moe", torch.float32)
    batches = [{"input_ids": torch.randint(128, (8, 32)), "use_cache": False} for _ in range(2)]
    monkeypatch.setattr(gptq.self_calibration, "why_not", lambda model: "told so")
    done = quantize_model(copy.deepcopy(model), NVFP4Config("gptq", calibration=batches), progress=False)
    plan = make_plan(model)
    target = plan.experts[1]
    chain = Chain([], broken="on purpose")
    weights = token_weights.fisher(model, plan.targets, batches, chain, False, plan.experts)
    ((_, _, inputs),) = walk(model, chain, [target], batches, sequential=False, progress=False, desc="", weigh=weights)
    experts = done.get_submodule(target.name)
    assert isinstance(experts, FP4Experts)
    few = 0
    for e, count in enumerate(inputs.tokens):
        if count < prune.ENOUGH:
            few += 1
            continue
        x = inputs.inputs(e)[0]
        for product, name in enumerate(("gate_up_proj", "down_proj")):
            v = inputs.weights(e, product, x)
            want = rounding.quantize(target.module.get_parameter(name).detach()[e], x.T @ (x * v[:, None]) / len(x))
            off = experts.get_submodule(name)[e].dequantize(torch.float32) - dequantize(*want, torch.float32)
            assert float((off != 0).float().mean()) < 0.02  # sums in another order may tip a tie
            x = between(target.module, target.spec, e, x) if product == 0 else x
    assert few < 8
    notes = [row.notes for row in fp4_inductor.report(done).layers if row.name.startswith(target.name)]
    assert len(notes) == 2 and all((few > 0) == any(f"{few} of 8 experts met fewer than 100 tokens (" in n for n in row) for row in notes)


def test_experts_without_enough_tokens_get_the_sweep_and_the_report_says_which(tiny, monkeypatch):
    for module in (prune, sparsify_experts):
        monkeypatch.setattr(module, "ENOUGH", 10**6)
    model = tiny("mixtral", torch.bfloat16)
    done = quantize_model(copy.deepcopy(model), NVFP4Config("gptq"), progress=False)
    text = gptq.text(model, [])[0]
    sweep = quantize_model(copy.deepcopy(model), NVFP4Config("activation", calibration=text), progress=False)
    for (name, a), (_, b) in zip(done.named_modules(), sweep.named_modules(), strict=True):
        if isinstance(a, FP4Experts):
            assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.down_proj.parts()[:2], b.down_proj.parts()[:2], strict=True))
            row = next(r for r in fp4_inductor.report(done).layers if r.name == f"{name}.down_proj")
            assert any(n.startswith("4 of 4 experts met fewer than 1000000 tokens (") and n.endswith('"activation" for them') for n in row.notes)


def test_better_than_the_sweep_and_twice_the_same(tiny):
    model = tiny("qwen3_moe", torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform: there is something to lose
    first, second = (quantize_model(copy.deepcopy(model), NVFP4Config("gptq"), progress=False) for _ in range(2))
    a, b = first.state_dict(), second.state_dict()
    assert all(torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a)
    default = quantize_model(copy.deepcopy(model), NVFP4Config("activation", calibration=gptq.text(model, [])[0]), progress=False)
    ids = gptq.self_calibration.write(model, 32, 32, random_first=32)[0]["input_ids"]

    def kl(m) -> float:
        p, q = (F.log_softmax(n(input_ids=ids, use_cache=False).logits.float(), -1) for n in (model, m))
        return float(F.kl_div(q, p, log_target=True, reduction="sum")) / ids.numel()

    with torch.no_grad():
        assert kl(first) < 0.9 * kl(default)
