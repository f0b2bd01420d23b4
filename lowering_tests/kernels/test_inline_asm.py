"""The inline PTX of the 2:4 GEMV, instruction by instruction on integers: the interpreter runs the other branch of these helpers.

The semantics are those of the PTX ISA: ``prmt`` in its default mode, ``lop3`` by its truth table, ``cvt`` of two E4M3 bytes.
"""

from __future__ import annotations

import inspect
import itertools
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fp4_inductor.formats import e2m1, sparse24
from fp4_inductor.kernels.sparse_linear import triton_gemv


def assembly(kernel) -> str:
    (text,) = re.findall(r'"""\{(.*?)\}"""', inspect.getsource(kernel.fn), re.DOTALL)
    return text


def prmt(a, b, selector):
    both = [(r >> np.uint32(8 * i)) & np.uint32(255) for r in (a, b) for i in range(4)]
    out = np.zeros_like(np.broadcast_arrays(a, b, selector)[0])
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        assert not (nibble & np.uint32(8)).any(), "sign replication is not meant"
        out |= np.choose(nibble, np.broadcast_arrays(*both)) << np.uint32(8 * i)
    return out


def lop3(a, b, c, table):
    out = np.zeros_like(a | b | c)
    for i, (x, y, z) in enumerate(itertools.product((0, 1), repeat=3)):
        if table >> i & 1:
            out |= (a if x else ~a) & (b if y else ~b) & (c if z else ~c)
    return out


def e4m3_pair_to_half2(pair):
    """16 bits of two E4M3 bytes -> half2, the low byte in the low half."""
    halves = []
    for shift in (0, 8):
        byte = torch.from_numpy(((pair >> np.uint32(shift)) & np.uint32(255)).astype(np.uint8))
        halves.append(byte.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy().astype(np.uint32) & np.uint32(0xFFFF))
    return halves[0] | halves[1] << np.uint32(16)


INSTRUCTIONS = {
    "shr.b32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table)),
    "prmt.b32": prmt,
    "cvt.rn.f16x2.e4m3x2": e4m3_pair_to_half2,
}


def run(text: str, *operands: np.ndarray) -> list[np.ndarray]:
    """Outputs ``$0 ..$3`` of the four-output block ``text`` on inputs ``$4 ..``."""
    registers: dict[str, np.ndarray] = {f"${4 + i}": o.astype(np.uint32) for i, o in enumerate(operands)}

    def value(name: str) -> np.ndarray:
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    for statement in filter(None, (s.strip() for s in text.replace("\n", " ").split(";"))):
        if statement.startswith(".reg"):
            continue
        op, rest = statement.split(None, 1)
        if op == "mov.b32":  # {l, u}, p
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            registers[low], registers[high] = value(source) & np.uint32(0xFFFF), value(source) >> np.uint32(16)
            continue
        target, *arguments = (a.strip() for a in rest.split(","))
        registers[target] = INSTRUCTIONS[op](*map(value, arguments))
    return [registers[f"${i}"] for i in range(4)]


def halves(word: np.ndarray) -> torch.Tensor:
    """float16 ``[.., 2]`` of half2 words, low half first."""
    return torch.from_numpy(word.astype(np.uint32).view(np.int32).copy()).view(torch.float16).view(*word.shape, 2)


def test_kept_codes_become_pairs():
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    got = torch.stack([halves(h) for h in run(assembly(triton_gemv.decode_kept), words)], 1).flatten(1)
    codes = torch.from_numpy(np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], 1).astype(np.uint8))
    assert torch.equal(got.float(), e2m1.decode(codes) * 2.0**-6)


def test_every_four_patterns_gather_the_kept_activations():
    nibbles = np.array(list(itertools.product(sparse24.NIBBLES, repeat=4)), dtype=np.uint32)
    meta = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    k = np.arange(1, 17, dtype=np.uint32)  # sixteen different halves
    pairs = k[0::2] | k[1::2] << 16
    a, b = ([np.full_like(meta, pairs[2 * g + h]) for g in range(4)] for h in (0, 1))
    got = run(assembly(triton_gemv.gather_kept), meta, *a, *b)
    for g in range(4):
        first, second = nibbles[:, g] & 3, nibbles[:, g] >> 2
        assert (got[g] & 0xFFFF == k[4 * g + first]).all()
        assert (got[g] >> 16 == k[4 * g + second]).all()


def test_illegal_metadata_picks_some_activation_of_its_group():
    meta = np.arange(2**16, dtype=np.uint32)
    a = [np.full_like(meta, 0x00020001 + 0x00040004 * g) for g in range(4)]
    b = [np.full_like(meta, 0x00040003 + 0x00040004 * g) for g in range(4)]
    for g, word in enumerate(run(assembly(triton_gemv.gather_kept), meta, *a, *b)):
        for half in (word & 0xFFFF, word >> 16):
            assert ((half >= 4 * g + 1) & (half <= 4 * g + 4)).all()
