"""fp4.moe for a few tokens by ``csrc/moe/decode_table.cu``: ``torch.ops.fp4_csrc.moe_decode_table``, an internal operator that :mod:`.cuda` calls."""

from __future__ import annotations

from torch import Tensor

from ...ops.moe_call import MoeCall
from .. import host
from ..forms import Launches, Library
from ..kernel import BF16, MEASURED, Kernel, On

NAME = "moe_decode_table"


def launch(call: MoeCall, arch: int) -> Tensor:
    """``[T, N]``; two launches for every eight tokens. ``call``: dense in memory, as :func:`.cuda.dense` makes it.

    Raises:
        KernelError: the kernel is not built, or the launch was refused.
    """
    from . import on_csrc

    return on_csrc.launch(NAME, call, arch)


_TABLE = (
    "reads and decodes an expert once for eight tokens, by cuda_table's steps; pays from 8 million weights, H * N, on: Mixtral, 4 "
    "tokens, 139 us, Triton 195; Qwen3-30B, 4 tokens, 32 for 27"
)
_SPARSE_TABLE = (
    "reads and decodes an expert once for eight tokens, by cuda_sparse_table's steps: Mixtral, both products 2:4, 1 and 4 tokens, 52 "
    "and 124 us, 0.92 and 0.90 of the dense layer's"
)


def table(call: MoeCall) -> Tensor:
    """``[T, N]`` of ``call``, dense in memory."""
    return launch(call, host.arch(call.hidden.device))


def _kernel(op: str, name: str, why: str, k_multiple: int) -> Kernel:
    batch = (1, "the tiles follow the number of tokens, and experts are summed in the order in which the tokens of a call name them")
    form = Launches("moe.decode_table:table", LIBRARY)
    on = (On(90, 90, MEASURED, why),)
    return Kernel(op, name, "table", on, BF16, k_multiple=k_multiple, n_multiple=8, least_n=32, plain=True, batch=batch, form=form)


LIBRARY = Library("moe/decode_table.cu", finish=None, apart=True, metas=True)
KERNELS = (_kernel("moe", "cuda_moe_table", _TABLE, 64), _kernel("sparse_moe", "cuda_sparse_moe_table", _SPARSE_TABLE, 256))
