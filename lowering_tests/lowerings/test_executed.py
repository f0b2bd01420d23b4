"""Numerics of generated CUDA code without a GPU: compiled models, run in Triton's interpreter in one process of its own (executed_graphs.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lowering_tests.own_process import cases_of

pytest.importorskip("triton")


def test_generated_code_computes_what_the_graph_says():
    cases = cases_of(Path(__file__).with_name("executed_graphs.py"))
    kinds = Counter(c["case"].split()[0] for c in cases)
    counts = {"dense": 11, "dynamic": 4, "siblings": 7, "glu": 4, "sparse": 4, "silu": 3, "residual": 3, "w4a4": 5, "scales": 5}
    assert counts == {kind: n for kind, n in kinds.items() if kind in counts}
    # A case whose product is left to an operator would prove nothing.
    templates = {c["case"]: c["launched"].count("tem") for c in cases}
    assert {n for case, n in templates.items() if case.startswith("siblings")} == {3}
    assert {case for case, n in templates.items() if n == 0} == {"large bf16 M2100", "w4a4 by hand"}
    alone = [c for c in cases if c["case"].split()[0] in ("dense", "relu", "silu", "residual", "sparse", "glu", "scales") and "siblings" not in c["case"]]
    assert {tuple(c["launched"]) for c in alone} == {("tem",)}, "bias, activation, product and residual in one kernel"
