"""fp4.moe: right against a float64 layer written with plain PyTorch, ids that mean nothing, rows that stay apart, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fp4_inductor  # noqa: F401
from fp4_inductor import errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.ops import CONTRACTS
from fp4_inductor.ops.activation import ACTIVATIONS, Activation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
moe = torch.ops.fp4.moe

# The formulas of the models, written apart from ops/activation.py: (gate, up) -> h.
FORMULAS = {
    "qwen3_moe": (Activation("silu"), lambda g, u: F.silu(g) * u),
    "gemma": (Activation("gelu_tanh"), lambda g, u: F.gelu(g, approximate="tanh") * u),
    "erf": (Activation("gelu"), lambda g, u: 0.5 * g * (1 + torch.erf(g / 2**0.5)) * u),
    "gpt_oss": (Activation("swiglu_oai", 1.702, 0.7, True), lambda g, u: (u.clamp(-0.7, 0.7) + 1) * g.clamp(max=0.7) * torch.sigmoid(1.702 * g.clamp(max=0.7))),
    "deepseek_v4": (Activation("silu", limit=0.5), lambda g, u: F.silu(g.clamp(max=0.5)) * u.clamp(-0.5, 0.5)),
    "nemotron_h": (Activation("relu2"), lambda g, u: F.relu(g) ** 2),
    "quick_gelu": (Activation("silu", 1.702), lambda g, u: g * torch.sigmoid(1.702 * g)),
    "relu": (Activation("relu"), lambda g, u: F.relu(g) * u),
}
UNGATED = {"nemotron_h", "quick_gelu"}


def layer(experts=5, h=48, inner=32, gated=True, device="cpu", n=None):
    """(arguments of the op from gate_up_qdata to down_global_scale, the two dense float64 weights)."""
    up = torch.randn(experts, inner * (2 if gated else 1), h, device=device) / h**0.5
    down = torch.randn(experts, n or h, inner, device=device) / inner**0.5
    parts = (*nvfp4.quantize(up), *nvfp4.quantize(down))
    return parts, nvfp4.dequantize(*parts[:3], torch.float32).double(), nvfp4.dequantize(*parts[3:], torch.float32).double()


def by_hand(x, ids, w, up, down, formula, interleaved=False, bias1=None, bias2=None, weight_on_input=False):
    """Every token and every choice on its own, in float64. ``ids`` are Python numbers; what is not an expert is left out."""
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64, device=x.device)
    for t, row in enumerate(ids.tolist()):
        for j, e in enumerate(row):
            if not 0 <= e < up.shape[0]:
                continue
            factor = w[t, j].double()
            z = up[e] @ (x[t].double() * (factor if weight_on_input else 1))
            z = z if bias1 is None else z + bias1[e].double()
            half = z.shape[0] // 2
            g, u = (z, None) if z.shape[0] == down.shape[2] else (z[0::2], z[1::2]) if interleaved else (z[:half], z[half:])
            y = down[e] @ formula(g, u)
            y = y if bias2 is None else y + bias2[e].double()
            out[t] += y if weight_on_input else y * factor
    return out


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_of_each_model(name, dtype, device):
    act, formula = FORMULAS[name]
    torch.manual_seed(1)
    parts, up, down = layer(gated=name not in UNGATED, device=device)
    for t in (1, 6, 40):  # 40 tokens on 5 experts: more than eight rows for one expert, the other path of the CPU
        x = torch.randn(t, 48, device=device).to(dtype)
        ids, w = torch.randint(0, 5, (t, 3), device=device), torch.rand(t, 3, device=device)
        b1, b2 = (torch.randn(5, n, device=device).to(dtype) for n in (up.shape[1], 48))
        for biases in ((None, None), (b1, b2)):
            got = moe(x, ids, w, *parts, *biases, *act.arguments())
            want = by_hand(x, ids, w, up, down, formula, act.interleaved, *biases)
            assert got.dtype == dtype
            assert relative(got, want) <= CONTRACTS["moe"].tolerance[dtype], (t, biases[0] is not None)
            assert relative(CONTRACTS["moe"].reference(x.float(), ids, w, *parts, *biases, *act.arguments()), want) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_weight_on_input_is_the_llama4_form(device):
    parts, up, down = layer(device=device)
    x, ids, w = torch.randn(7, 48, device=device), torch.randint(0, 5, (7, 1), device=device), torch.rand(7, 1, device=device)
    got = moe(x, ids, w, *parts, weight_on_input=True)
    assert relative(got, by_hand(x, ids, w, up, down, FORMULAS["qwen3_moe"][1], weight_on_input=True)) < 4e-6
    assert relative(got, moe(x, ids, w, *parts)) > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [-1, 5, 6, -7, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_expert_contributes_exactly_zero_whatever_its_weight(bad, device):
    parts, *_ = layer(device=device)
    x, ids, w = torch.randn(4, 48, device=device), torch.randint(0, 5, (4, 2), device=device, dtype=torch.int32), torch.rand(4, 2, device=device)
    alone = moe(x, ids[:, :1], w[:, :1], *parts)
    ids[:, 1], w[:, 1] = bad, float("nan")
    assert torch.equal(moe(x, ids, w, *parts), alone)
    assert not moe(x, torch.full_like(ids, bad), w, *parts).any()


@pytest.mark.parametrize("device", DEVICES)
def test_expert_map(device):
    parts, up, down = layer(device=device)
    x, w = torch.randn(6, 48, device=device), torch.rand(6, 3, device=device)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, -1, 10], [7, 7, 7], [2, 99, 0]], device=device)
    table = torch.tensor([-1, 0, 1, 2, -1, 3, 4, 5, -5, 1], device=device)  # 5: beyond the local experts
    local = torch.tensor([[-1, 0, 1], [2, -1, 3], [4, -1, -1], [1, -1, -1], [-1, -1, -1], [1, -1, -1]], device=device)
    got = moe(x, ids, w, *parts, expert_map=table)
    assert torch.equal(got, moe(x, local, w, *parts))
    assert relative(got, by_hand(x, local, w, up, down, FORMULAS["qwen3_moe"][1])) < 4e-6
    assert not moe(x, ids, w, *parts, expert_map=table[:0]).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_token(bad, device):
    parts, *_ = layer(device=device)
    for dtype in (torch.float32, torch.bfloat16):
        x, ids, w = torch.randn(20, 48, device=device).to(dtype), torch.randint(0, 5, (20, 2), device=device), torch.rand(20, 2, device=device)
        clean = moe(x, ids, w, *parts)
        others = torch.arange(20, device=device) != 3
        dirty = x.clone()
        dirty[3, 7] = bad
        got = moe(dirty, ids, w, *parts)
        assert torch.equal(got[others], clean[others])
        assert not torch.isfinite(got[3]).any()
        routed = w.clone()
        routed[3, 1] = bad
        got = moe(x, ids, routed, *parts)
        assert torch.equal(got[others], clean[others])
        assert not torch.isfinite(got[3]).any()


@pytest.mark.parametrize("device", DEVICES)
def test_duplicate_ids_count_each_time_and_k_may_exceed_e(device):
    parts, up, down = layer(experts=2, device=device)
    x, w = torch.randn(3, 48, device=device), torch.rand(3, 7, device=device)
    ids = torch.zeros(3, 7, dtype=torch.int64, device=device)
    assert relative(moe(x, ids, w, *parts), by_hand(x, ids, w, up, down, FORMULAS["qwen3_moe"][1])) < 4e-6
    assert relative(moe(x, ids, w, *parts), moe(x, ids[:, :1], w.sum(1, keepdim=True), *parts)) < 4e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("t", "k", "experts"), [(0, 2, 5), (3, 0, 5), (0, 0, 5), (3, 2, 0)])
def test_nothing_to_do_is_zero(t, k, experts, device):
    parts, *_ = layer(experts=experts, device=device)
    got = moe(torch.randn(t, 48, device=device), torch.zeros(t, k, dtype=torch.int64, device=device), torch.rand(t, k, device=device), *parts)
    assert got.shape == (t, 48)
    assert not got.any()


def test_experts_without_tokens_are_not_read():
    """The other experts hold NaN: one that was read and multiplied by zero would show."""
    parts, *_ = layer(experts=5)
    x, w, ids = torch.randn(4, 48), torch.rand(4, 2), torch.tensor([[1, 3], [3, 1], [1, 1], [3, -1]])
    clean = moe(x, ids, w, *parts)
    for g in (parts[2], parts[5]):
        g[[0, 2, 4]] = float("nan")
    assert torch.equal(moe(x, ids, w, *parts), clean)


def test_a_nan_expert_reaches_only_its_tokens():
    parts, *_ = layer()
    x, w, ids = torch.randn(6, 48), torch.rand(6, 2), torch.tensor([[0, 1], [1, 2], [3, 4], [0, 4], [2, 2], [4, 0]])
    clean = moe(x, ids, w, *parts)
    parts[2][2] = float("nan")
    got = moe(x, ids, w, *parts)
    hit = (ids == 2).any(1)
    assert torch.isnan(got[hit]).all()
    assert torch.equal(got[~hit], clean[~hit])


def test_output_width_may_differ_from_input_width():
    parts, up, down = layer(n=80)
    x, ids, w = torch.randn(3, 48), torch.randint(0, 5, (3, 2)), torch.rand(3, 2)
    assert relative(moe(x, ids, w, *parts), by_hand(x, ids, w, up, down, FORMULAS["qwen3_moe"][1])) < 4e-6


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_are_those_of_autograd(name, weight_on_input):
    act, formula = FORMULAS[name]
    parts, up, down = layer(gated=name not in UNGATED)
    b1, b2 = torch.randn(5, up.shape[1]), torch.randn(5, 48)
    ids = torch.tensor([[0, 1], [2, -1], [4, 4], [1, 5]])
    x, w = torch.randn(4, 48, requires_grad=True), torch.rand(4, 2, requires_grad=True)
    y = moe(x, ids, w, *parts, b1, b2, *act.arguments(), weight_on_input)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w), upstream)
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    want = torch.autograd.grad(by_hand(x64, ids, w64, up, down, formula, act.interleaved, b1, b2, weight_on_input), (x64, w64), upstream.double())
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 1e-5


def test_gradients_under_compile_and_refused_for_biases():
    parts, *_ = layer()
    x, ids, w = torch.randn(4, 48, requires_grad=True), torch.randint(0, 5, (4, 2)), torch.rand(4, 2)
    (want,) = torch.autograd.grad(moe(x, ids, w, *parts).square().sum(), x)
    torch.compile(lambda x: moe(x, ids, w, *parts).square().sum(), fullgraph=True, backend="aot_eager")(x).backward()
    assert relative(x.grad, want) < 1e-6
    with pytest.raises(errors.UnsupportedOpError, match="gate_up_bias"):
        moe(x, ids, w, *parts, torch.zeros(5, 64, requires_grad=True))


# --- refusals ----------------------------------------------------------------------------------------------------

PARTS, *_ = layer()
X, IDS, WEIGHTS = torch.ones(3, 48), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
REFUSED = {
    "H": (errors.ShapeError, r"\(3, 32\).*48", lambda: moe(X[:, :32], IDS, WEIGHTS, *PARTS)),
    "batched tokens": (errors.ShapeError, r"\(1, 3, 48\)", lambda: moe(X[None], IDS, WEIGHTS, *PARTS)),
    "routing of other tokens": (errors.ShapeError, r"expert_ids \(2, 2\)", lambda: moe(X, IDS[:2], WEIGHTS[:2], *PARTS)),
    "full scores": (errors.ShapeError, r"gather", lambda: moe(X, IDS, torch.ones(3, 5), *PARTS)),
    "float ids": (errors.DTypeError, r"expert_ids.*float32", lambda: moe(X, WEIGHTS, WEIGHTS, *PARTS)),
    "integer weights": (errors.DTypeError, r"expert_weights.*int64", lambda: moe(X, IDS, IDS, *PARTS)),
    "float64": (errors.DTypeError, r"hidden.*float64", lambda: moe(X.double(), IDS, WEIGHTS, *PARTS)),
    "2-D experts": (errors.ShapeError, r"3-D experts", lambda: moe(X, IDS, WEIGHTS, *(p[0] for p in PARTS))),
    "E": (errors.ShapeError, r"3-D experts", lambda: moe(X, IDS, WEIGHTS, *PARTS[:3], *(p[:4] for p in PARTS[3:]))),
    "I": (errors.ShapeError, r"64 rows, down takes 16", lambda: moe(X, IDS, WEIGHTS, *PARTS[:3], PARTS[3][..., :8], PARTS[4][..., :1], PARTS[5])),
    "no gate": (errors.ShapeError, r"32 rows.*64 rows", lambda: moe(X, IDS, WEIGHTS, *(p[:, :32] for p in PARTS[:2]), *PARTS[2:], activation="swiglu_oai")),
    "activation": (errors.ConfigError, r"'swish'.*silu", lambda: moe(X, IDS, WEIGHTS, *PARTS, activation="swish")),
    "alpha": (errors.ConfigError, r"alpha.*1.702", lambda: moe(X, IDS, WEIGHTS, *PARTS, activation="gelu", alpha=1.702)),
    "alpha nan": (errors.ConfigError, r"nan", lambda: moe(X, IDS, WEIGHTS, *PARTS, alpha=float("nan"))),
    "limit": (errors.ConfigError, r"limit.*> 0", lambda: moe(X, IDS, WEIGHTS, *PARTS, limit=0.0)),
    "bias": (errors.ShapeError, r"gate_up_bias.*\(5, 64\)", lambda: moe(X, IDS, WEIGHTS, *PARTS, torch.ones(64))),
    "down bias": (errors.ShapeError, r"down_bias.*\(5, 48\)", lambda: moe(X, IDS, WEIGHTS, *PARTS, None, torch.ones(5, 64))),
    "expert_map": (errors.ShapeError, r"expert_map", lambda: moe(X, IDS, WEIGHTS, *PARTS, expert_map=IDS)),
    "prefill": (errors.ConfigError, r"'fp4'", lambda: moe(X, IDS, WEIGHTS, *PARTS, prefill="fp4")),
    "device of tokens": (errors.DeviceError, r"cpu.*meta", lambda: moe(X.to("meta"), IDS, WEIGHTS, *PARTS)),
    "device of ids": (errors.DeviceError, r"cpu.*meta", lambda: moe(X, IDS.to("meta"), WEIGHTS, *PARTS)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_typed(case):
    error, message, call = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_every_activation_is_tested_here():
    assert {act.name for act, _ in FORMULAS.values()} == set(ACTIVATIONS)


def test_traced_layers_make_no_struct():
    """Dynamo of torch 2.11 ends a graph at a dataclass with slots, so whole models could not be compiled as one graph there."""
    from fp4_inductor.integrations import transformers
    from fp4_inductor.modules import experts

    for module in (experts, transformers):
        assert not {"MoeCall", "ExpertWeight"} & set(vars(module)), module.__name__
