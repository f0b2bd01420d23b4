"""triton_moe_decode: a few tokens, two launches, nothing sorted. Dense or 2:4-sparse experts. Source: :mod:`.triton_decode`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import forms, host
from ..forms import Launches
from ..kernel import COMPILED, MEASURED, Kernel, On
from .routing import activation, ids_and_map, parts


@dataclass(frozen=True)
class DecodeConfig:
    """``block_n`` outputs a program, K in steps of ``block_k``.

    ``groups`` lie side by side, in other warps once a group fills one: of the rows in the first kernel, of one expert each in the second.
    """

    block_n: int
    block_k: int
    groups: int = 1

    @property
    def num_warps(self) -> int:
        """A thread holds 32 k of a step. On a GPU ``groups * block_k`` is at least 1024: a lane for each thread of a warp."""
        return max(1, self.groups * self.block_k // 1024)


def _power(k: int, most: int) -> int:
    """The smallest power of two from ``k`` on, between 128 and ``most``."""
    return min(max(128, 1 << (k - 1).bit_length()), most)


def up_tile(k: int, tokens: int) -> DecodeConfig:
    """Of the first kernel, for a product over ``k``. ``block_n``: whole scale blocks of its result.

    More rows a warp share its conversion of activations, fewer keep more warps busy: one token takes the fewest.
    """
    if k % 2048 == 0 and k >= 4096:
        return DecodeConfig(16, 2048, 2)
    if tokens == 1:
        block_n, width, groups = (16, 1024, 8) if k % 1024 == 0 else (16, 512, 4)
    else:
        block_n, width, groups = 32 if k <= 2048 else 16, 1024, 4
    return DecodeConfig(block_n, max(_power(k, width), 1024 // groups), groups)


def down_tile(k: int, top_k: int, tokens: int) -> DecodeConfig:
    """Of the second kernel, for ``top_k`` products over ``k``.

    One or two tokens: all experts at once, in as many warps as that takes, up to 8. More tokens: no more than an eighth of the lanes idle.
    """
    width = 2048 if k % 2048 == 0 else _power(k, 1024)
    if tokens <= 2:
        groups = min(1 << (top_k - 1).bit_length(), 8 * 1024 // width, 16)
    else:
        while width > 128 and -(-k // width) * width > 1.125 * k:
            width //= 2
        groups = min(1 << (top_k.bit_length() - 1), 8 * 1024 // width, 16)
        while -(-top_k // groups) * groups > 1.125 * top_k:
            groups //= 2
    return DecodeConfig(4, max(width, 1024 // groups), groups)


@functools.cache
def lanes_first() -> bool:
    """Whether Triton deals the first of several equal dimensions of a load out to threads first: seen with 3.6; 3.9 begins with the last."""
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def constants_of(c: DecodeConfig, n: int, k: int, arch: int, sparse: bool = False) -> dict[str, object]:
    """Constexpr arguments of both decode kernels for ``n`` outputs over ``k``."""
    return dict(
        SPARSE=sparse, GROUPS=c.groups, K=k, BLOCK_N=c.block_n, BLOCK_K=c.block_k, UNROLL=-(-k // c.block_k) <= 8, FIRST=lanes_first(), EVEN=n % c.block_n == 0,
        CVT=arch >= 89, ASM=forms.ASM, PDL=arch >= 90,
    )  # fmt: skip


def _launch(c: DecodeConfig, constants: dict[str, object]) -> dict[str, object]:
    return {"num_warps": c.num_warps, **host.launched_early(bool(constants["PDL"]))}


def decode(call: MoeCall, up: DecodeConfig | None = None, down: DecodeConfig | None = None) -> Tensor:
    """A few tokens: two launches; see :mod:`.triton_decode`."""
    down = down or down_tile(call.inner, call.expert_ids.shape[1], call.expert_ids.shape[0])
    return decode_down(call, *decode_up(call, down, up), down)


def decode_up(call: MoeCall, down: DecodeConfig, tile: DecodeConfig | None = None) -> tuple[Tensor, Tensor]:
    """``h`` of every assignment in float16 as the second kernel with tile ``down`` reads it, and float32 factors; nothing for assignments without an expert."""
    from .triton_decode import moe_decode_up

    hidden, device = call.hidden.shape[1], call.hidden.device
    ids, table, table_size = ids_and_map(call)
    sparse, sparse_down = (w.meta is not None for w in (call.gate_up, call.down))
    c = tile or up_tile(hidden, call.hidden.shape[0])
    constants = constants_of(c, call.inner, hidden, host.arch(device), sparse)
    h = torch.empty(call.assignments, -(-call.inner // down.block_k) * down.block_k, dtype=torch.float16, device=device)
    factor = torch.empty(call.assignments, call.inner // 16, dtype=torch.float32, device=device)
    moe_decode_up[(-(-call.inner // c.block_n) * call.assignments,)](
        call.hidden, ids, call.expert_weights, table, *parts(call.gate_up), call.gate_up.bias, h, factor, ids.shape[1], call.assignments,
        call.experts, table_size, h.shape[1], (down.block_k // 32).bit_length() - 1, INNER=call.inner, **activation(call),
        HAS_MAP=table is not None, HAS_BIAS=call.gate_up.bias is not None, SPARSE_DOWN=sparse_down, TWO=call.two_scales, **constants,
        **_launch(c, constants),
    )  # fmt: skip
    return h, factor


def decode_down(call: MoeCall, h: Tensor, factor: Tensor, c: DecodeConfig) -> Tensor:
    """The result from what :func:`decode_up`, the launch before, gave."""
    from .triton_decode import moe_decode_down

    (t, top_k), device = call.expert_ids.shape, call.hidden.device
    ids, table, table_size = ids_and_map(call)
    sparse = call.down.meta is not None
    constants = constants_of(c, call.width, call.inner, host.arch(device), sparse)
    y = torch.empty(t, call.width, dtype=call.hidden.dtype, device=device)
    moe_decode_down[(-(-call.width // c.block_n) * t,)](
        h, factor, ids, call.expert_weights, table, *parts(call.down), call.down.bias, y, t, call.experts, table_size, call.width,
        TOP_K=top_k, ON_INPUT=call.weight_on_input, HAS_MAP=table is not None, HAS_BIAS=call.down.bias is not None, **constants,
        **_launch(c, constants),
    )  # fmt: skip
    return y


_DECODE = (
    "two launches, nothing sorted: 11 us for one token of Qwen3-30B; sorting pays from about 4 pairs an expert on (Mixtral: 396 us at "
    "2, sorted 732; at 4 both 790)"
)
_DECODE_90 = (
    "two launches, nothing sorted: 11 us for one token of Qwen3-30B; ahead of sorting up to 0.6 pairs an expert: 46 us for 8 tokens of it, cuda_moe_wide 53"
)
_SPARSE_DECODE = "the dense layer's two launches on kept codes and gathered activations: 22% fewer bytes, as many instructions"
_SPARSE_DECODE_90 = (
    "the dense layer's two launches on kept codes: 22% fewer bytes, as many instructions; Qwen3-30B, 1 and 4 tokens, 11.5 and 29.8 us, "
    "dense experts 10.8 and 27"
)


def _kernel(op: str, name: str, why_90: str, why: str) -> Kernel:
    on = On(90, 90, MEASURED, why_90), On(80, 89, COMPILED, why), On(100, 129, COMPILED, why)
    return Kernel(op, name, "decode", on, batch=(1, "one token, two, and more are summed in other pieces"), form=Launches("moe.decode:decode"))


KERNELS = (
    _kernel("moe", "triton_moe_decode", _DECODE_90, _DECODE),
    _kernel("sparse_moe", "triton_sparse_moe_decode", _SPARSE_DECODE_90, _SPARSE_DECODE),
)
