"""One weight ``[N, K]``, 2:4-sparse or dense, from what is known about its inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ..config import ScaleSearch, Sparse24Config
from ..formats import pruning, sparse24
from ..modules import FP4Linear, Sparse24Linear
from .hessian import Moments

PRUNERS: dict[str, Callable] = {"wanda": pruning.wanda, "sparsegpt": pruning.sparsegpt, "admm": pruning.admm}
SEQUENTIAL = ("sparsegpt", "admm")
_WANDA_ROWS = 128


def sparse_layer(w: Tensor, config: Sparse24Config, moments: Moments | None = None, square: Tensor | None = None) -> FP4Linear:
    """``w`` pruned as ``config`` says, without bias. ``square``: E[x^2] per input channel, where ``moments`` are not needed."""
    square = None if square is None else square.to(w.device)
    if config.pruning in PRUNERS and moments is not None and (hessian := moments.mean()) is not None:
        layer = Sparse24Linear(w.shape[1], w.shape[0], dtype=w.dtype, device="meta", prefill=config.prefill)
        pad = (0, layer.padding)
        wanted = nn.functional.pad(moments.target(w) if config.pruning in SEQUENTIAL else w.float(), pad)
        layer.take(PRUNERS[config.pruning](wanted, nn.functional.pad(hessian.to(w.device), pad + pad), config.search))
        return layer
    mask = None
    if config.pruning != "existing":
        mask = sparse24.mask_of_scores(nn.functional.pad(w.abs(), (0, -w.shape[1] % 4)))[:, : w.shape[1]]
    return Sparse24Linear.from_weight(w, mask=mask, scale_search=_search(config, square), channel_weight=square, prefill=config.prefill)


def dense_layer(w: Tensor, config: Sparse24Config, moments: Moments | None = None, square: Tensor | None = None) -> FP4Linear:
    """``w`` in dense NVFP4. Arguments as for :func:`sparse_layer`."""
    square = None if square is None else square.to(w.device)
    if moments is not None and moments.rows:
        square = moments.mean().diagonal().to(w.device)  # type: ignore[union-attr]
        w = moments.target(w).to(w.dtype)
    return FP4Linear.from_weight(w, scale_search=_search(config, square), channel_weight=square, prefill=config.prefill)


def rows_needed(config: Sparse24Config, k: int) -> int:
    """Rows of calibration below which ``config.pruning`` knows too little about an input of ``k`` channels.

    Fewer rows than channels leave directions of the input about which a solver knows nothing.
    """
    return k if config.pruning in SEQUENTIAL else _WANDA_ROWS


def is_24(w: Tensor) -> bool:
    """Whether ``w [N, K]`` has at most two non-zeros in every four of a row, the last, short group included."""
    return sparse24.is_24(nn.functional.pad(w, (0, -w.shape[1] % 4)))


def _search(config: Sparse24Config, square: Tensor | None) -> ScaleSearch:
    return "mse" if config.search == "activation" and square is None else config.search
