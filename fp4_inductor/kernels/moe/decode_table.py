"""fp4.moe for a few tokens by ``csrc/moe/decode_table.cu``: ``torch.ops.fp4_csrc.moe_decode_table``, an internal operator that :mod:`.cuda` calls."""

from __future__ import annotations

from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import csrc
from . import on_csrc

NAME = "moe_decode_table"


def launch(call: MoeCall, arch: int) -> Tensor:
    """``[T, N]``; two launches for every eight tokens. ``call``: dense in memory, as :func:`.cuda.dense` makes it.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    return on_csrc.launch(NAME, call, arch)


on_csrc.define(NAME, sparse=True, tile=False)
on_csrc.define(NAME + csrc.SEVERAL_SCALES, sparse=True, tile=False)
