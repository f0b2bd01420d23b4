"""What counts as a linear layer or as experts, what is left alone and with which reason, and what the default call refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp4_inductor
from fp4_inductor import FP4Linear, errors, quantize_model
from fp4_inductor.models.kinds import linear_kind
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.preflight import SMALL_SHARE
from fp4_inductor.modules import FP4Experts

# --- linear layers with a forward of their own -------------------------------------------------------------------


class ByMatmul(nn.Linear):
    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class InFloat32(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float()).to(x.dtype)


class OwnLinear(nn.Module):
    def __init__(self, k, n, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k))
        self.bias = nn.Parameter(torch.randn(n)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.01


class ToFloat32(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class WithDropout(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class Lora(nn.Linear):
    def __init__(self, k, n):
        super().__init__(k, n)
        self.a = nn.Parameter(torch.zeros(4, k))
        self.b = nn.Parameter(torch.zeros(n, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.a.T @ self.b.T


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Keeping(nn.Linear):
    def __init__(self, k, n):
        super().__init__(k, n)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return super().forward(x)


class Tuple(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class WithOption(nn.Linear):
    def forward(self, x, scale=1.0):
        return super().forward(x) * scale


class ChangesWeight(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.weight.data.mul_(0.5)
        return y


class Grouped(nn.Linear):
    """DeepSeek-V4's grouped output projection."""

    def forward(self, x):
        w = self.weight.view(2, -1, x.shape[-1]).transpose(1, 2)
        return torch.bmm(x.reshape(-1, 2, x.shape[-1]).transpose(0, 1), w).transpose(0, 1).reshape(*x.shape[:-2], 2, -1)


@pytest.mark.parametrize("cls", [ByMatmul, InFloat32, OwnLinear, nn.Linear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_forward_that_computes_a_linear_layer_is_one(cls, bias):
    layer = cls(64, 32, bias=bias)
    assert linear_kind(layer) == "linear"
    with torch.device("meta"):
        assert linear_kind(cls(64, 32, bias=bias)) == "linear"
    model = quantize_model(nn.Sequential(layer), progress=False)
    assert isinstance(model[0], FP4Linear)
    x = torch.randn(3, 64)
    want = F.linear(x, model[0].dequantize(torch.float32), layer.bias)
    assert (model(x) - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("cls", [Scaled, ToFloat32, WithDropout, Lora, Counting, Keeping, Tuple, WithOption, ChangesWeight, Grouped])
def test_a_forward_that_does_more_is_left_alone(cls):
    layer = cls(64, 32)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state = {k: copy.copy(v) for k, v in vars(layer).items()}
    assert linear_kind(layer) == "forward"
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert {k: v for k, v in vars(layer).items() if not k.startswith("_")} == {k: v for k, v in state.items() if not k.startswith("_")}
    model = quantize_model(nn.Sequential(layer, nn.Linear(32, 32)), strict=False, progress=False)
    assert model[0] is layer
    assert "own forward" in fp4_inductor.report(model).uncovered[0].reason


def test_hooks_of_a_probed_layer_do_not_run():
    layer, seen = ByMatmul(32, 32), []
    layer.register_forward_hook(lambda *a: seen.append(1))
    assert linear_kind(layer) == "linear"
    assert not seen


def test_falcon_is_covered():
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, bos_token_id=1, eos_token_id=2)
    model = FalconForCausalLM(config)
    report = fp4_inductor.report(quantize_model(model, fp4_inductor.NVFP4Config(scale_search="amax"), progress=False))
    assert report.coverage == 100.0
    assert len(report.layers) == 8


# --- stacks of matrices that are no experts ----------------------------------------------------------------------


def _reason(model: nn.Module, name: str) -> str:
    plan = make_plan(model)
    return next(s.reason for s in (*plan.skipped, *plan.uncovered) if s.name == name)


class Holder(nn.Module):
    def __init__(self, **parameters):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def test_weight_norm_does_not_make_a_convolution_experts():
    model = nn.Sequential(nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 32)), nn.utils.weight_norm(nn.Conv1d(64, 64, 32)))
    assert _reason(model, "1.parametrizations.weight.original1") == "convolution"
    assert _reason(model, "2.weight_v") == "convolution"
    assert fp4_inductor.report(quantize_model(model, strict=True, progress=False)).coverage == 100.0


@pytest.mark.parametrize("name", ["position_embedding_table", "position_embeddings", "pos_emb", "pos", "relative_position_bias", "decoder_pos_embed"])
def test_a_position_table_is_no_stack_of_experts(name):
    model = Holder(**{name: (4, 32, 64)})
    assert "position" in _reason(model, name)
    quantize_model(model, strict=True, progress=False)


@pytest.mark.parametrize("name", ["weight", "composed", "exposition", "bank"])
def test_another_name_is_no_position_table(name):
    with pytest.raises(errors.CoverageError, match=rf"{name} .*a stack of matrices; how Holder uses it is not known"):
        quantize_model(Holder(**{name: (4, 32, 64)}), strict=True, progress=False)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("RecurrentGemmaConfig", ["rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"]),
        ("CsmDepthDecoderConfig", ["codebooks_head.weight"]),
        ("Gemma4VisionConfig", ["position_embedding_table"]),
        ("Wav2Vec2Config", ["parametrizations.weight.original1"]),
        ("EncodecConfig", []),
    ],
)
def test_what_transformers_keeps_in_three_dimensions(config, names):
    import transformers

    from lowering_tests.models import model_types

    found = model_types.verdict(getattr(transformers, config).model_type)
    assert found.status == ("empty" if config == "EncodecConfig" else "taken"), found
    assert not any("unknown" in r for r in found.reasons)
    assert found.share == 0.0


# --- what the default call leaves and what it refuses -------------------------------------------------------------


def _with_attention(width: int) -> nn.Module:
    return nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "linear": nn.Linear(width, width)})


def test_a_small_share_stays_with_its_reason():
    model = _with_attention(256)  # 1024 weights of 66560
    quantize_model(model, progress=False)
    report = fp4_inductor.report(model)
    assert isinstance(model["linear"], FP4Linear)
    assert {s.name for s in report.uncovered} == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert 100 * (1 - SMALL_SHARE) <= report.coverage < 100.0
    assert "nn.MultiheadAttention reads this weight itself" in report.text(1000)


@pytest.mark.parametrize(("width", "strict"), [(64, None), (256, True)])
def test_a_larger_share_or_strict_is_refused_with_the_limit(width, strict):
    model = _with_attention(width)
    with pytest.raises(errors.CoverageError, match="5% may stay by default, none with strict=True"):
        quantize_model(model, strict=strict, progress=False)
    assert type(model["linear"]) is nn.Linear


def test_a_tower_by_itself_is_quantized():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision_encoder = nn.ModuleDict({"layer": nn.Linear(64, 64)})

    assert fp4_inductor.report(quantize_model(Tower(), progress=False)).params == 64 * 64
    both = nn.ModuleDict({"tower": Tower(), "text": nn.Linear(64, 64)})
    assert [t.name for t in make_plan(both).targets] == ["text"]


# --- remedies that fit --------------------------------------------------------------------------------------------


def _refusal(model: nn.Module, **kwargs) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        quantize_model(model, progress=False, **kwargs)
    return str(caught.value)


def test_the_remedy_names_only_what_was_passed():
    twice = _refusal(quantize_model(nn.Sequential(nn.Linear(32, 32)), progress=False))
    assert "in FP4 already" in twice
    empty = _refusal(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    assert "Sequential has no linear layer" in empty
    assert "convolution" in empty
    opaque = _refusal(nn.Sequential(Scaled(32, 32)), strict=False)
    assert "Scaled is a linear layer with its own forward" in opaque
    nothing = _refusal(nn.Module())
    assert "without parameters" in nothing
    for text in (twice, empty, opaque, nothing):
        assert "ignore" not in text
        assert "filter_fn" not in text
    assert "Shorten ignore." in _refusal(nn.Sequential(nn.Linear(32, 32)), ignore=["0"])
    filtered = _refusal(nn.Sequential(nn.Linear(32, 32)), filter_fn=lambda m, n: False)
    assert "Let filter_fn return True" in filtered
    assert "ignore" not in filtered


# --- experts without Transformers' interface ----------------------------------------------------------------------


class PlainExperts(nn.Module):
    """Routed experts as a loop, as model code outside Transformers writes them."""

    def __init__(self, experts=4, hidden=64, inner=32, limit=None, act=F.silu, identity=0, transposed=False):
        super().__init__()
        shapes = (experts + identity, 2 * inner, hidden), (experts, hidden, inner)
        first, down = (torch.randn(s) / s[-1] ** 0.5 for s in shapes)
        self.gate_up_proj = nn.Parameter(first.mT.contiguous() if transposed else first)
        self.down_proj = nn.Parameter(down.mT.contiguous() if transposed else down)
        self.limit, self.act, self.transposed, self.num_experts = limit, act, transposed, experts

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in top_k_index.unique().tolist():
            token, k = torch.where(top_k_index == e)
            x = hidden_states[token]
            if e < self.num_experts:
                up, down = (w[e].mT if self.transposed else w[e] for w in (self.gate_up_proj, self.down_proj))
                x = F.linear(self.between(F.linear(x, up)), down)
            out.index_add_(0, token, (x * top_k_weights[token, k, None]).to(out.dtype))
        return out

    def between(self, z):
        gate, up = z.chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.act(gate) * up


class ClampsAfter(PlainExperts):
    """Step-3.7: the limit is on the activation's result."""

    def between(self, z):
        gate, up = z.chunk(2, -1)
        return self.act(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class UpFirst(PlainExperts):
    def between(self, z):
        up, gate = z.chunk(2, -1)
        return self.act(gate) * up


def _routing(experts: int) -> tuple:
    return torch.randn(12, 64), torch.stack([torch.randperm(experts)[:2] for _ in range(12)]), torch.rand(12, 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"act": F.gelu}, {"limit": 1.5}, {"identity": 2}, {"transposed": True}, {"transposed": True, "identity": 1}, {"hidden": 64, "inner": 64}],
    ids=str,
)
def test_experts_of_any_model_are_known_by_what_they_compute(options):
    dense = PlainExperts(**options)
    model = quantize_model(nn.Sequential(copy.deepcopy(dense)), strict=True, progress=False)[0]
    assert isinstance(model, FP4Experts)
    assert model.identity == options.get("identity", 0)
    for name, packed in (("gate_up_proj", model.first), ("down_proj", model.down_proj)):
        w = packed.dequantize(torch.float32)
        dense.get_parameter(name).data[: dense.num_experts] = w.mT if dense.transposed else w
    x, ids, weights = _routing(dense.num_experts + model.identity)
    want = dense(x, ids, weights)
    assert (model(x, ids, weights) - want).norm() <= 1e-5 * want.norm()


def test_identity_experts_survive_saving(tmp_path):
    model = quantize_model(nn.Sequential(PlainExperts(identity=2)), progress=False)
    fp4_inductor.save(model, tmp_path)
    loaded = fp4_inductor.load(nn.Sequential(PlainExperts(identity=2)), tmp_path)
    call = _routing(6)
    assert torch.equal(loaded[0](*call), model[0](*call))
    with pytest.raises(errors.CheckpointError, match="do not fit"):
        fp4_inductor.load(nn.Sequential(PlainExperts(identity=1)), tmp_path)


@pytest.mark.parametrize(
    "experts",
    [ClampsAfter(limit=0.5), UpFirst(), PlainExperts(act=F.tanh), PlainExperts(act=lambda z: F.silu(z) * 1.01)],
    ids=["clamps after", "up first", "tanh", "scaled"],
)
def test_experts_that_compute_something_else_are_refused(experts):
    with pytest.raises(errors.GatingError, match=r"nothing that fp4\.moe computes"):
        quantize_model(nn.Sequential(experts), progress=False)


def test_a_limit_of_infinity_clamps_nothing():
    assert isinstance(quantize_model(nn.Sequential(ClampsAfter(limit=float("inf"))), strict=True, progress=False)[0], FP4Experts)


def test_longcat_flash_is_its_dequantized_twin():
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    config = LongcatFlashConfig(
        vocab_size=128, hidden_size=64, num_layers=1, num_attention_heads=4, ffn_hidden_size=64, expert_ffn_hidden_size=32,
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, head_dim=16, n_routed_experts=6, zero_expert_num=2,
        moe_topk=3, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_position_embeddings=128,
    )  # fmt: skip
    dense = LongcatFlashForCausalLM(config).eval()
    for p in dense.parameters():
        p.data.normal_(0, 0.1)
    model = quantize_model(copy.deepcopy(dense), fp4_inductor.NVFP4Config(scale_search="amax"), strict=True, progress=False)
    modules = dict(dense.named_modules())
    for name, layer in model.named_modules():
        if isinstance(layer, FP4Linear):
            modules[name].weight.data.copy_(layer.dequantize(torch.float32))
        elif isinstance(layer, FP4Experts):
            modules[name].gate_up_proj.data[:6].copy_(layer.first.dequantize(torch.float32))
            modules[name].down_proj.data.copy_(layer.down_proj.dequantize(torch.float32))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        got, want = model(ids).logits, dense(ids).logits
    assert (got - want).norm() <= 1e-5 * want.norm()


# --- stacks of matrices that a module takes one by one -------------------------------------------------------------


def _stacked(name: str):
    import transformers

    base = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "jetmoe":
        sizes = {"num_key_value_heads": 2, "kv_channels": 32, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.JetMoeConfig(**base, **sizes)
    else:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "moe_num_experts": 4, "moe_topk": 2}
        config = transformers.AriaTextConfig(**base, **sizes, moe_num_shared_experts=1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model


def _dequantized(model: nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A quantized stack as it lies in the dense model. Aria's are FP4Experts from Transformers 5.18 on, which has them behind its interface, transposed."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(module, FP4Experts):
        return {"gate_up_proj": module.first, "down_proj": module.down_proj}[last].dequantize(dtype).mT
    return model.get_parameter(name).dequantize(dtype)


@pytest.mark.parametrize("name", ["jetmoe", "aria_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_is_its_dequantized_twin_and_can_be_saved(name, dtype, tmp_path):
    dense = _stacked(name).to(dtype)
    names = [n for n, p in dense.named_parameters() if p.dim() == 3]
    assert names
    model = quantize_model(copy.deepcopy(dense), fp4_inductor.NVFP4Config(scale_search="mse"), strict=True, progress=False)
    report = fp4_inductor.report(model)
    assert report.coverage == 100.0
    rows = {r.name: r for r in report.layers if r.name in names}
    assert rows.keys() == set(names)
    for n, row in rows.items():
        w, q = dense.get_parameter(n).double(), _dequantized(model, n, torch.float32).double()
        assert row.relative_error == pytest.approx(float((w - q).norm() / w.norm()), rel=1e-3)
        assert row.bytes_after < row.bytes_before / 3
    modules = dict(dense.named_modules())
    for n, layer in model.named_modules():
        if isinstance(layer, FP4Linear):
            modules[n].weight.data.copy_(layer.dequantize(dtype))
    for n in names:
        dense.get_parameter(n).data.copy_(_dequantized(model, n, dtype))
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        got, want = model(ids).logits, dense(ids).logits
        assert (got - want).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * want.norm()
        fp4_inductor.save(model, tmp_path / "native")
        assert torch.equal(fp4_inductor.load(_stacked(name).to(dtype), tmp_path / "native")(ids).logits, got)
    if not any(isinstance(module, FP4Experts) for module in model.modules()):
        with pytest.raises(Exception, match=r"serializ|save"):
            model.save_pretrained(tmp_path / "transformers")


def test_a_stack_is_quantized_with_the_default_options_too():
    model = quantize_model(_stacked("jetmoe"), progress=False)
    assert fp4_inductor.report(model).coverage == 100.0
    assert any("one matrix at a time: unweighted scales" in n for r in fp4_inductor.report(model).layers for n in r.notes)


def test_a_stack_that_cannot_be_quantized_is_named():
    class JetMoeParallelExperts(nn.Module):
        def __init__(self, k, value=0.0):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 32, k), value))

    with pytest.raises(errors.CoverageError, match=r"weight .*expert weights"):
        quantize_model(JetMoeParallelExperts(24), progress=False)
    with pytest.raises(errors.NonFiniteError, match="weight holds NaN"):
        quantize_model(JetMoeParallelExperts(32, float("nan")), progress=False)
    shared = nn.ModuleList([JetMoeParallelExperts(32), JetMoeParallelExperts(32)])
    shared[1].weight = shared[0].weight
    with pytest.raises(errors.CoverageError, match="expert weights"):
        quantize_model(shared, progress=False)
    assert type(shared[0].weight) is nn.Parameter
