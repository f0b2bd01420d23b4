"""quantize_model: what it replaces, what it leaves, what it refuses before changing anything, and what it says."""

from __future__ import annotations

import copy
import hashlib
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, NVFP4Tensor, errors, quantize_model
from fp4_inductor.modules import linear as linear_module


class Net(nn.Module):
    """Embedding, two blocks, a tied head."""

    def __init__(self, width: int = 64, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width, bias=False)}) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["down"](torch.relu(block["up"](x)))
        return self.lm_head(self.norm(x))


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, t in model.state_dict().items():
        digest.update(f"{name}{t.dtype}{tuple(t.shape)}{t.device}".encode())
        if t.device.type != "meta":
            digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(repr([(n, type(m).__name__) for n, m in model.named_modules()]).encode())
    return digest.hexdigest()


def quantized(model: nn.Module) -> set[str]:
    return {n for n, m in model.named_modules() if isinstance(m, FP4Linear)}


def refused(error: type, model: nn.Module, *args, match: str, **kwargs):
    """The call raises ``error`` and leaves the model as it was, bit for bit."""
    before = fingerprint(model)
    with pytest.raises(error, match=match) as caught:
        quantize_model(model, *args, progress=False, **kwargs)
    assert fingerprint(model) == before
    assert isinstance(caught.value, errors.FP4Error)
    assert None not in (caught.value.value, caught.value.limit, caught.value.remedy)
    return caught.value


ALL = {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}


# --- what is replaced --------------------------------------------------------------------------------------------


def test_in_place_and_returns_the_model():
    model = Net()
    ids = torch.arange(8)[None]
    want = model(ids)
    norm, embed = model.norm.weight, model.embed.weight
    assert quantize_model(model, progress=False) is model
    assert quantized(model) == ALL
    assert model.norm.weight is norm
    assert model.embed.weight is embed
    assert model.lm_head.weight is embed
    assert norm.requires_grad
    got = model(ids)
    assert 1e-4 < (got - want).norm() / want.norm() < 0.2


def test_the_default_is_four_over_six_and_options_reach_the_layers():
    weight = torch.randn(48, 64)
    model = nn.Sequential(nn.Linear(64, 48))
    model[0].weight.data.copy_(weight)
    layer = quantize_model(copy.deepcopy(model), progress=False)[0]
    assert torch.equal(layer.qdata, FP4Linear.from_weight(weight, scale_search="four_over_six").qdata)
    layer = quantize_model(copy.deepcopy(model), NVFP4Config("amax", prefill="bf16"), progress=False)[0]
    assert torch.equal(layer.qdata, FP4Linear.from_weight(weight, scale_search="amax").qdata)
    assert layer.prefill == "bf16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype):
    model = quantize_model(Net().to(dtype), progress=False)
    assert model.blocks[0]["up"].dtype == dtype
    assert model.blocks[0]["up"].bias.dtype == dtype
    assert model(torch.arange(4)[None]).dtype == dtype


def test_a_subclass_with_the_same_forward_is_replaced():
    class Named(nn.Linear):
        pass

    model = nn.Sequential(Named(32, 32))
    assert quantized(quantize_model(model, progress=False)) == {"0"}


def test_the_model_itself_may_be_the_layer():
    layer = nn.Linear(32, 16)
    new = quantize_model(layer, progress=False)
    assert isinstance(new, FP4Linear)
    assert fp4_inductor.report(new).coverage == 100.0


def test_a_compiled_model_is_quantized_inside_its_wrapper():
    model = Net().eval()
    compiled = torch.compile(model, backend="eager")
    ids = torch.arange(8)[None]
    dense = compiled(ids)
    assert quantize_model(compiled, progress=False) is compiled
    assert quantized(model) == ALL
    assert fp4_inductor.report(compiled) is fp4_inductor.report(model)
    assert torch.equal(compiled(ids), model(ids))  # recompiled: the dense graph is not used again
    assert not torch.equal(compiled(ids), dense)


def test_k_is_padded_inside_and_noted():
    model = nn.Sequential(nn.Linear(70, 33))
    x = torch.randn(5, 70)
    dense = copy.deepcopy(model)
    quantize_model(model, progress=False)
    dense[0].weight.data = model[0].dequantize()
    torch.testing.assert_close(model(x), dense(x), rtol=1e-5, atol=1e-5)
    report = fp4_inductor.report(model)
    assert "padded" in report.layers[0].notes[0]
    assert report.layers[0].params == 70 * 33


def test_non_contiguous_weights_give_the_same_bits():
    weight = torch.randn(64, 48)
    a, b = nn.Linear(48, 64, bias=False), nn.Linear(48, 64, bias=False)
    a.weight = nn.Parameter(weight.clone())
    b.weight = nn.Parameter(weight.t().contiguous().t())
    qa, qb = quantize_model(nn.Sequential(a), progress=False)[0], quantize_model(nn.Sequential(b), progress=False)[0]
    assert torch.equal(qa.qdata, qb.qdata)
    assert torch.equal(qa.scale.view(torch.uint8), qb.scale.view(torch.uint8))


def test_all_zero_layer_is_exact():
    model = nn.Sequential(nn.Linear(32, 32))
    nn.init.zeros_(model[0].weight)
    quantize_model(model, progress=False)
    assert not model[0].dequantize().any()
    assert fp4_inductor.report(model).layers[0].relative_error == 0.0


def test_mode_and_hooks_survive():
    model = Net()
    model.blocks[0].eval()
    seen = []
    forward = model.blocks[0]["up"].register_forward_hook(lambda m, args, out: seen.append(type(m)))
    before = model.blocks[0]["up"].register_forward_pre_hook(lambda m, args: seen.append("pre"))
    quantize_model(model, progress=False)
    assert not model.blocks[0]["up"].training
    assert model.blocks[1]["up"].training
    model(torch.arange(4)[None])
    assert seen == ["pre", FP4Linear]
    forward.remove()
    before.remove()
    model(torch.arange(4)[None])
    assert len(seen) == 2


# --- what is left alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["blocks.0.up"], {"blocks.0.up"}),
        (["down"], {"blocks.0.down", "blocks.1.down"}),
        (["0.up"], {"blocks.0.up"}),
        (["blocks.1"], {"blocks.1.up", "blocks.1.down"}),
        (["re:.*up$"], {"blocks.0.up", "blocks.1.up"}),
        (["up", "re:blocks\\.1\\."], {"blocks.0.up", "blocks.1.up", "blocks.1.down"}),
        (("own",), set()),
    ],
)
def test_ignore(ignore, left):
    model = quantize_model(Net(), ignore=ignore, progress=False)
    assert quantized(model) == ALL - left
    report = fp4_inductor.report(model)
    assert {s.name.removesuffix(".weight") for s in report.skipped if s.reason.startswith("ignore=")} >= left
    assert report.coverage == 100.0


def test_an_ignore_entry_that_matches_nothing_is_reported():
    report = fp4_inductor.report(quantize_model(Net(), ignore=["bloks.0"], progress=False))
    assert report.notes[0] == "ignore='bloks.0' matched nothing"
    assert "bloks.0" in str(report)


def test_filter_fn():
    calls = []

    def keep(module, name):
        calls.append(name)
        return not (isinstance(module, nn.Linear) and module.in_features == 128)

    assert quantized(quantize_model(Net(), filter_fn=keep, progress=False)) == {"blocks.0.up", "blocks.1.up"}
    assert "blocks.0.down" in calls


def test_heads_towers_and_norms_stay_with_a_reason():
    class Multimodal(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision_tower = nn.Sequential(nn.Linear(32, 32))
            self.language = Net(tied=False)
            self.score = nn.Linear(64, 2)
            self.gate = nn.Linear(64, 4)
            self.mlp = nn.ModuleDict({"gate": nn.Linear(32, 96)})  # a feed-forward layer called gate is no router

    model = quantize_model(Multimodal(), progress=False)
    assert quantized(model) == {f"language.{n}" for n in ALL} | {"mlp.gate"}
    reasons = {s.name: s.reason for s in fp4_inductor.report(model).skipped}
    for name, word in {
        "vision_tower.0.weight": "vision",
        "language.lm_head.weight": "head",
        "score.weight": "head",
        "gate.weight": "router",
        "language.norm.weight": "norm",
        "language.embed.weight": "embedding",
    }.items():
        assert word in reasons[name], name


# --- sharing ------------------------------------------------------------------------------------------------------


def test_two_layers_with_one_weight_share_the_quantized_one():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    model[2].weight = model[1].weight = model[0].weight
    biases = [model[0].bias.detach().clone(), model[1].bias.detach().clone()]
    quantize_model(model, progress=False)
    assert model[0].qdata is model[1].qdata is model[2].qdata
    assert model[0].scale is model[1].scale is model[2].scale
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[1].bias, biases[1])
    assert model[2].bias is None
    report = fp4_inductor.report(model)
    assert report.params == 64 * 64
    assert "shares its weight with 0" in report.layers[1].notes


def test_one_module_under_two_names_stays_one_module():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    quantize_model(model, progress=False)
    assert isinstance(model["a"], FP4Linear)
    assert model["a"] is model["b"][0]


def test_a_weight_tied_to_an_ignored_layer_is_not_untied():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    quantize_model(model, ignore=["1"], progress=False)
    assert quantized(model) == {"2"}
    assert model[0].weight is model[1].weight
    assert {s.name: s.reason for s in fp4_inductor.report(model).skipped}["0.weight"] == "tied to 1.weight"


def test_aliases_without_parameter_identity_count_as_tied():
    model = Net(tied=False)
    model.lm_head.weight = nn.Parameter(model.embed.weight.detach())
    model.blocks[0]["up"].weight = nn.Parameter(model.blocks[1]["up"].weight.detach())
    quantize_model(model, progress=False)
    assert "lm_head" not in quantized(model)
    assert model.lm_head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert model.blocks[0]["up"].qdata is model.blocks[1]["up"].qdata


# --- refusals, before anything is changed -------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["weight", "bias"])
def test_non_finite(value, where):
    model = Net()
    getattr(model.blocks[1]["up"], where).data.view(-1)[5] = value
    error = refused(errors.NonFiniteError, model, match=rf"blocks\.1\.up\.{where}")
    assert "ignore" in str(error)
    quantize_model(model, ignore=["blocks.1.up"], progress=False)
    assert quantized(model) == ALL - {"blocks.1.up"}


def test_wrong_dtypes():
    refused(errors.DTypeError, Net().double(), match="float")
    model = Net()
    model.blocks[0]["up"].weight = nn.Parameter(torch.zeros(128, 64, dtype=torch.int8), requires_grad=False)
    refused(errors.DTypeError, model, match=r"blocks\.0\.up.*quantized already")


def test_tensor_subclass():
    model = Net()
    model.blocks[0]["up"].weight = nn.Parameter(torch.randn(128, 64).as_subclass(_Wrapped))
    refused(errors.DTypeError, model, match="subclass")


class _Wrapped(torch.Tensor):
    pass


def test_meta_device():
    with torch.device("meta"):
        model = Net()
    refused(errors.DeviceError, model, match="meta device")


def test_parametrized_weight_norm_and_pruned():
    model = Net()
    nn.utils.parametrizations.weight_norm(model.blocks[0]["up"])
    refused(errors.ConfigError, model, match=r"blocks\.0\.up is parametrized")
    quantize_model(model, ignore=["blocks.0.up"], progress=False)
    assert quantized(model) == ALL - {"blocks.0.up"}
    model = Net()
    prune.l1_unstructured(model.blocks[0]["up"], "weight", 0.5)
    refused(errors.ConfigError, model, match="computed by a hook")


def test_lazy_layers():
    model = nn.Sequential(nn.LazyConv2d(3, 3), nn.LazyLinear(32))
    with pytest.raises(errors.ShapeError, match="lazy"):
        quantize_model(model, progress=False)
    assert isinstance(model[1], nn.LazyLinear)


def test_patched_forward_and_state_dict_hooks():
    model = Net()
    layer = model.blocks[0]["up"]
    layer.forward = layer.forward
    refused(errors.ConfigError, model, match="replaced on the instance")
    model = Net()
    model.blocks[0]["up"].register_state_dict_post_hook(lambda *args: None)
    refused(errors.ConfigError, model, match="state_dict hooks")


def test_extra_state_in_a_layer():
    model = Net()
    model.blocks[0]["up"].register_buffer("mask", torch.ones(3))
    refused(errors.ConfigError, model, match="more than a weight and a bias")


def test_all_problems_are_listed_at_once():
    model = Net()
    model.blocks[0]["up"].weight.data[0, 0] = float("nan")
    model.blocks[1]["up"].weight.data[0, 0] = float("inf")
    error = refused(errors.NonFiniteError, model, match="2 layers")
    assert "blocks.0-1.up.weight: each holds NaN or Inf; got 1 of 8192 elements; accepted: finite values. Repair" in str(error).replace("\n", " ")
    assert [p.name for p in error.problems] == ["blocks.0.up.weight", "blocks.1.up.weight"]
    nn.utils.parametrizations.weight_norm(model.blocks[0]["down"])
    error = refused(errors.PreflightError, model, match="3 layers")
    assert {type(p) for p in error.problems} == {errors.NonFiniteError, errors.ConfigError}


def test_linear_layers_with_their_own_forward_are_never_overlooked():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(32, 32), nn.Linear(32, 32))
    error = refused(errors.CoverageError, model, match="own forward")
    assert "50.0%" in str(error)
    quantize_model(model, strict=False, progress=False)
    assert quantized(model) == {"1"}
    assert fp4_inductor.report(model).coverage == pytest.approx(50.0)


def test_multihead_attention_is_not_replaced_behind_its_back():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    error = refused(errors.CoverageError, model, match="MultiheadAttention")
    assert "self_attn.in_proj_weight" in str(error)
    assert "self_attn.out_proj.weight" in str(error)
    quantize_model(model, strict=False, progress=False)
    assert quantized(model) == {"linear1", "linear2"}
    with torch.no_grad():
        assert model.eval()(torch.randn(2, 5, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"ignore": "lm_head"}, "list of names"),
        ({"ignore": [3]}, "list of names"),
        ({"ignore": ["re:("]}, "regular expression"),
        ({"ignore": ["blocks"]}, "no layer to quantize"),
        ({"config": {"scale_search": "amax"}}, "NVFP4Config"),
    ],
)
def test_bad_arguments(kwargs, match):
    refused(errors.ConfigError, Net(), match=match, **kwargs)


def test_bad_devices():
    refused(errors.DeviceError, Net(), match="device", device="nowhere")
    refused(errors.DeviceError, Net(), match="meta", device="meta")
    if not torch.cuda.is_available():
        refused(errors.DeviceError, Net(), match="cuda", device="cuda")


def test_what_is_not_a_module():
    with pytest.raises(errors.ConfigError, match="takes a module"):
        quantize_model(torch.randn(3, 3), progress=False)


def test_a_second_call_has_nothing_to_do_or_does_the_rest():
    model = quantize_model(Net(), ignore=["down"], progress=False)
    first = model.blocks[0]["up"]
    quantize_model(model, progress=False)
    assert quantized(model) == ALL
    assert model.blocks[0]["up"] is first
    assert len(fp4_inductor.report(model).layers) == 4
    refused(errors.ConfigError, model, match="in FP4 already")


def test_a_weight_that_is_an_nvfp4_tensor_already_counts_as_covered():
    model = Net()
    model.blocks[0]["up"].weight = nn.Parameter(NVFP4Tensor.from_dense(model.blocks[0]["up"].weight.data), requires_grad=False)
    report = fp4_inductor.report(quantize_model(model, progress=False))
    assert quantized(model) == ALL - {"blocks.0.up"}
    assert report.coverage == 100.0
    assert "blocks.0.up.weight" in {i.name for i in report.layers}


# --- memory -------------------------------------------------------------------------------------------------------


def test_dense_weights_are_released_one_by_one(monkeypatch):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    alive = [weakref.ref(layer.weight) for layer in model]
    counts = []
    original = linear_module.FP4Linear.from_weight.__func__

    def watched(cls, *args, **kwargs):
        counts.append(sum(r() is not None for r in alive))
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(linear_module.FP4Linear, "from_weight", classmethod(watched))
    quantize_model(model, progress=False)
    assert counts == [8, 7, 6, 5, 4, 3, 2, 1]
    assert not any(r() is not None for r in alive)


@pytest.mark.gpu
def test_device_takes_one_layer_at_a_time():
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)))
    twin = copy.deepcopy(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    quantize_model(model, device="cuda", progress=False)
    assert all(t.device.type == "cuda" for t in model.state_dict().values())
    fp4, one_dense, temporaries = 8 * 4096 * 4096 * 4.5 / 8, 4096 * 4096 * 2, 300e6
    assert torch.cuda.max_memory_allocated() - base <= 1.01 * (fp4 + one_dense) + temporaries
    quantize_model(twin, progress=False)
    for a, b in zip(model, twin, strict=True):
        # Two candidate scales whose errors differ by rounding may be chosen differently; everything else is bit-equal.
        assert (a.scale.cpu().view(torch.uint8) != b.scale.view(torch.uint8)).float().mean() < 1e-4
        assert torch.equal(a.global_scale.cpu(), b.global_scale)


def test_device_cpu_is_the_same_as_none():
    a = quantize_model(Net(), device="cpu", progress=False)
    assert all(t.device.type == "cpu" for t in a.state_dict().values())


# --- report -------------------------------------------------------------------------------------------------------


def test_report_figures(capsys):
    model = Net(width=128)
    dense_bytes = sum(p.numel() * 4 for p in model.parameters())
    quantize_model(model, progress=False)
    assert capsys.readouterr().out == ""
    report = fp4_inductor.report(model)
    assert report.bytes_before == dense_bytes
    seen = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    assert report.bytes_after == sum(seen.values())
    weights = 4 * 128 * 256
    assert report.params == weights
    layer_bytes = sum(i.bytes_after for i in report.layers)
    assert layer_bytes == weights * 4.5 / 8 + 4 * 4 + 2 * 256 * 4
    for layer in report.layers:
        assert 0.07 < layer.relative_error < 0.095
        assert layer.shape == tuple(model.get_submodule(layer.name).dequantize().shape)


def test_report_relative_error_is_the_true_one():
    weight = torch.randn(96, 80)
    model = nn.Sequential(nn.Linear(80, 96, bias=False))
    model[0].weight.data.copy_(weight)
    quantize_model(model, progress=False)
    want = ((weight - model[0].dequantize()).double().norm() / weight.double().norm()).item()
    assert fp4_inductor.report(model).layers[0].relative_error == pytest.approx(want, rel=1e-5)


def test_report_table(capsys):
    model = quantize_model(Net())
    out = capsys.readouterr().out
    assert str(fp4_inductor.report(model)).strip() in out
    for text in ("4 layers", "100.00 %", "tied to embed.weight", "embedding", "largest relative errors", "four_over_six"):
        assert text in out, text
    assert len(out.splitlines()) < 25


def test_report_of_a_copy_and_of_hand_made_layers():
    model = quantize_model(Net(), progress=False)
    again = fp4_inductor.report(copy.deepcopy(model))
    first = fp4_inductor.report(model)
    assert again.coverage == 100.0
    assert (again.bytes_before, again.bytes_after, again.params) == (first.bytes_before, first.bytes_after, first.params)
    assert all(i.relative_error is None for i in again.layers)
    by_hand = nn.Sequential(FP4Linear.from_weight(torch.randn(32, 32)), nn.Linear(32, 32))
    report = fp4_inductor.report(by_hand)
    assert report.coverage == pytest.approx(50.0)
    assert [s.name for s in report.uncovered] == ["1.weight"]


def test_the_name_report_stays_the_function():
    import fp4_inductor.report

    assert callable(fp4_inductor.report)
    assert fp4_inductor.report(quantize_model(Net(), progress=False)).coverage == 100.0
