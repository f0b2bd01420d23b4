"""The support table of fp4_inductor/checkpoint/README.md: every tiny family x {quantize, load, compile, generate, save}. ``make support`` writes it.

A cell of the table is green only if its test ran; ``.ci/run`` compares the table with the record of its own run.
"""

from __future__ import annotations

import functools
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fp4_inductor
from lowering_tests.foreign import IDS, PLAIN, assert_same, logits, relative, reloaded
from lowering_tests.models.conftest import DENSE, MOE, build

SHARED = replace(PLAIN, siblings="shared")  # what servers want, so that an export keeps every bit
STEPS = ("quantize", "load", "compile", "generate", "save")
# A cell that is not green, and why. Such a test must fail: once it passes, the entry goes.
KNOWN = {
    ("granitemoehybrid", "load"): "keeps all experts of a layer in one tensor on disk, which ModelOpt's layout cannot describe",
}
README = Path(__file__).parents[2] / "fp4_inductor" / "checkpoint" / "README.md"


@functools.cache
def quantized(family: str):
    with tempfile.TemporaryDirectory() as directory:
        return fp4_inductor.quantize_model(reloaded(build(family, torch.bfloat16), directory), SHARED, progress=False)


def quantize(family: str) -> None:
    model = quantized(family)
    assert fp4_inductor.report(model).coverage == 100.0
    assert logits(model).isfinite().all()


def load(family: str) -> None:
    """A ModelOpt checkpoint of this family, through load_pretrained."""
    model = quantized(family)
    with tempfile.TemporaryDirectory() as directory:
        report = fp4_inductor.export_pretrained(model, directory, "modelopt")
        again = fp4_inductor.load_pretrained(directory)
    if not report.rescaled:
        assert_same(again, model)
        assert torch.equal(logits(again), logits(model))
        return
    # Layers that servers fuse and this package does not: exported once under one scale, they stay as they are.
    assert relative(logits(again), logits(model)) < 0.1
    with tempfile.TemporaryDirectory() as directory:
        assert not fp4_inductor.export_pretrained(again, directory, "modelopt").rescaled
        assert_same(fp4_inductor.load_pretrained(directory), again)


def save(family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = quantized(family)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        again = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert_same(again, model)


@torch.no_grad()
def compile(family: str) -> None:
    """One graph (fullgraph) through Dynamo and AOTAutograd."""
    model = quantized(family)
    want = logits(model)
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=IDS, use_cache=False).logits.double()
    assert relative(got, want) < 2.0**-6


@torch.no_grad()
def generate(family: str) -> None:
    """generate() with a StaticCache, the decode step compiled as one graph, where the family has such a cache; else its own cache."""
    from transformers import CompileConfig

    model = quantized(family)
    options = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(IDS, **options, disable_compile=True)
    assert plain.shape == (2, 16)
    if not can_be_static(family, options):
        return
    compiling = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    compiling._compile_all_devices = True
    static = model.generate(IDS, **options, cache_implementation="static", compile_config=compiling)
    assert static.shape == plain.shape
    assert torch.equal(static[:, : IDS.shape[1]], IDS)


def can_be_static(family: str, options: dict) -> bool:
    """Does the dense model generate with a StaticCache? Stateful families have none; Llama 4's mask function refuses it in transformers 5.17."""
    model = build(family, torch.bfloat16)
    if not getattr(model, "_can_compile_fullgraph", False) or getattr(model, "_is_stateful", False):
        return False
    try:
        model.generate(IDS, **options, cache_implementation="static", disable_compile=True)
    except TypeError:
        return False
    return True


def cells():
    for family in DENSE | MOE:
        for step in STEPS:
            marks = [pytest.mark.xfail(reason=KNOWN[family, step], strict=True)] if (family, step) in KNOWN else []
            yield pytest.param(family, step, id=f"{family}-{step}", marks=marks)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "step"), list(cells()))
def test_support(family, step):
    torch.compiler.reset()
    {"quantize": quantize, "load": load, "compile": compile, "generate": generate, "save": save}[step](family)


def test_the_readme_says_what_these_tests_say():
    """Every family has its row, every cell that is not green its reason."""
    block = README.read_text().split("<!-- support: begin")[1].split("<!-- support: end -->")[0]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|", block, re.MULTILINE)}
    del rows["family"]
    assert set(rows) == set(DENSE | MOE)
    for family, found in rows.items():
        for step, cell in zip(STEPS, found, strict=True):
            assert (cell.strip() == "yes") == ((family, step) not in KNOWN), (family, step)
    assert all(reason in block for reason in KNOWN.values())
