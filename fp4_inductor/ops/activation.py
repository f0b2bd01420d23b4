"""Activations: their numbers in kernels, and what an expert does between its two products, the activation descriptor of ``fp4.moe``.

With a gate, the first product has 2 * I outputs: ``gate`` and ``up``, one half each, or every other one (``interleaved``):

    gate = min(gate, limit);  up = clamp(up, -limit, limit);  h = act(gate) * up        ("swiglu_oai": act(gate) * (up + 1))

Without a gate it has I outputs and ``h = act(min(z, limit))``. Sources: Shazeer, "GLU Variants Improve Transformer" (2020);
gpt-oss's reference implementation (alpha 1.702, limit 7, up + 1); Primer (relu squared).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError


class ActivationCode(enum.IntEnum):
    """The number by which a kernel knows an activation of ``fp4.linear_glu`` or ``fp4.linear_epilogue``; its name there in lower case.

    ``csrc/common/activations.cuh`` is written from this class (``make activations``), so that CUDA and Python cannot disagree. The Triton
    function ``activate`` in ``kernels/linear_glu/triton_gemv_glu.py`` has the same numbers. A number never changes: generated code holds it.
    """

    NONE = 0  # z
    SILU = 1  # z * sigmoid(z)
    GELU = 2  # 0.5 z (1 + erf(z / sqrt 2))
    GELU_TANH = 3  # 0.5 z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3)))
    RELU = 4  # max(z, 0)


_CODES = {"" if code is ActivationCode.NONE else code.name.lower(): int(code) for code in ActivationCode}


def activation_code(name: str) -> int:
    """The number of ``name``, ``""`` being none. A plain int: generated code prints it.

    Raises:
        ConfigError: no kernel has this activation in its epilogue.
    """
    if name not in _CODES:
        raise ConfigError(
            "no kernel applies this activation to its sums", value=repr(name), limit=list(_CODES), remedy="Call fp4.linear and apply it yourself."
        )
    return _CODES[name]


# name -> (needs a gate, uses alpha)
ACTIVATIONS = {
    "silu": (False, True),  # z * sigmoid(alpha * z)
    "gelu": (False, False),  # 0.5 z (1 + erf(z / sqrt 2))
    "gelu_tanh": (False, False),
    "relu": (False, False),
    "relu2": (False, False),  # max(z, 0) ** 2
    "swiglu_oai": (True, True),  # silu(gate) * (up + 1)
}


@dataclass(frozen=True)
class Activation:
    """One expert nonlinearity.

    Args:
        name: one of :data:`ACTIVATIONS`.
        alpha: slope of the sigmoid in ``"silu"`` and ``"swiglu_oai"``; 1 elsewhere.
        limit: clamp of gate (from above) and up (both sides) before the nonlinearity, > 0; None: no clamp.
        interleaved: outputs of the first product are gate, up, gate, up, ... instead of all gates, then all ups.

    Raises:
        ConfigError: an unknown name, or a number without meaning.
    """

    name: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ConfigError("fp4.moe: unknown activation", value=repr(self.name), limit=list(ACTIVATIONS), remedy="See ops/activation.py for their formulas.")
        if not math.isfinite(self.alpha) or (self.alpha != 1.0 and not ACTIVATIONS[self.name][1]):
            takes = [name for name, (_, alpha) in ACTIVATIONS.items() if alpha]
            raise ConfigError(f'fp4.moe: alpha of "{self.name}"', value=self.alpha, limit=f"1.0, or any finite number with {takes}", remedy="Leave alpha out.")
        if self.limit is not None and not self.limit > 0:
            raise ConfigError("fp4.moe: limit of the activation", value=self.limit, limit="> 0, or None", remedy="None does not clamp.")

    @property
    def needs_gate(self) -> bool:
        return ACTIVATIONS[self.name][0]

    def arguments(self) -> tuple[str, float, float | None, bool]:
        """The four arguments of ``fp4.moe`` from ``activation`` on."""
        return self.name, self.alpha, self.limit, self.interleaved

    def __call__(self, z: Tensor, inner: int) -> Tensor:
        """``[..., 2 * inner or inner]`` -> ``[..., inner]``, in the dtype of ``z``."""
        gate, up = self._halves(z, inner)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = None if up is None else up.clamp(-self.limit, self.limit)
        h = self._act(gate)
        if up is None:
            return h
        return h * (up + 1) if self.name == "swiglu_oai" else h * up

    def gradient(self, z: Tensor, inner: int, grad: Tensor) -> Tensor:
        """The gradient of ``z`` from that of the result, ``[..., inner]``."""
        raw_gate, raw_up = self._halves(z, inner)
        gate = raw_gate if self.limit is None else raw_gate.clamp(max=self.limit)
        up = raw_up if self.limit is None or raw_up is None else raw_up.clamp(-self.limit, self.limit)
        factor: Tensor | float = 1.0 if up is None else up + 1 if self.name == "swiglu_oai" else up
        grad_gate = grad * factor * self._slope(gate)
        if self.limit is not None:
            grad_gate = torch.where(raw_gate <= self.limit, grad_gate, 0.0)
        if raw_up is None:
            return grad_gate
        grad_up = grad * self._act(gate)
        if self.limit is not None:
            grad_up = torch.where(raw_up.abs() <= self.limit, grad_up, 0.0)
        return torch.stack((grad_gate, grad_up), -1).flatten(-2) if self.interleaved else torch.cat((grad_gate, grad_up), -1)

    def _halves(self, z: Tensor, inner: int) -> tuple[Tensor, Tensor | None]:
        if z.shape[-1] == inner:
            return z, None
        return (z[..., 0::2], z[..., 1::2]) if self.interleaved else (z[..., :inner], z[..., inner:])

    def _slope(self, z: Tensor) -> Tensor:
        if self.name in ("gelu", "gelu_tanh"):
            return torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate="tanh" if self.name == "gelu_tanh" else "none")
        if self.name == "relu":
            return (z > 0).to(z.dtype)
        if self.name == "relu2":
            return 2 * z.relu()
        s = torch.sigmoid(self.alpha * z)
        return s * (1 + self.alpha * z * (1 - s))

    def _act(self, z: Tensor) -> Tensor:
        if self.name == "gelu":
            return F.gelu(z)
        if self.name == "gelu_tanh":
            return F.gelu(z, approximate="tanh")
        if self.name == "relu":
            return z.relu()
        if self.name == "relu2":
            return z.relu().square()
        return F.silu(z) if self.alpha == 1.0 else z * torch.sigmoid(z * self.alpha)
