"""Numerics of the Triton kernels without a GPU: Triton's interpreter, in one process of its own (interpreted.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lowering_tests.own_process import cases_of

pytest.importorskip("triton")


SPARSE = {"sparse_gemv": 31, "sparse_mid": 21, "sparse_dequantize": 8, "sparse_decompress": 1, "sparse_dequantize_fp8": 1}


def test_triton_kernels_in_the_interpreter():
    cases = cases_of(Path(__file__).with_name("interpreted.py"))
    kinds = Counter(c["case"].split()[0] for c in cases)
    dense = {"gemv": 66, "mid": 28, "siblings": 9, "glu": 16, "fp8_gemv": 6, "dequantize": 15, "dequantize_fp8": 1}
    assert kinds == dense | {"quantize_rows": 48, "quantize_glu_rows": 97, "topk": 12, "router": 12} | SPARSE, kinds
