"""``evaluate``: perplexity, KL and agreement against torch's own formulas; what cannot be evaluated is a typed error."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import errors, evaluate
from fp4_inductor.models.evaluate import Evaluation, predictions, windows_of


class Output:
    def __init__(self, logits):
        self.logits = logits


class Model(nn.Module):
    """A bigram model with dropout, to see that it is switched off."""

    def __init__(self, vocabulary: int = 50):
        super().__init__()
        self.table = nn.Parameter(2 * torch.randn(vocabulary, vocabulary))
        self.dropout = nn.Dropout(0.9)

    def forward(self, input_ids, use_cache=False):
        return Output(self.dropout(F.embedding(input_ids, self.table)))


WINDOWS = torch.arange(2 * 301).reshape(2, 301) * 7 % 50


@torch.no_grad()
def test_against_the_formulas():
    """T = 300 is more than one chunk of positions."""
    a, b = Model().train(), Model().train()
    got = evaluate(a, WINDOWS, reference=b)
    ids, target = WINDOWS[:, :-1].flatten(), WINDOWS[:, 1:].flatten()
    p, q = a.table[ids].double().log_softmax(-1), b.table[ids].double().log_softmax(-1)
    assert got.positions == 600 and got.non_finite == 0
    assert got.nats == pytest.approx(float(F.nll_loss(p, target)), rel=1e-5)
    assert got.perplexity == pytest.approx(math.exp(got.nats))
    assert got.kl == pytest.approx(float((q.exp() * (q - p)).sum(-1).mean()), rel=1e-5)  # KL(reference || model)
    assert got.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert a.training and b.training and a.dropout.training


def test_predictions_stand_for_their_model():
    a, b = Model(), Model()
    of_a, of_b = predictions(a, WINDOWS), predictions(b, WINDOWS)
    assert [tuple(t.shape) for t in of_a] == [(300, 50)] * 2
    assert evaluate(a, WINDOWS, reference=b) == evaluate(of_a, WINDOWS, reference=of_b) == evaluate(a, WINDOWS, reference=of_b)
    assert evaluate(a, WINDOWS, reference=a) == Evaluation(600, 0, evaluate(a, WINDOWS).nats, 0.0, 1.0)
    assert evaluate(a, WINDOWS).kl is None


def test_logits_that_are_not_finite_are_counted():
    model = Model()
    with torch.no_grad():
        model.table[WINDOWS[0, 0], 3] = math.nan
    got = evaluate(model, WINDOWS, reference=Model())
    assert got.non_finite == int((WINDOWS[:, :-1] == WINDOWS[0, 0]).sum())
    assert math.isnan(got.nats) and math.isnan(got.kl) and math.isnan(got.perplexity)


def test_windows():
    assert windows_of(range(10), 2, 4).tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert windows_of(range(10), 99, 4).shape == (2, 5)
    assert windows_of(range(3), 4, 512).tolist() == [[0, 1, 2]]
    for bad in (lambda: windows_of([1], 1), lambda: windows_of([], 1), lambda: windows_of([1, 2], 0), lambda: windows_of([1, 2], 1, 0)):
        with pytest.raises(errors.ShapeError):
            bad()


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: evaluate(nn.Linear(4, 4), WINDOWS), errors.ConfigError, "Linear does not predict tokens"),
        (lambda: evaluate(Model(), WINDOWS.float()), errors.ShapeError, "windows of tokens"),
        (lambda: evaluate(Model(), WINDOWS[0]), errors.ShapeError, "windows of tokens"),
        (lambda: evaluate(Model(), WINDOWS[:, :1]), errors.ShapeError, "windows of tokens"),
        (lambda: evaluate(Model(), WINDOWS + 50), errors.ConfigError, "does not predict tokens"),
        (lambda: evaluate(Model(60), WINDOWS, reference=Model(61)), errors.ShapeError, "predict different things"),
        (lambda: evaluate(Model(), WINDOWS, reference=predictions(Model(), WINDOWS[:1])), errors.ShapeError, "of other windows"),
    ],
)
def test_what_cannot_be_evaluated(call, kind, match):
    with pytest.raises(kind, match=match) as caught:
        call()
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)
