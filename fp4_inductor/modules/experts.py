"""FP4Experts: what ``quantize_model`` puts in place of a module that holds expert weights as 3-D Parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._renamed import has_old_names
from ..errors import ConfigError, ShapeError
from ..formats import nvfp4
from ..ops import cast_for_autocast
from ..ops.activation import Activation
from ..ops.linear import WEIGHT_ONLY
from ..ops.moe_call import fields_of_parts, flat
from ..tensors.base import FP4Tensor
from .bits import BITS
from .marker import Marked
from .packed import PackedWeight


class FP4ExpertWeight(PackedWeight):
    """One NVFP4 matrix per expert: ``[E, N, K]``, with one global scale each.

    Buffers: ``qdata`` uint8 ``[E, N, K/2]``, ``scale`` float8_e4m3fn ``[E, N, K/16]``, ``global_scale`` float32 ``[E]``,
    ``bias`` ``[E, N]`` or None. Indexing gives the :attr:`TENSOR` of what is indexed: ``w[3]`` is one matrix, ``w[ids]`` and
    ``w[2:5]`` are stacks; none copies more than it selects. A subclass stores the weight in another format.

    Args:
        n, k: as stored: K a multiple of 16, or of what the format asks for.
        rows, columns: how many of N and K are the model's own; the rest is zero padding.
    """

    def __init__(
        self, experts: int, n: int, k: int, *, rows: int | None = None, columns: int | None = None, bias: bool = False,
        dtype: torch.dtype = torch.bfloat16, device: Any = None,
    ):  # fmt: skip
        super().__init__((experts,), n, k, bias, dtype, device)
        self.num_experts, self.rows, self.columns = experts, n if rows is None else rows, k if columns is None else columns

    def _markers(self) -> tuple:
        return ()  # the dense weight is called as this module is: FP4Experts writes it

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, N, K)`` of the model's weight, without padding."""
        return self.num_experts, self.rows, self.columns

    @property
    def stored(self) -> tuple[int, int, int]:
        """``(E, N, K)`` with padding."""
        return self.storage().logical(self.parts()[0].shape)  # type: ignore[return-value]

    @property
    def weight(self) -> FP4Tensor:
        """All experts, ``[E, N, K]`` as stored, as a tensor that shares this module's memory."""
        return self.TENSOR._of_parts(self.parts(), self.dtype, False)

    def put(self, index: int | slice, parts: tuple[Tensor, ...]) -> None:
        """Copy the parts of the experts ``index`` into the buffers."""
        for name, part in zip(self.TENSOR.PARTS, parts, strict=True):
            bits = BITS[part.dtype.itemsize]  # E4M3 has no indexed assignment
            getattr(self, name).view(bits)[index] = part.view(bits)

    def __getitem__(self, index):
        return self.weight[index]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dense ``[E, N, K]`` as stored."""
        return self.weight.dequantize(dtype)

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, bias={self.bias is not None}, {self.storage().name}, dtype={self.dtype}"


@has_old_names
class FP4Experts(Marked):
    """The routed experts of one layer in NVFP4, dense or 2:4-sparse; calls ``fp4.moe``.

    ``forward(hidden_states [..., H], top_k_index [T, k], top_k_weights [T, k]) -> [..., H]``, the call of transformers'
    expert modules; T is the product of the leading dimensions. See :mod:`fp4_inductor.ops.moe` for ids that are no expert.

    Args:
        first, down: the two weights, ``[E, G, H]`` and ``[E, H, I]``, each :class:`FP4ExpertWeight` or a subclass of it.
        activation: what lies between them.
        first_name: attribute of the first weight: ``"gate_up_proj"``, or ``"up_proj"`` in models without a gate.
        dense: the call is ``forward(hidden_states [E * T, H])``, every expert's tokens one after the other (Llama 4), with zero rows
            for tokens it was not chosen for.
        identity: ids from the number of experts on, as many as this, stand for experts that return their input (LongCat-Flash).
        prefill: as in :class:`fp4_inductor.NVFP4Config`.

    Raises:
        ShapeError, ConfigError: the parts do not belong together.
    """

    def __init__(
        self,
        first: FP4ExpertWeight,
        down: FP4ExpertWeight,
        activation: Activation,
        *,
        first_name: str = "gate_up_proj",
        dense: bool = False,
        identity: int = 0,
        prefill: str = "auto",
    ):
        super().__init__()
        if prefill not in WEIGHT_ONLY:
            raise ConfigError("FP4Experts: unknown prefill", value=repr(prefill), limit=list(WEIGHT_ONLY), remedy="NVFP4Config describes them.")
        inner = down.stored[2]
        if first.num_experts != down.num_experts or first.stored[1] not in (inner, 2 * inner):
            raise ShapeError(
                "FP4Experts: the two weights do not belong together",
                value=f"{first.stored}, {down.stored}",
                limit="[E, 2 * I or I, H] and [E, H, I] as stored",
                remedy="Pad the rows of the first weight if K of the second was padded.",
            )
        self.first_name, self.activation, self.dense, self.identity, self.prefill = first_name, activation, dense, identity, prefill
        self.num_experts, self.hidden_dim, self.intermediate_dim = first.num_experts, first.columns, down.columns
        self.add_module(first_name, first)
        self.down_proj = down

    @property
    def first(self) -> FP4ExpertWeight:
        """The weight of the first product."""
        return getattr(self, self.first_name)

    def _markers(self) -> tuple:
        return (self.first_name, self.first), ("down_proj", self.down_proj)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None) -> Tensor:
        x, _ = cast_for_autocast(hidden_states)
        rows = x.reshape(-1, x.shape[-1])
        if self.dense:
            ids, weights = self._routing_of_dense(rows)
        elif top_k_index is None or top_k_weights is None:
            raise ShapeError(
                "FP4Experts takes tokens and their routing", value="no routing", limit="hidden, top_k_index, top_k_weights", remedy="Pass all three."
            )
        else:
            ids, weights = top_k_index, top_k_weights
        returned = None
        if self.identity:
            other = ids >= self.num_experts
            returned = torch.where(other, weights, 0).float().sum(-1, keepdim=True) * rows.float()
            ids = torch.where(other, -1, ids)
        first, down = self.first, self.down_proj
        if (padding := first.stored[2] - first.columns) != 0:
            rows = nn.functional.pad(rows, (0, padding))
        products = fields_of_parts(first.parts(), first.bias), fields_of_parts(down.parts(), down.bias)
        y = torch.ops.fp4.moe.default(*flat((rows, ids, weights), *products, self.activation, prefill=self.prefill))
        y = y if returned is None else (y.float() + returned).to(y.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _routing_of_dense(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Row e * T + t belongs to expert e; a zero row gives zero (there are no biases), so it need not be computed."""
        tokens = rows.shape[0] // self.num_experts
        ids = torch.arange(self.num_experts, device=rows.device).repeat_interleave(tokens)
        ids = torch.where((rows != 0).any(-1), ids, -1).unsqueeze(-1)
        return ids, rows.new_ones(rows.shape[0], 1)

    def extra_repr(self) -> str:
        identity = f", identity={self.identity}" if self.identity else ""
        return f"experts={self.num_experts}, {self.activation}, dense={self.dense}{identity}, prefill={self.prefill}"


def quantize_stack(
    weight: Tensor,
    bias: Tensor | None,
    *,
    transposed: bool = False,
    scale_search: str = "amax",
    channel_weight: Tensor | None = None,
    pad_rows: tuple[int, int] = (1, 0),
    device: torch.device | None = None,
) -> FP4ExpertWeight:
    """Quantize ``weight`` ``[E, N, K]`` (``[E, K, N]`` if ``transposed``), a few experts at a time; the input is not modified.

    Args:
        bias: ``[E, N]`` or None; copied, padded like the rows.
        channel_weight: ``[E, K]`` float32 E[x^2] of each expert's inputs, for ``scale_search="activation"``.
        pad_rows: ``(parts, rows)``: append ``rows`` zero rows to each of ``parts`` equal parts of N (gate and up); (2, r) with
            interleaved gates appends 2 * r at the end as ``(1, 2 * r)``.
        device: quantize and keep there; None: where the weight is.
    """
    experts = weight.shape[0]
    columns, rows = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    k = columns + -columns % nvfp4.GROUP
    parts, extra = pad_rows
    n = rows + parts * extra
    device = weight.device if device is None else device
    out = FP4ExpertWeight(experts, n, k, rows=rows, columns=columns, dtype=weight.dtype, device=device)
    step = 1 if channel_weight is not None else max(1, _AT_ONCE // max(1, n * k))
    for start in range(0, experts, step):
        part = slice(start, min(start + step, experts))
        dense = weight[part].detach().to(device)
        dense = _padded(dense.mT if transposed else dense, parts, extra, k - columns)
        statistic = None if channel_weight is None else nn.functional.pad(channel_weight[start].to(device), (0, k - columns))
        if statistic is None:
            packed = torch.ops.fp4.quantize(dense, scale_search)
        else:
            packed = tuple(p[None] for p in torch.ops.fp4.quantize(dense[0], scale_search, None, statistic))
        out.put(part, packed)
    if bias is not None:
        out.bias = _padded(bias.detach().to(device, weight.dtype).unsqueeze(-1), parts, extra, 0).squeeze(-1).clone()
    return out


_AT_ONCE = 1 << 25  # weights quantized by one call


def _padded(w: Tensor, parts: int, rows: int, columns: int) -> Tensor:
    """Zero rows after each of ``parts`` parts of dimension -2, zero columns at the end."""
    if rows:
        w = torch.cat([nn.functional.pad(p, (0, 0, 0, rows)) for p in w.chunk(parts, -2)], -2)
    return nn.functional.pad(w, (0, columns)) if columns else w.contiguous()
