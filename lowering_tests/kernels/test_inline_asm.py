"""The inline PTX of the 2:4 GEMV and of dequantisation, instruction by instruction on integers: the interpreter runs other branches.

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

from fp4_inductor.formats import e2m1, nvfp4, sparse24
from fp4_inductor.kernels.dequantize import triton_rows
from fp4_inductor.kernels.sparse_linear import triton_sparse_gemv
from fp4_inductor.ops import dequantize_fp8


def assembly(kernel) -> str:
    (text,) = re.findall(r'"""(\{.*?\})"""', inspect.getsource(kernel.fn), re.DOTALL)
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


def f32(bits):
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.int32).copy()).view(torch.float32)


def bits(t):
    """Of a float tensor, as uint32 (of 16 and 8 bits: the low ones)."""
    wide = t.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[t.element_size()]).numpy().astype(np.int64)
    return (wide & (1 << 8 * t.element_size()) - 1).astype(np.uint32)


def pair_of(dtype):
    """cvt of two float32: the first operand in the high half."""
    return lambda high, low: bits(f32(high).to(dtype)) << np.uint32(16) | bits(f32(low).to(dtype))


def product_of_halves(a, b):
    """Exact products only: what this file is about does not round."""
    x, y = halves(a), halves(np.broadcast_to(b, a.shape))
    out = x.double() * y.double()
    assert torch.equal(out.half().double(), out)
    return bits(out.half()[..., 0]) | bits(out.half()[..., 1]) << np.uint32(16)


def half2_to_e4m3_pair(word):
    codes = bits(halves(word).float().clamp(-448, 448).to(torch.float8_e4m3fn))
    return codes[..., 0] | codes[..., 1] << np.uint32(8)


def multiply(a, b):
    return bits(f32(a) * f32(np.broadcast_to(b, np.shape(a))))


INSTRUCTIONS = {
    "shr.b32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table)),
    "prmt.b32": prmt,
    "cvt.rn.f16x2.e4m3x2": e4m3_pair_to_half2,
    "cvt.rn.satfinite.e4m3x2.f16x2": half2_to_e4m3_pair,
    "cvt.rn.f16x2.f32": pair_of(torch.float16),
    "cvt.rn.bf16x2.f32": pair_of(torch.bfloat16),
    "mul.rn.f16x2": product_of_halves,
    "mul.rn.f32": multiply,
    "mov.b32": lambda a: a,
}


def run(text: str, *operands: np.ndarray, outputs: int = 4) -> list[np.ndarray]:
    """Outputs ``$0 ..`` of a block on the inputs behind them."""
    registers: dict[str, np.ndarray] = {f"${outputs + i}": o.astype(np.uint32) for i, o in enumerate(operands)}

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 0)) if name[0].isdigit() else registers[name]

    text = text.strip().removeprefix("{").removesuffix("}")
    for statement in filter(None, (s.strip() for s in text.replace("\n", " ").split(";"))):
        if statement.startswith(".reg"):
            continue
        op, rest = statement.split(None, 1)
        if op == "mov.b32" and rest.startswith("{"):  # {l, u}, p
            low, high, source = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest).groups()
            registers[low], registers[high] = value(source) & np.uint32(0xFFFF), value(source) >> np.uint32(16)
            continue
        if rest.endswith("}"):  # p, {l, u}
            target, low, high = re.fullmatch(r"(\S+), \{(\w+), (\w+)\}", rest).groups()
            shift = {"mov.b32": 16, "mov.b64": 32}[op]
            registers[target] = value(low).astype(np.uint64) | value(high).astype(np.uint64) << np.uint64(shift)
            if shift == 16:
                registers[target] = registers[target].astype(np.uint32)
            continue
        target, *arguments = (a.strip() for a in rest.split(","))
        registers[target] = INSTRUCTIONS[op](*map(value, arguments))
    return [registers[f"${i}"] for i in range(outputs)]


def halves(word: np.ndarray) -> torch.Tensor:
    """float16 ``[.., 2]`` of half2 words, low half first."""
    return torch.from_numpy(word.astype(np.uint32).view(np.int32).copy()).view(torch.float16).view(*word.shape, 2)


def test_kept_codes_become_pairs():
    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    got = torch.stack([halves(h) for h in run(assembly(triton_sparse_gemv.decode_kept), words)], 1).flatten(1)
    codes = torch.from_numpy(np.stack([(words >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], 1).astype(np.uint8))
    assert torch.equal(got.float(), e2m1.decode(codes) * 2.0**-6)


def test_every_four_patterns_gather_the_kept_activations():
    nibbles = np.array(list(itertools.product(sparse24.NIBBLES, repeat=4)), dtype=np.uint32)
    meta = nibbles[:, 0] | nibbles[:, 1] << 4 | nibbles[:, 2] << 8 | nibbles[:, 3] << 12
    k = np.arange(1, 17, dtype=np.uint32)  # sixteen different halves
    pairs = k[0::2] | k[1::2] << 16
    a, b = ([np.full_like(meta, pairs[2 * g + h]) for g in range(4)] for h in (0, 1))
    got = run(assembly(triton_sparse_gemv.gather_kept), meta, *a, *b)
    for g in range(4):
        first, second = nibbles[:, g] & 3, nibbles[:, g] >> 2
        assert (got[g] & 0xFFFF == k[4 * g + first]).all()
        assert (got[g] >> 16 == k[4 * g + second]).all()


def test_illegal_metadata_picks_some_activation_of_its_group():
    meta = np.arange(2**16, dtype=np.uint32)
    a = [np.full_like(meta, 0x00020001 + 0x00040004 * g) for g in range(4)]
    b = [np.full_like(meta, 0x00040003 + 0x00040004 * g) for g in range(4)]
    for g, word in enumerate(run(assembly(triton_sparse_gemv.gather_kept), meta, *a, *b)):
        for half in (word & 0xFFFF, word >> 16):
            assert ((half >= 4 * g + 1) & (half <= 4 * g + 4)).all()


def every_code_at_every_place(words: int):
    """Random words in which each nibble takes each value, one row a scale: ``(words uint32, their codes uint8, scale codes uint8)``."""
    w = np.random.default_rng(0).integers(0, 2**32, (127, 64, words), dtype=np.uint32)
    w[:, :16] = (np.arange(16, dtype=np.uint32) * np.uint32(0x11111111))[None, :, None]
    codes = np.stack([(w >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)], -1).astype(np.uint8).reshape(127, -1)
    return w, torch.from_numpy(codes), torch.arange(127, dtype=torch.uint8)


def words_out(outputs: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.stack(outputs, -1).view(np.int64).copy()).view(dtype).flatten(1)


def test_fp8_weights_are_the_reference():
    w, codes, s = every_code_at_every_place(2)
    scale = s.view(torch.float8_e4m3fn)
    factor = np.broadcast_to(bits(scale.float() * dequantize_fp8.WEIGHT_FACTOR)[:, None], w.shape[:2])
    got = words_out(run(triton_rows.SIXTEEN_FP8.value, w[..., 0], w[..., 1], factor, outputs=2), torch.uint8)
    want = dequantize_fp8.reference(e2m1.pack(codes), scale[:, None].expand(-1, codes.shape[1] // 16))
    assert torch.equal(got, want.view(torch.uint8))


@pytest.mark.parametrize("g", [1.7, 3e-39, 3e4, 1e38, float("inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_of_16_bits_are_the_reference(dtype, g):
    """Subnormal and infinite results, too."""
    w, codes, s = every_code_at_every_place(1)
    scale = s.view(torch.float8_e4m3fn)
    each = np.broadcast_to(bits(scale.float())[:, None], w.shape[:2])
    whole = np.broadcast_to(bits(torch.tensor(g)), w.shape[:2])
    text = (triton_rows.EIGHT_BF16 if dtype == torch.bfloat16 else triton_rows.EIGHT_FP16).value
    got = words_out(run(text, w[..., 0], each, whole, outputs=2), dtype)
    want = nvfp4.dequantize(e2m1.pack(codes), scale[:, None].expand(-1, codes.shape[1] // 16), torch.tensor(g), dtype)
    known = ~want.isnan()
    assert torch.equal(got[known].view(torch.int16), want[known].view(torch.int16))
    assert got[~known].isnan().all()
