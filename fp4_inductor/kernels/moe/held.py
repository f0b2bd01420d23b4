"""Experts whose weights stay where they are. What a call of ``fp4.moe`` would find out about them again is found out once.

For engines, which trace no such call and want no gradient. A prompt of 2,048 tokens of Qwen3-30B-A3B in vLLM waits for the host, not for the GPU: 57.3 ms with
the ops of experts and router, 45.6 by this and by :func:`.router.launch.serve` (``benchmarks/results/serve.csv``, H200, two runs).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops import moe as contract
from ...ops.activation import Activation
from ...ops.moe_call import ExpertWeight, MoeCall
from . import by_expert, cuda


class HeldExperts:
    """Calls of ``fp4.moe`` with the same weights.

    Args:
        gate_up, down: as of ``fp4.moe``. They may be written, and not be moved.
        activation: what lies between the two products.
        on_input: the weights of the routing are those of the inputs, not of the results.
        prefill: as of ``fp4.moe``.
    """

    def __init__(self, gate_up: ExpertWeight, down: ExpertWeight, activation: Activation, on_input: bool, prefill: str):
        self.gate_up, self.down, self.activation, self.on_input, self.prefill = gate_up, down, activation, on_input, prefill
        self.asked = cuda.asked_by(gate_up, down, activation, on_input) if gate_up.qdata.is_cuda else None
        self._checked: set[tuple[Any, ...]] = set()

    def __call__(self, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor, expert_map: Tensor | None = None) -> Tensor:
        """``[T, N]`` of ``hidden [T, H]`` and its routing ``[T, k]``.

        Raises:
            ShapeError, DTypeError, DeviceError: as ``fp4.moe``, at the first call of its kind.
        """
        call = MoeCall(hidden, expert_ids, expert_weights, self.gate_up, self.down, self.activation, self.on_input, expert_map, self.prefill)
        tokens, k = expert_ids.shape
        kind = hidden.dtype, hidden.shape[1:], expert_ids.dtype, k, expert_weights.dtype, hidden.device, expert_map is None
        if kind not in self._checked or hidden.shape[0] != tokens or expert_weights.shape != expert_ids.shape:
            contract.check(call)
            self._checked.add(kind)
        return by_expert.moe(call) if self.asked is None else cuda.serve(call, self.asked)
