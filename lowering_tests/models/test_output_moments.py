"""Second moments of gradients at a layer's output: the sketch against the matrix, what fisher() finds, and what is rounded by it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import NVFP4Config
from fp4_inductor.formats import gptq as numbers
from fp4_inductor.models import gptq, output_moments, token_weights
from fp4_inductor.models.chain import find_chain
from fp4_inductor.models.output_moments import OutputMoments, omega_of
from fp4_inductor.models.plan import make_plan

CPU = torch.device("cpu")


def moments_of(*gradients: torch.Tensor, rank: int = 24) -> OutputMoments:
    n = gradients[0].shape[1]
    found = OutputMoments(n, omega_of(n, rank, CPU), CPU)
    for g in gradients:
        found.add(g)
    return found


def test_few_outputs_have_the_matrix_itself():
    a, b = torch.randn(50, 64), torch.randn(7, 64)
    want = torch.cat([a, b])
    torch.testing.assert_close(moments_of(a, b, rank=64).matrix(CPU), (want.T @ want).double(), rtol=1e-5, atol=1e-4)


def test_a_sketch_has_all_of_few_directions():
    g = torch.randn(500, 12) @ torch.randn(12, 200)
    got, want = moments_of(g).matrix(CPU), (g.T @ g).double()
    assert float((got - want).norm() / want.norm()) < 1e-3


def test_a_sketch_of_many_directions_is_positive_and_has_the_diagonal():
    g = torch.randn(500, 200) * torch.exp(torch.randn(200))
    got, want = moments_of(g[:100], g[100:]).matrix(CPU), (g.T @ g).double()
    torch.testing.assert_close(got.diagonal(), want.diagonal(), rtol=1e-4, atol=1e-3)
    assert float(torch.linalg.eigvalsh(got)[0]) > -1e-6 * float(torch.linalg.eigvalsh(got)[-1])
    assert not bool(moments_of(torch.zeros(3, 200)).matrix(CPU).any())


def test_sketches_share_their_directions_and_wait_in_the_hosts_memory(tiny, monkeypatch):
    """A GPU holds one set of directions for each number of outputs, and what was added up while it is added up."""
    monkeypatch.setattr(output_moments, "_BYTES", 1 << 12)
    monkeypatch.setattr(output_moments, "_SHARE", 0.0)
    model = tiny("llama", torch.float32)
    found = gptq.output_moments_of(model, make_plan(model).groups)
    outputs = {m.seen.shape[0] for m in found.values()}
    assert len({id(m.omega) for m in found.values()}) == len(outputs) < len(found)
    assert all(m.omega is not None and m.seen.shape == m.omega.shape for m in found.values())
    with mock.patch.object(OutputMoments, "to_host", autospec=True) as to_host:
        fp4_inductor.quantize_model(model, NVFP4Config("gptq", calibration=[torch.randint(128, (8, 40))]), progress=False)
    assert to_host.call_count == len(found)


def test_gradients_are_those_of_the_loss(tiny):
    model = tiny("llama", torch.float32).eval()
    plan = make_plan(model)
    target = plan.targets[5]
    ids = torch.randint(128, (3, 12))
    moments = {target.name: OutputMoments(target.module.out_features, None, CPU)}
    found = token_weights.fisher(model, plan.targets, [ids[:2], ids[2:]], find_chain(model, plan.targets), False, (), moments)
    assert list(found.outputs) == [target.name]
    added = torch.zeros(3, 12, target.module.out_features, requires_grad=True)
    with target.module.register_forward_hook(lambda module, args, output: output + added):
        F.cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    g = added.grad.flatten(0, 1)
    torch.testing.assert_close(found.outputs[target.name].matrix(CPU), (g.T @ g).double(), rtol=1e-3, atol=1e-6)


def test_the_rank_follows_the_memory():
    model = torch.nn.Linear(8, 8)
    assert output_moments.room(model) == 1 << 30
    assert output_moments.rank_of([576, 1536] * 90, output_moments.room(model)) > 1000, "of a small model all of the matrix"
    with mock.patch.object(torch.nn.Module, "parameters", return_value=[torch.empty(15 << 30, dtype=torch.uint8, device="meta")]):
        room = output_moments.room(model)
    large = output_moments.rank_of([12288, 12288, 4096, 4096, 4096, 1024, 1024] * 36, room)
    assert 300 < large < 400 and 4 * large * 38912 * 36 <= 2 << 30


@pytest.mark.parametrize("most", [16384, 63])
def test_layers_are_rounded_by_them(tiny, most, monkeypatch):
    """But those of more outputs than ``most``. The report says how many."""
    monkeypatch.setattr(output_moments, "MOST", most)
    model = tiny("llama", torch.float32)
    outputs = [t.module.out_features for t in make_plan(model).targets]
    few = sum(n <= most for n in outputs)
    with mock.patch.object(numbers, "_rows_in_turn", wraps=numbers._rows_in_turn) as rows:
        fp4_inductor.quantize_model(model, NVFP4Config("gptq", calibration=[torch.randint(128, (8, 40))]), progress=False)
    assert rows.call_count == few and (most == 63) == (few < len(outputs))
    assert f"the rows of {few} layers together" in str(fp4_inductor.report(model).notes)
