"""fp4.moe for a few tokens by ``csrc/moe/decode_table.cu``: ``torch.ops.fp4_csrc.moe_decode_table``, an internal operator that :mod:`.cuda` calls."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import csrc
from . import on_csrc

NAME = "moe_decode_table"
TOKENS = 8  # multiplied at a time
OWN_TILES = (0,) * 7


def workspace_bytes(tokens: int, top_k: int, inner: int) -> int:
    """What lies between the two products, for the most tokens at a time and as many distinct experts as they can have."""
    most = min(tokens, TOKENS)
    return most * most * top_k * 512 * -(-inner // 256)


def launch(call: MoeCall, arch: int) -> Tensor:
    """``[T, N]``; two launches for every :data:`TOKENS` tokens. ``call``: dense in memory, as :func:`.cuda.dense` makes it.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    tokens, top_k = call.expert_ids.shape
    workspace = call.hidden.new_empty(workspace_bytes(tokens, top_k, call.inner), dtype=torch.uint8)
    return on_csrc.launch(NAME, call, workspace, arch)


on_csrc.define(NAME, sparse=True, own_tile=OWN_TILES)
on_csrc.define(NAME + csrc.SEVERAL_SCALES, sparse=True, own_tile=OWN_TILES)
