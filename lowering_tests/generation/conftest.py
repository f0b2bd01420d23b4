"""Tiny models of ten families whose greedy tokens vary: with the usual small weights, random models repeat one token, whatever they attend to."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.generation import caches
from fp4_inductor.generation.lookup import Text
from lowering_tests.models import conftest as models

SLIDING = {"sliding_window": 16}  # shorter than prompt and answer, so that windows become full on the way
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma2": SLIDING,
    "gemma3": SLIDING,
    "phi3": {},
    "gpt_oss": SLIDING,
    "mixtral": {},
    "qwen3_moe": {},
}
GEMMA2 = ("Gemma2Config", {"intermediate_size": 128, "head_dim": 16})


def build(family: str, **fields):
    """The tiny model, its weight matrices ten times the usual size; no token ends a row, unless ``eos_token_id`` says so."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    name, own = GEMMA2 if family == "gemma2" else models.DENSE.get(family) or models.MOE[family]
    torch.manual_seed(0)
    options = models.BASE | {"eos_token_id": None, "tie_word_embeddings": False} | own | FAMILIES.get(family, {}) | fields
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**options | {"tie_word_embeddings": False}), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Lines on stderr are looked at by the tests that are about them."""
    monkeypatch.setenv("FP4_INDUCTOR_QUIET", "1")


@pytest.fixture
def over_static(monkeypatch):
    """Calls that bring no cache run over a StaticCache."""
    monkeypatch.setattr(caches, "why_no_kv_cache", lambda model: "a test")


@pytest.fixture(scope="module")
def llama():
    """One for all tests of a file: what a test leaves on it, the next one has to bear."""
    return build("llama")


@pytest.fixture
def told(monkeypatch):
    """A function: drafts are looked for in ``text`` and the first token, of which the model sees the prompt alone."""

    begin = Text.begin

    def tell(text):
        monkeypatch.setattr(Text, "begin", lambda self, prompt, state, new: begin(self, text, state, new))

    yield tell
    monkeypatch.undo()
