"""One weight ``[N, K]``, 2:4-sparse or dense, from what is known about its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from ..config import ScaleSearch
from ..formats import pruning, sparse24
from ..formats.gptq import Outputs
from ..kernels.quantize import gptq
from ..modules import FP4Linear, Sparse24Linear
from .hessian import Moments

PRUNERS: dict[str, Callable] = {"wanda": pruning.wanda, "sparsegpt": pruning.sparsegpt, "admm": pruning.admm}
SEQUENTIAL = ("sparsegpt", "admm")
ENOUGH = 256  # tokens below which "gptq" does not use a Hessian, which then says less than its diagonal
_WANDA_ROWS = 128


class Method(Protocol):
    """How weights are made: a :class:`Sparse24Config`, or :class:`Dense`."""

    @property
    def pruning(self) -> str: ...
    @property
    def search(self) -> ScaleSearch: ...
    @property
    def prefill(self) -> str: ...


@dataclass(frozen=True)
class Dense:
    """Dense NVFP4."""

    search: ScaleSearch
    prefill: str
    pruning: str = "none"


def needs_inputs(config: Method) -> bool:
    """Whether more than E[x^2] has to be known about the inputs of a weight."""
    return config.pruning in PRUNERS or config.search == "gptq"


def sparse_layer(w: Tensor, config: Method, moments: Moments | None = None, square: Tensor | None = None) -> FP4Linear:
    """``w`` pruned as ``config`` says, without bias. ``square``: E[x^2] per input channel, where ``moments`` are not needed."""
    square = None if square is None else square.to(w.device)
    hessian = None if moments is None else moments.mean()
    rounds = _rounds(config, moments)
    if hessian is None or not (config.pruning in PRUNERS or rounds):
        mask = None
        if config.pruning != "existing":
            mask = sparse24.mask_of_scores(nn.functional.pad(w.abs(), (0, -w.shape[1] % 4)))[:, : w.shape[1]]
        return Sparse24Linear.from_weight(w, mask=mask, scale_search=_search(config, square), channel_weight=square, prefill=config.prefill)
    layer = Sparse24Linear(w.shape[1], w.shape[0], dtype=w.dtype, device="meta", prefill=config.prefill)
    wanted = moments.target(w) if moments and config.pruning in SEQUENTIAL else w.float()
    wanted, hessian = _padded(wanted, hessian.to(w.device), layer.padding)
    if config.pruning in PRUNERS:
        parts = PRUNERS[config.pruning](wanted, hessian, _search(config, hessian.diagonal()))
    else:
        mask = sparse24.existing_mask(wanted) if config.pruning == "existing" else sparse24.mask_of_scores(wanted.abs())
        parts = sparse24.quantize_sparse24(wanted, mask, "activation", None, hessian.diagonal())
    layer.take(gptq.quantize_sparse24(wanted, hessian, parts) if rounds else parts)
    return layer


def dense_layer(
    w: Tensor,
    config: Method,
    moments: Moments | None = None,
    square: Tensor | None = None,
    global_scale: Tensor | None = None,
    outputs: Outputs | None = None,
) -> FP4Linear:
    """``w`` in dense NVFP4. Arguments as for :func:`sparse_layer`; ``global_scale``: one that it shares with others; ``outputs``: as "gptq" takes it."""
    square = None if square is None else square.to(w.device)
    global_scale = None if global_scale is None else global_scale.to(w.device)
    if moments is not None and (hessian := moments.mean()) is not None:
        w = moments.target(w).to(w.dtype)
        if _rounds(config, moments):
            layer = FP4Linear(w.shape[1], w.shape[0], dtype=w.dtype, device="meta", prefill=config.prefill)
            layer.take(gptq.quantize(*_padded(w, hessian.to(w.device), layer.padding), global_scale, outputs))
            return layer
        if square is None or config.search != "gptq":
            square = hessian.diagonal().to(w.device)
    return FP4Linear.from_weight(w, scale_search=_search(config, square), channel_weight=square, global_scale=global_scale, prefill=config.prefill)


def _padded(w: Tensor, hessian: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """``w [N, K]`` and ``hessian [K, K]`` with so many channels of zeros behind theirs; the same tensors if there are none, where ``pad`` would copy them."""
    if not padding:
        return w, hessian
    return nn.functional.pad(w, (0, padding)), nn.functional.pad(hessian, (0, padding, 0, padding))


def _rounds(config: Method, moments: Moments | None) -> bool:
    """Whether "gptq" is asked for and has enough to work with."""
    return config.search == "gptq" and moments is not None and moments.rows >= ENOUGH


def rows_needed(config: Method, k: int) -> int:
    """Rows of calibration below which ``config.pruning`` knows too little about an input of ``k`` channels.

    Fewer rows than channels leave directions of the input about which a solver knows nothing.
    """
    return k if config.pruning in SEQUENTIAL else _WANDA_ROWS


def is_24(w: Tensor) -> bool:
    """Whether ``w [N, K]`` has at most two non-zeros in every four of a row, the last, short group included."""
    return sparse24.is_24(nn.functional.pad(w, (0, -w.shape[1] % 4)))


def _search(config: Method, square: Tensor | None) -> ScaleSearch:
    """The sweep over scales by itself: "activation" in place of "gptq" where that has too little to work with."""
    if config.search in ("activation", "gptq"):
        return "mse" if square is None else "activation"
    return config.search
