"""Prompts over a KVCache in 8 and 4 bits, without a GPU: the kernels' numerics in Triton's interpreter, machine code, and which calls they serve."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

from fp4_inductor.formats import kv
from fp4_inductor.kernels.cached_attention.append import rows_config
from lowering_tests.kernels import prompt_aot
from lowering_tests.kernels.test_aot import A_FEW_SPILLS
from lowering_tests.own_process import cases_of

FORMATS = tuple(kv.FORMATS)


def test_appending_and_dequantizing_have_the_bits_of_the_formats():
    cases = cases_of(Path(__file__).with_name("interpreted_append.py"))
    assert Counter(c["case"].split()[0] for c in cases) == {"mean": 51, "written": 141, "returned": 141, "full": 9, "dequantize": 30, "old": 15, "new": 15}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_moved_16_bytes_at_a_time(name, d):
    """Two programs of each fit on a multiprocessor, whose registers are the limit: 64 Ki."""
    blocks = sum(kind.blocks for kind in (kv.FORMATS[name].key, kv.FORMATS[name].value))
    for new in (True, False):
        done = prompt_aot.rows(90, name, new, d)
        opcodes = done.opcodes()
        assert done.spills <= A_FEW_SPILLS  # the stack is that of exact divisions, which call a function for unusual numbers
        assert 2 * rows_config(d).num_warps * 32 * -(-done.registers // 8) * 8 <= 65536
        assert opcodes["LDG.E.128"] and opcodes["STG.E.128"]
        assert opcodes["STG.E.U8" if new else "LDG.E.U8"] == blocks, "block scales alone are moved byte by byte"
