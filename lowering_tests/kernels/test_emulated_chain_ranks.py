"""csrc/gemm/linear_chain.cu on a CPU (emulator.py): products whose results are summed over the ranks of a group. The other rank's parts are in memory ahead."""

from __future__ import annotations

import ctypes
import itertools
import re

import pytest
import torch
from torch import Tensor

from fp4_inductor import _exchange
from fp4_inductor._sources import csrc_dir
from lowering_tests.kernels import emulator
from lowering_tests.kernels.emulator import EmulatorError, emulated
from lowering_tests.kernels.test_emulated_chain import CHAIN, GLU, POINTWISE, Product, layer, run
from lowering_tests.kernels.test_emulated_epilogue import distance, small_weight, z
from lowering_tests.kernels.test_emulated_gemv import normalised
from lowering_tests.kernels.test_emulated_linear import BF16, FP16

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="g++ is not installed: the CUDA sources are emulated where it is")
TOLERANCE = {BF16: 6e-3, FP16: 1e-3}


class Memory:
    """Of both ranks, on the emulated device. ``launches`` came before, of which the last one left numbers behind."""

    def __init__(self, rank: int, launches: int = 0):
        self.rank, self.set = rank, launches % _exchange.SETS
        self.ranks = [torch.zeros(_exchange.size(2), dtype=torch.uint8) for _ in range(2)]
        self.ranks[rank][: _exchange.BLOCKS * 4].view(torch.int32).fill_(self.set)
        self.rows(rank)[self.set - 1] = 7.0
        self.places: list[ctypes.c_void_p] = []

    def rows(self, of: int, dtype: torch.dtype = BF16) -> Tensor:
        """``[set, sum, rank that wrote it, element]``."""
        return self.ranks[of][_exchange.BLOCKS * 4 :].view(dtype).view(_exchange.SETS, _exchange.SUMS, 2, _exchange.ROW)

    def fields(self) -> dict[str, object]:
        self.places = [emulated(CHAIN, 90).put(t) for t in self.ranks]
        return dict(ranks=2, rank=self.rank, memory=[*(place.value for place in self.places), *([None] * 6)])

    def fetch(self) -> None:
        for t, place in zip(self.ranks, self.places, strict=True):
            ctypes.memmove(t.data_ptr(), place, t.nbytes)


def launch(x: Tensor, products: list[Product], memory: Memory, summed: tuple[int, ...], seed: int = 0, options: dict | None = None) -> list[Tensor]:
    """The results; ``memory`` as it is left."""
    given = memory.fields() | dict(summed=[int(i in summed) for i in range(4)]) | (options or {})
    return run(x, products, seed=seed, after=memory.fetch, **given).results


def part_of(row: Tensor, p: Product) -> Tensor:
    """Of a product alone, in float64."""
    q, s, g = p.w
    begins = (0, *p.starts, q.shape[0])
    rows = [slice(*of) for of in itertools.pairwise(begins)]
    return torch.cat([z(row, (q[of], s[of], g[i] if g.dim() else g), None if p.bias is None else p.bias[of]) for i, of in enumerate(rows)], 1)


@pytest.mark.parametrize(("rank", "dtype", "launches"), [(0, BF16, 0), (1, FP16, 1), (1, BF16, 2)], ids=str)
def test_a_layer(rank, dtype, launches):
    """o and down are summed with the other rank's parts; this rank's are in the memory of both; the rows of the launch before are zeros."""
    x, products = layer(192, 320, dtype)
    q, s, g = products[0].w
    q = q.clone()
    q[5] = 0  # a part that is 0
    products[0].w = (q, s, g)
    memory = Memory(rank, launches)
    theirs = [torch.randn(1, 192).to(dtype) for _ in range(2)]
    for i, part in enumerate(theirs):
        memory.rows(rank, dtype)[memory.set, i, 1 - rank, :192] = torch.where(part == 0, -0.0, part)
    results = launch(x, products, memory, (0, 2), seed=launches)
    row, residual = x, products[0].residual
    for i, p in enumerate(products):
        row = row if p.norm[0] is None else normalised(row, *p.norm)
        if p.finish == GLU:
            gate, up = part_of(row, p).chunk(2, 1)
            want = torch.nn.functional.silu(gate) * up
        elif i in (0, 2):
            mine = part_of(row, p)
            want = mine + theirs[i // 2].double() + residual.double()
            for of in range(2):
                assert distance(memory.rows(of, dtype)[memory.set, i // 2, rank, None, :192], mine) < TOLERANCE[dtype]
            residual = results[0]
        else:
            want = part_of(row, p)
        assert distance(results[i], want) < TOLERANCE[dtype]
        row = results[i]
    zero = memory.rows(1 - rank, dtype)[memory.set, 0, rank, 5]
    assert zero == 0 and zero.signbit(), "0 is not there yet, -0 is"
    words = memory.ranks[rank][: _exchange.BLOCKS * 4].view(torch.int32).unique_consecutive().tolist()
    assert words == [(memory.set + 1) % _exchange.SETS, memory.set], "of the blocks that there are"
    assert not memory.rows(rank)[memory.set - 1].any()
    assert not memory.rows(1 - rank)[:, :, 1 - rank].any() and not memory.rows(1 - rank)[memory.set - 1].any()


def test_a_chain_that_ends_with_a_sum():
    """And one that begins with other products; the last result is the sum."""
    _, products = layer(192, 320, BF16)
    memory, theirs = Memory(0), torch.randn(1, 192).to(BF16) + 3
    memory.rows(0)[0, 0, 1, :192] = theirs
    down = products[2]
    down.residual = torch.randn(1, 192).to(BF16)
    row = torch.randn(1, 192).to(BF16)
    products[1].norm = (torch.ones(192, dtype=BF16), 1e-6, 0.0)
    results = launch(row, products[1:3], memory, (1,))
    want = part_of(results[0], down) + theirs.double() + down.residual.double()
    assert distance(results[1], want) < TOLERANCE[BF16]


def test_it_waits_for_the_other_rank():
    x, products = layer(64, 128, BF16)
    with pytest.raises(EmulatorError, match="deadlock"):
        launch(x, products, Memory(0), (0, 2))


def test_rows_that_are_left():
    """The launch after the next would read them."""
    x, products = layer(64, 128, BF16)
    memory = Memory(0)
    memory.rows(0)[0, :, 1, :64] = 1.0
    with emulated(CHAIN, 90).fault("LEAVE_OLD_ROWS"):
        launch(x, products, memory, (0, 2))
    assert memory.rows(0)[2].any()


def test_what_is_refused():
    x, products = layer(64, 128, BF16)
    products[2].w, products[2].finish = small_weight(64, 128), POINTWISE
    refused = [((1,), {}), ((0, 2), dict(ranks=9)), ((0, 2), dict(rank=2)), ((0, 2), dict(rank=-1)), ((0, 2), dict(memory=[None] * 8)), ((2, 3), {})]
    for summed, given in refused:
        memory = Memory(0)
        memory.rows(0)[0, :, 1, :64] = 1.0
        with pytest.raises(EmulatorError, match="status 1$"):
            launch(x, products, memory, summed, options=given)


def test_sizes_are_those_of_the_source():
    source = (csrc_dir() / "common" / "exchange.cuh").read_text()
    names = ("kMostRanks", "kExchangeSums", "kExchangeRow", "kExchangeSets", "kExchangeBlocks")
    found = tuple(int(re.search(rf"{name} = (\d+)", source)[1]) for name in names)
    assert found == (_exchange.MOST_RANKS, _exchange.SUMS, _exchange.ROW, _exchange.SETS, _exchange.BLOCKS)
