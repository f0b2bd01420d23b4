"""fp4.moe for a few tokens by ``csrc/moe/decode_table.cu``: ``torch.ops.fp4_csrc.moe_decode_table``, an internal operator that :mod:`.launch` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.activation import Activation
from .. import csrc
from ..kernel import for_scales
from . import on_csrc

NAME = "moe_decode_table"
TOKENS = 8  # multiplied at a time
OWN_TILES = (0,) * 7


def workspace_bytes(tokens: int, top_k: int, inner: int) -> int:
    """What lies between the two products, for the most tokens at a time and as many distinct experts as they can have."""
    most = min(tokens, TOKENS)
    return most * most * top_k * 512 * -(-inner // 256)


def call(
    hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: tuple[Tensor, Tensor, Tensor], down: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None], expert_map: Tensor | None, metas: tuple[Tensor | None, Tensor | None], act: Activation, arch: int,
) -> Tensor:  # fmt: skip
    """``[T, N]``; two launches for every :data:`TOKENS` tokens.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    inner = down[0].shape[2] * (2 if metas[1] is None else 4)
    workspace = hidden.new_empty(workspace_bytes(expert_ids.shape[0], expert_ids.shape[1], inner), dtype=torch.uint8)
    operator = for_scales(NAME, gate_up[2].numel() // max(gate_up[0].shape[0], 1))
    return on_csrc.call(operator, (hidden, expert_ids, expert_weights, *gate_up, *down, *biases, expert_map, *metas), act, workspace, arch)


on_csrc.define(NAME, sparse=True, own_tile=OWN_TILES)
on_csrc.define(NAME + csrc.SEVERAL_SCALES, sparse=True, own_tile=OWN_TILES)
