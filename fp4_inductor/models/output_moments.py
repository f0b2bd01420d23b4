"""How an error at one output of a linear layer and an error at another add up: ``G = sum of g^T g`` over the gradients ``g`` at the layer's output.

A layer has as many of these numbers as its output has pairs of channels, and they are wanted of all layers at once, from one backward pass. So of a large model
sketches are kept: ``G @ omega`` for a fixed random ``omega [N, rank]``, and the diagonal. Of 12,288 outputs and rank 256 that is 12 MB and not 600.

Source: Nystroem's approximation of a positive semi-definite matrix, Halko, Martinsson and Tropp, "Finding structure with randomness" (2011), 5.5.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOST = 16384  # outputs: the matrix has 2 GB in float64, and a few of its size are in use at once
_BYTES, _SHARE = 1 << 30, 1 / 8  # of all sketches together: so many, or this share of the model, whichever is more
_LEAST = 1e-7  # of the largest eigenvalue of omega^T G omega: what is below is rounding


def room(model: nn.Module) -> float:
    """Bytes that all sketches of ``model`` may take."""
    return max(_BYTES, _SHARE * sum(p.nbytes for p in model.parameters()))


def rank_of(outputs: Iterable[int], bytes_of_all: float) -> int:
    """The rank of the sketches of layers of so many ``outputs`` each."""
    return max(1, int(bytes_of_all / (4 * max(sum(outputs), 1))))


def omega_of(outputs: int, rank: int, device: torch.device) -> Tensor | None:
    """float32 ``[outputs, rank]``, the same for all layers of so many ``outputs``; None: they have no more than ``rank``, and need no sketch."""
    return torch.randn(outputs, rank, generator=torch.Generator().manual_seed(outputs)).to(device) if outputs > rank else None


class OutputMoments:
    """Of one layer of ``outputs`` channels; the matrix itself if ``omega`` is None."""

    def __init__(self, outputs: int, omega: Tensor | None, device: torch.device):
        self.omega = omega
        self.seen = torch.zeros(outputs, outputs if omega is None else omega.shape[1], device=device)
        self.diagonal = torch.zeros(outputs, device=device)

    def add(self, g: Tensor) -> None:
        """``g``: ``[rows, N]`` float32, gradients of one call."""
        self.seen += g.T @ (g if self.omega is None else g @ self.omega)
        self.diagonal += g.square().sum(0)

    def to_host(self) -> None:
        """What was added up leaves the device: all layers' together may have an eighth of the model's size, and are wanted one by one."""
        self.seen, self.diagonal = self.seen.cpu(), self.diagonal.cpu()

    def matrix(self, device: torch.device) -> Tensor:
        """float64 ``[N, N]`` on ``device``, symmetric, positive semi-definite: ``G``, or a matrix of the sketch's rank with its diagonal."""
        seen = self.seen.to(device).double()
        if self.omega is None:
            return (seen + seen.T) / 2
        core = self.omega.to(device).double().T @ seen
        values, vectors = torch.linalg.eigh((core + core.T) / 2)
        kept = values > values[-1] * _LEAST
        half = seen @ (vectors[:, kept] / values[kept].sqrt())
        found = half @ half.T
        found.diagonal().copy_(torch.maximum(found.diagonal(), self.diagonal.to(device).double()))
        return found
