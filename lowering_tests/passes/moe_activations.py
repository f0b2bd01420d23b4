"""What an expert may compute between its products: every formula of fp4.moe in several spellings, and formulas it does not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from moe_layers import I, swiglu


def _gelu_erf_in_float(z):
    gate, up = z.float().chunk(2, -1)
    return (0.5 * gate * (1 + torch.erf(gate * 0.5**0.5)) * up).to(z.dtype)


def _gpt_oss(z):
    gate, up = z[..., ::2].clamp(max=7.0), z[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def _minimax_m3(z):
    gate, up = z.chunk(2, -1)
    return (up.clamp(-7.0, 7.0) + 1.0) * (gate.clamp(max=7.0) * torch.sigmoid(gate.clamp(max=7.0) * 1.702))


def _clamped_silu(z):
    gate, up = z.chunk(2, -1)
    return F.silu(gate.clamp(max=0.5)) * up.clamp(min=-0.5, max=0.5)


def _by_where(z):
    gate, up = z.chunk(2, -1)
    return torch.where(gate > 0, gate, 0.0) * up


def _act(act):
    return lambda z: act(z.chunk(2, -1)[0]) * z.chunk(2, -1)[1]


# name -> (function of the first product's output, with a gate, arguments of fp4.moe)
ACTIVATIONS = {
    "silu": (_act(F.silu), True, ("silu", 1.0, None, False)),
    "x * sigmoid(x)": (_act(lambda g: g * torch.sigmoid(g)), True, ("silu", 1.0, None, False)),
    "x / (1 + exp(-x))": (_act(lambda g: g / (1 + torch.exp(-g))), True, ("silu", 1.0, None, False)),
    "by tanh": (_act(lambda g: 0.5 * g * (1 + torch.tanh(0.5 * g))), True, ("silu", 1.0, None, False)),
    "quick_gelu": (_act(lambda g: g * torch.sigmoid(1.702 * g)), True, ("silu", 1.702, None, False)),
    "gelu": (_act(F.gelu), True, ("gelu", 1.0, None, False)),
    "gelu by erf, in float32": (_gelu_erf_in_float, True, ("gelu", 1.0, None, False)),
    "gelu_tanh": (_act(lambda g: F.gelu(g, approximate="tanh")), True, ("gelu_tanh", 1.0, None, False)),
    "relu by where": (_by_where, True, ("relu", 1.0, None, False)),
    "relu2, no gate": (lambda z: F.relu(z).square(), False, ("relu2", 1.0, None, False)),
    "relu2 by clamp, no gate": (lambda z: z.clamp(min=0) ** 2, False, ("relu2", 1.0, None, False)),
    "silu, no gate": (F.silu, False, ("silu", 1.0, None, False)),
    "gpt-oss": (_gpt_oss, True, ("swiglu_oai", 1.702, 7.0, True)),
    "gpt-oss' formula on halves": (_minimax_m3, True, ("swiglu_oai", 1.702, 7.0, False)),
    "clamped": (_clamped_silu, True, ("silu", 1.0, 0.5, False)),
    "interleaved": (lambda z: F.silu(z[..., ::2]) * z[..., 1::2], True, ("silu", 1.0, None, True)),
    "interleaved, by view": (lambda z: F.silu(z.unflatten(-1, (-1, 2))[..., 0]) * z.unflatten(-1, (-1, 2))[..., 1], True, ("silu", 1.0, None, True)),
}

# name -> (function, with a gate, part of the reason)
UNKNOWN_ACTIVATIONS = {
    "mish": (_act(F.mish), True, "does not have, computed by"),
    "sigmoid": (_act(torch.sigmoid), True, "computed by sigmoid"),
    "clamped behind silu": (lambda z: _act(lambda g: F.silu(g).clamp(max=0.5))(z), True, "clamp"),
    "up in front of gate": (lambda z: F.silu(z.chunk(2, -1)[1]) * z.chunk(2, -1)[0], True, "up stands in front of gate"),
    "gate alone": (lambda z: F.silu(z[..., :I]), True, "not halves"),
    "gate times gate": (lambda z: F.silu(z[..., :I]) * z[..., :I], True, ""),
    "another slope": (_act(lambda g: g * torch.sigmoid(1.702 * g) + 1e-4 * g), True, "does not have"),
    "normalised": (lambda z: F.normalize(swiglu(z), dim=-1), True, ""),
    "overlapping halves": (lambda z: F.silu(z[..., :I]) * z[..., I - 1 : -1], True, "not halves"),
    "rounded to float16": (lambda z: swiglu(z.to(torch.float8_e4m3fn).to(z.dtype)), True, ""),
}
