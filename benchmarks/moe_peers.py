"""Other libraries' MoE layers on NVFP4 experts, from the canonical parts of a layer, if they can be imported.

Written against humming-kernels 0.1.19 and **not run yet**: no GPU was at hand. humming has the two products; what it leaves to
its caller is done here in its favour: the padded routing table is made before the timing starts, the activation and the weighted sum
are PyTorch operators.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

Parts = tuple[Tensor, ...]  # qdata, scale, global_scale of gate_up, then of down
Call = Callable[[], Tensor]


class Humming:
    """Two ``HummingLayer`` with experts, indexed GEMM; ``act``: ``[pairs, G] -> [pairs, I]``."""

    def __init__(self, parts: Parts, biases: tuple[Tensor | None, ...], act: Callable[[Tensor], Tensor]):
        self.act = act
        self.first, self.down = (self._layer(parts[3 * i : 3 * i + 3], biases[i]) for i in range(2))

    @staticmethod
    def _layer(weight: Parts, bias: Tensor | None) -> nn.Module:
        from humming.layer import HummingLayer

        q, s, g = weight
        layer = HummingLayer(
            shape_n=q.shape[1], shape_k=q.shape[2] * 2, num_experts=q.shape[0], has_bias=bias is not None, torch_dtype=torch.bfloat16,
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        ).to(q.device)  # fmt: skip
        layer.load_from_tensors({"weight": q, "weight_scale": s, "weight_scale_2": g} | ({} if bias is None else {"bias": bias}))
        layer.transform()
        return layer

    def prepare(self, x: Tensor, ids: Tensor, weights: Tensor) -> Call:
        """The layer on these tokens, ready to be timed."""
        first = self._product(self.first, ids, ids.shape[1])
        down = self._product(self.down, ids, 1)

        def call() -> Tensor:
            y = down(self.act(first(x)))
            return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

        return call

    @staticmethod
    def _product(layer: nn.Module, ids: Tensor, top_k: int) -> Callable[[Tensor], Tensor]:
        """``top_k``: pairs that share a row of the input."""
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        config = get_heuristics_config(layer.humming_config, shape_m=ids.numel(), gemm_type="indexed", device=ids.device)
        _, _, sorted_ids, experts, padded = generate_moe_tensors(ids.int(), layer.num_experts, "indexed", config["block_shape"][0])
        routing = {"sorted_ids": sorted_ids, "expert_ids": experts, "num_tokens_padded": padded}
        return lambda x: layer(x, **routing, top_k=top_k, compute_config={"gemm_type": "indexed"}, tuning_config=config)


PEERS = {"humming": Humming}


def available(device: str) -> tuple[dict[str, type[Humming]], dict[str, str]]:
    """``({peer: how to build it}, {peer: why it is left out})``; each is tried on a small layer."""
    usable, missing = {}, {}
    for name, build in PEERS.items():
        if device != "cuda":
            missing[name] = "needs a GPU"
            continue
        if importlib.util.find_spec(name) is None:
            missing[name] = f"{name} is not installed"
            continue
        try:
            q = torch.randint(0, 256, (4, 256, 128), dtype=torch.uint8, device=device)
            s = torch.ones(4, 256, 16, device=device).to(torch.float8_e4m3fn)
            g = torch.full((4,), 0.37, device=device)
            peer = build((q, s, g, q[..., :64].contiguous(), s[..., :8].contiguous(), g), (None, None), lambda z: z[:, :128])
            ids = torch.tensor([[0, 3], [1, 2]], device=device)
            peer.prepare(torch.randn(2, 256, device=device, dtype=torch.bfloat16), ids, torch.ones(2, 2, device=device))()
            usable[name] = build
        except Exception as error:  # whatever another library raises
            missing[name] = f"{type(error).__name__}: {str(error)[:120]}"
    return usable, missing
