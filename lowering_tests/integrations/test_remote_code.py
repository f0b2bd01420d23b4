"""load_pretrained never runs code of a checkpoint and never asks whether it may; what Transformers has itself is used instead."""

from __future__ import annotations

import builtins
import json
import shutil
import sys

import pytest
import torch

import fp4_inductor
from fp4_inductor import errors
from lowering_tests.foreign import MODELOPT, PLAIN, logits

CODE = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
sys.modules["fp4_inductor_test_code_ran"] = sys

class C(LlamaConfig):
    model_type = "unheard_of"

class M(LlamaForCausalLM):
    config_class = C
"""


@pytest.fixture(params=["ModelOpt", "native", "save_pretrained"])
def folder(request, tiny, tmp_path, monkeypatch):
    """A checkpoint with code, and a terminal whose user says yes to everything."""
    path = tmp_path / "a"
    model = fp4_inductor.load_pretrained(MODELOPT)
    if request.param == "ModelOpt":
        shutil.copytree(MODELOPT, path)
    elif request.param == "native":
        fp4_inductor.save(model, path)
    else:
        model.save_pretrained(path)
    (path / "own_code.py").write_text(CODE)
    asked: list[str] = []
    monkeypatch.setattr(builtins, "input", lambda text="": asked.append(text) or "y")
    yield path
    assert not asked
    assert "fp4_inductor_test_code_ran" not in sys.modules


def give(path, **fields) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def test_an_architecture_that_needs_code_is_refused(folder):
    give(folder, model_type="unheard_of", auto_map={"AutoConfig": "own_code.C", "AutoModelForCausalLM": "own_code.M"})
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": None}):
        with pytest.raises(errors.CheckpointError, match="needs code that comes with it.*Build the model yourself"):
            fp4_inductor.load_pretrained(folder, **options)
    with pytest.raises(errors.ConfigError, match="runs no code"):
        fp4_inductor.load_pretrained(folder, trust_remote_code=True)


def test_an_architecture_that_transformers_has(folder):
    give(folder, auto_map={"AutoConfig": "own_code.C", "AutoModelForCausalLM": "own_code.M"})
    assert torch.equal(logits(fp4_inductor.load_pretrained(folder)), logits(fp4_inductor.load_pretrained(MODELOPT)))


def test_a_model_class_that_only_the_code_has(folder):
    """The config is one that transformers knows, the auto class has no model for it."""
    import transformers

    give(folder, auto_map={"AutoModelForVision2Seq": "own_code.M", "AutoModelForImageTextToText": "own_code.M"})
    with pytest.raises(errors.CheckpointError, match="needs code that comes with it"):
        fp4_inductor.load_pretrained(folder, model_class=transformers.AutoModelForImageTextToText)


def test_a_folder_of_save_with_a_model_class(tiny, tmp_path):
    import transformers

    model = fp4_inductor.quantize_model(tiny("llama", torch.bfloat16), PLAIN, progress=False)
    fp4_inductor.save(model, tmp_path)
    again = fp4_inductor.load_pretrained(tmp_path, model_class=transformers.LlamaForCausalLM)
    assert torch.equal(logits(again), logits(model))
