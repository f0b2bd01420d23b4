"""What ``prefill="fp8"`` costs on top of the same NVFP4 weights with ``prefill="bf16"``.

On a CPU the path is emulated from the contracts its kernels are held to (``dequantize_fp8``, ``quantize_rows_fp8``: bit-equal
on a GPU), with the product in float32; on a GPU the real one runs.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor
from fp4_inductor import FP4Linear
from fp4_inductor.ops import dequantize_fp8, quantize_rows_fp8

ASSETS = Path(__file__).resolve().parents[2] / "examples" / "assets"
EXTRA_KL, PERPLEXITY_RATIO = 0.03, 1.03
ROWS, LENGTH = 8, 512


class Fp8Emulated(torch.nn.Module):
    """FP4Linear's FP8 path with float32 products: E4M3 weight, activations rounded per token."""

    def __init__(self, layer: FP4Linear):
        super().__init__()
        w8 = dequantize_fp8.reference(layer.qdata, layer.scale)
        self.weight = w8.float() * (layer.global_scale / dequantize_fp8.WEIGHT_FACTOR)
        self.bias = layer.bias

    def forward(self, x):
        x8, scale = quantize_rows_fp8.reference(x.reshape(-1, x.shape[-1]))
        return F.linear(x8.float() * scale, self.weight, self.bias).view(*x.shape[:-1], -1).to(x.dtype)


def _text() -> torch.Tensor:
    data = torch.frombuffer(bytearray((ASSETS / "northanger_abbey_200k.txt").read_bytes()), dtype=torch.uint8).long()
    return torch.stack([data[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(ROWS)])


@torch.no_grad()
def _logprobs(model, rows: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(model(input_ids=rows[:, :-1], use_cache=False).logits.float(), -1)


def _cost(base, model, rows) -> tuple[float, float]:
    """``(KL from the bf16 model, nats per byte)``."""
    p, q = _logprobs(base, rows), _logprobs(model, rows)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    return float(kl), float(F.nll_loss(q.flatten(0, 1), rows[:, 1:].flatten()))


def _load(dtype, device="cpu"):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "austen_dense", dtype=dtype).eval().to(device)


def _within_the_gate(bf16_path: tuple[float, float], fp8_path: tuple[float, float]) -> None:
    extra, ratio = fp8_path[0] - bf16_path[0], float(torch.tensor(fp8_path[1] - bf16_path[1]).exp())
    print(f"KL {bf16_path[0]:.4f} -> {fp8_path[0]:.4f} (extra {extra:.4f}), perplexity x{ratio:.4f}")
    assert extra <= EXTRA_KL
    assert ratio <= PERPLEXITY_RATIO
    assert fp8_path[0] != bf16_path[0], "the FP8 path did not run"


def test_fp8_path_emulated():
    rows, base = _text(), _load(torch.float32)
    exact = fp4_inductor.quantize_model(copy.deepcopy(base), progress=False)
    rounded = copy.deepcopy(exact)
    layers = [(name, m) for name, m in rounded.named_modules() if isinstance(m, FP4Linear)]
    assert len(layers) == 35
    for name, layer in layers:
        rounded.set_submodule(name, Fp8Emulated(layer))
    _within_the_gate(_cost(base, exact, rows), _cost(base, rounded, rows))


@pytest.mark.gpu
def test_fp8_path_on_a_gpu():
    rows, base = _text().cuda(), _load(torch.bfloat16, "cuda")
    paths = []
    for prefill in ("bf16", "fp8"):
        config = fp4_inductor.NVFP4Config(prefill=prefill)
        model = fp4_inductor.quantize_model(copy.deepcopy(base), config, progress=False)
        kernels = {row.kernel for row in fp4_inductor.explain(model, input_ids=rows[:, :-1], use_cache=False).rows}
        assert kernels == ({"cuda_wide_fp8", "dequantize_fp8 + scaled_mm"} if prefill == "fp8" else {"dequantize + mm"})
        paths.append(_cost(base, model, rows))
    _within_the_gate(*paths)
