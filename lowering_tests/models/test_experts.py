"""FP4Experts and the Transformers backend: padding, casts, indexing, save and load, both doors, fullgraph, generate."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import fp4_inductor
from fp4_inductor import NVFP4Config, NVFP4Tensor, errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.integrations.transformers import NAME, use_experts_backend
from fp4_inductor.kernels.moe import by_expert
from fp4_inductor.modules import FP4Experts
from fp4_inductor.modules.experts import quantize_stack
from fp4_inductor.ops.activation import Activation
from lowering_tests.models.doors import as_parameters

IDS = torch.arange(24).reshape(2, 12) % 128


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def experts_of(model) -> list[FP4Experts]:
    return [m for m in model.modules() if isinstance(m, FP4Experts)]


def quantized(tiny, family, dtype=None, **config):
    return fp4_inductor.quantize_model(tiny(family, dtype), NVFP4Config(**config), progress=False)


# --- the container -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("h", "inner"), [(40, 24), (48, 20), (33, 16), (32, 32)])
def test_padding_changes_nothing(h, inner, transposed, gated, interleaved):
    """Against the same experts dequantised without their padding, in float64."""
    if interleaved and not gated:
        pytest.skip("there is nothing to interleave")
    act = Activation("swiglu_oai", 1.702, 0.5, interleaved) if gated else Activation("relu2")
    rows = 2 * inner if gated else inner
    first, down = torch.randn(3, rows, h), torch.randn(3, h, inner)
    b1, b2 = torch.randn(3, rows), torch.randn(3, h)
    extra = -inner % 16
    pad = (1, 2 * extra) if interleaved else (2 if gated else 1, extra)
    stored = [t.mT.contiguous() if transposed else t for t in (first, down)]
    packed = FP4Experts(quantize_stack(stored[0], b1, transposed=transposed, pad_rows=pad), quantize_stack(stored[1], b2, transposed=transposed), act)
    assert packed.first.shape == (3, rows, h)
    assert packed.down_proj.shape == (3, h, inner)
    x, ids, w = torch.randn(5, h), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    got = packed(x, ids, w)

    def own(t, k):
        w = nvfp4.dequantize(*nvfp4.quantize(torch.nn.functional.pad(t, (0, -k % 16))), torch.float32)
        return w[..., :k].double()

    up, dn = own(first, h), own(down, inner)
    want = torch.zeros(5, h, dtype=torch.float64)
    for t in range(5):
        for j in range(2):
            e = int(ids[t, j])
            hidden = act(up[e] @ x[t].double() + b1[e].double(), inner)
            want[t] += w[t, j].double() * (dn[e] @ hidden + b2[e].double())
    assert float((got.double() - want).norm() / want.norm()) < 4e-6


def test_one_expert_at_a_time_is_all_at_once():
    w = torch.randn(5, 32, 48)
    packed = quantize_stack(w, None, scale_search="four_over_six")
    for e in range(5):
        qdata, scale, g = nvfp4.quantize(w[e], "four_over_six")
        assert torch.equal(packed.qdata[e], qdata)
        assert torch.equal(packed.scale[e].view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(packed.global_scale[e], g)
    flat = quantize_stack(w, None, scale_search="activation", channel_weight=torch.ones(5, 48))
    assert torch.equal(flat.qdata, quantize_stack(w, None, scale_search="mse").qdata)  # uniform weights: the same choice
    skewed = torch.ones(5, 48)
    skewed[2, :16] = 1e4
    other = quantize_stack(w, None, scale_search="activation", channel_weight=skewed)
    assert torch.equal(other.qdata[[0, 1, 3, 4]], flat.qdata[[0, 1, 3, 4]])


def test_index_select_and_slice_are_packed():
    packed = quantize_stack(torch.randn(6, 32, 48), None)
    dense = packed.dequantize(torch.float32)
    ids = torch.tensor([4, 0, 4])
    for part, want in ((packed[3], dense[3]), (packed[1:4], dense[1:4]), (packed[ids], dense[ids]), (packed.weight.index_select(0, ids), dense[ids])):
        assert isinstance(part, NVFP4Tensor)
        assert torch.equal(part.dequantize(torch.float32), want)


def test_casts_copies_and_state_dicts_keep_every_bit(tiny):
    model = quantized(tiny, "gpt_oss")
    before = {n: b.clone() for n, b in model.named_buffers() if "experts" in n}
    bits = {n: b.view(torch.uint8) for n, b in before.items() if not n.endswith("bias")}
    empty = copy.deepcopy(model).to("meta").to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model).bfloat16(), copy.deepcopy(model).half().float(), empty):
        after = dict(other.named_buffers())
        assert all(after[n].dtype == before[n].dtype for n in bits)
        assert all(torch.equal(after[n].view(torch.uint8), bits[n]) for n in bits)
    half = copy.deepcopy(model).bfloat16()
    assert {m.first.dtype for m in experts_of(half)} == {torch.bfloat16}
    assert all(m.first.bias.dtype == torch.bfloat16 for m in experts_of(half))
    assert logits(half).dtype == torch.bfloat16
    # The hidden state may have leading dimensions of its own.
    m = experts_of(model)[0]
    x, ids, w = torch.randn(2, 3, 64), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    assert torch.equal(m(x, ids, w), m(x.flatten(0, 1), ids, w).view(2, 3, 64))
    with pytest.raises(errors.ShapeError, match="routing"):
        m(x)
    with pytest.raises(errors.DTypeError, match="high-precision"):
        m.first.double()


def test_llama4_computes_only_the_tokens_an_expert_was_chosen_for(tiny, monkeypatch):
    experts = experts_of(quantized(tiny, "llama4"))[0]
    x = torch.randn(4, 6, 64)
    x[torch.rand(4, 6) < 0.7] = 0
    chosen = int((x != 0).any(-1).sum())
    rows = []
    real = by_expert.linear.product
    monkeypatch.setattr(by_expert.linear, "product", lambda x, *a: rows.append(x.shape[0]) or real(x, *a))
    got = experts(x.flatten(0, 1))
    assert sum(rows) == 2 * chosen < 2 * 24  # two products each
    up, down = (m.dequantize(torch.float32).double() for m in (experts.first, experts.down_proj))
    gate, value = torch.bmm(x.double(), up.mT).chunk(2, -1)
    want = torch.bmm(torch.nn.functional.silu(gate) * value, down.mT).flatten(0, 1)
    assert float((got.double() - want).norm() / want.norm()) < 4e-6


# --- the backend -------------------------------------------------------------------------------------------------


def test_quantize_model_chooses_the_backend(tiny, moe_family):
    """And the experts of every family are one graph for every number of tokens."""
    model = quantized(tiny, moe_family)
    assert model.config._experts_implementation == ("eager" if moe_family == "llama4" else NAME)
    experts = experts_of(model)[0]
    graphs = []
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend=lambda gm, _: graphs.append(gm) or gm)
    for t in (12, 5, 40):
        args = (torch.randn(4 * t, 64),) if experts.dense else (torch.randn(t, 64), torch.randint(0, 4, (t, 2)), torch.rand(t, 2))
        with torch.no_grad():
            assert torch.equal(compiled(*args), experts(*args))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_a_whole_model_is_one_graph(tiny):
    model = quantized(tiny, "gpt_oss")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for ids in (IDS + 1, IDS[:, :5] + 1):
        got, want = logits(compiled, ids), logits(model, ids)
        assert (got - want).norm() / want.norm() < 2e-5
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])
def test_both_doors_give_the_same_bits(tiny, name):
    dense = tiny(name)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), ignore=[r"re:(?!.*\.experts$)"], progress=False)
    other = as_parameters(dense, model)
    assert use_experts_backend(other)
    assert other.config._experts_implementation == NAME
    assert torch.equal(logits(other), logits(model))


def test_experts_left_in_high_precision_run_as_before(tiny):
    dense = tiny("mixtral", torch.bfloat16)
    model = fp4_inductor.quantize_model(copy.deepcopy(dense), ignore=["model.layers.0.mlp.experts", r"re:(?!.*\.experts$)"], progress=False)
    assert len(experts_of(model)) == 1
    twin = copy.deepcopy(dense)
    twin.model.layers[1] = model.model.layers[1]
    assert model.config._experts_implementation == NAME
    assert twin.config._experts_implementation == "grouped_mm"
    assert torch.equal(logits(model), logits(twin))


def test_the_backend_refuses_what_it_cannot_compute(tiny):
    model = tiny("mixtral")
    own = model.model.layers[0].mlp.experts
    own.down_proj = torch.nn.Parameter(NVFP4Tensor.from_dense(own.down_proj), requires_grad=False)
    with pytest.raises(errors.GatingError, match=r"model\.layers\.0\.mlp\.experts"):
        use_experts_backend(model)
    assert not use_experts_backend(tiny("llama"))
    assert not use_experts_backend(torch.nn.Linear(2, 2))


def test_generate_with_a_static_cache(tiny):
    model = quantized(tiny, "qwen3_moe")
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    want = model.generate(IDS[:1], **options)
    got = model.generate(IDS[:1], cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(got, want)
    assert model.config._experts_implementation == NAME


# --- native checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h", "llama4"])
def test_save_and_load(tiny, name, tmp_path):
    model = quantized(tiny, name)
    fp4_inductor.save(model, tmp_path)
    dense = tiny(name)
    factory = type(dense)
    for target in (lambda: factory(copy.deepcopy(dense.config)), dense, copy.deepcopy(model)):
        loaded = fp4_inductor.load(target, tmp_path)
        assert torch.equal(logits(loaded.eval()), logits(model))
        state, want = loaded.state_dict(), model.state_dict()
        assert state.keys() == want.keys()
        assert all(torch.equal(state[n].flatten().view(torch.uint8), want[n].flatten().view(torch.uint8)) for n in want)
        assert loaded.config._experts_implementation == model.config._experts_implementation
    report, want = fp4_inductor.report(loaded), fp4_inductor.report(model)
    assert report.coverage == 100.0
    assert {i.name: i.relative_error for i in report.layers} == {i.name: i.relative_error for i in want.layers}


def test_a_checkpoint_of_other_experts_is_refused_and_nothing_changes(tiny, tmp_path):
    fp4_inductor.save(quantized(tiny, "mixtral"), tmp_path)
    for other in ("qwen3_moe", "llama", "llama4"):
        model = tiny(other)
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(errors.CheckpointError, match="experts"):
            fp4_inductor.load(model, tmp_path)
        assert kinds == [type(m) for m in model.modules()]
    model = tiny("mixtral")
    model.lm_head = torch.nn.Linear(64, 77)  # fits nowhere: found after the experts were put in place
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(errors.CheckpointError, match="lm_head"):
        fp4_inductor.load(model, tmp_path)
    assert kinds == [type(m) for m in model.modules()]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation", {"name": "swish", "alpha": 1.0, "limit": None, "interleaved": False}),
        ("activation", {"name": "silu", "alpha": "1", "limit": None, "interleaved": False}),
        ("activation", ["silu"]),
        ("gate_up", [4, 192]),
        ("gate_up", [4, 100, 64]),
        ("down", [4, 64]),
        ("first", "weight"),
        ("bias", 1),
        ("prefill", "fp4"),
        ("dtype", "float8"),
    ],
)
def test_an_altered_manifest_is_refused(tiny, tmp_path, field, value):
    from fp4_inductor.checkpoint import manifest as mf

    fp4_inductor.save(quantized(tiny, "mixtral"), tmp_path)
    file = tmp_path / mf.FILE
    body = json.loads(file.read_text())
    next(iter(body["experts"].values()))[field] = value
    body["checksum"] = mf.checksum(body)
    file.write_text(json.dumps(body))
    with pytest.raises(errors.CheckpointError, match=field):
        fp4_inductor.load(tiny("mixtral"), tmp_path)


# --- bad weights --------------------------------------------------------------------------------------------------


def _nan(experts):
    with torch.no_grad():
        experts.down_proj[2, 3, 4] = float("nan")


def _cast(experts):
    experts.double()


def _split(experts):
    experts.down_proj.data = experts.down_proj.data.bfloat16()


def _offloaded(experts):
    experts.forward = experts.forward


def _more(experts):
    experts.register_buffer("extra", torch.zeros(1))


def _tied(experts):
    experts.down_proj = experts.other.down_proj


BAD = {
    "NaN": (_nan, errors.NonFiniteError, r"layers\.1\.mlp\.experts\.down_proj.*1 of"),
    "float64": (_cast, errors.DTypeError, r"layers\.1\.mlp\.experts\.(gate_up_proj|down_proj|\{gate_up_proj,down_proj\})"),
    "two dtypes": (_split, errors.DeviceError, r"layers\.1\.mlp\.experts.*bfloat16"),
    "offloaded": (_offloaded, errors.ConfigError, r"layers\.1\.mlp\.experts\.forward was replaced"),
    "a buffer": (_more, errors.ConfigError, r"layers\.1\.mlp\.experts holds more.*extra"),
    "tied": (_tied, errors.CoverageError, r"tied to model\.layers\.[01]\.mlp\.experts\.down_proj"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_experts_are_named_and_nothing_changes(tiny, case):
    spoil, error, message = BAD[case]
    model = tiny("mixtral")
    experts = model.model.layers[1].mlp.experts
    object.__setattr__(experts, "other", model.model.layers[0].mlp.experts)
    spoil(experts)
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(error, match=message):
        fp4_inductor.quantize_model(model, NVFP4Config("amax"), progress=False)
    assert kinds == [type(m) for m in model.modules()]
    assert not experts_of(model)


# --- calibration -------------------------------------------------------------------------------------------------


def test_calibration_sees_the_tokens_routed_to_each_expert(tiny):
    from fp4_inductor.models.calibrate import statistics
    from fp4_inductor.models.plan import make_plan

    model = tiny("mixtral")
    seen = []
    own = model.model.layers[0].mlp.experts
    own.register_forward_pre_hook(lambda m, args: seen.append([a.detach() for a in args]))
    plan = make_plan(model)
    found = statistics(model, plan.targets, [(IDS,), (IDS[:1] + 3,)], strict=True, experts=plan.experts)[plan.experts[0].name].result()
    x, ids = torch.cat([s[0] for s in seen]), torch.cat([s[1] for s in seen])
    for e in range(4):
        mine = x[(ids == e).any(-1)].double()
        gate, up = (mine @ own.gate_up_proj[e].detach().double().t()).chunk(2, -1)
        torch.testing.assert_close(found.first[e].double(), mine.square().mean(0), rtol=1e-5, atol=1e-12)
        torch.testing.assert_close(found.down[e].double(), (torch.nn.functional.silu(gate) * up).square().mean(0), rtol=1e-4, atol=1e-12)
    assert not found.notes


def test_experts_without_calibration_tokens_take_the_layer_mean(tiny):
    model = tiny("qwen3_moe")
    one = torch.zeros(1, 1, dtype=torch.long)  # one token reaches two of eight experts
    report = fp4_inductor.report(fp4_inductor.quantize_model(model, NVFP4Config("activation", calibration=[(one,)]), progress=False))
    notes = {n for i in report.layers for n in i.notes}
    assert any(n == "6 of 8 experts without calibration tokens: the layer's mean" for n in notes), notes
    assert logits(model).isfinite().all()


def test_calibration_that_is_not_finite_names_the_experts(tiny):
    model = tiny("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj.mul_(1e30)
    with pytest.raises(errors.NonFiniteError, match=r"layers\.1\.mlp\.experts"):
        fp4_inductor.quantize_model(model, NVFP4Config("activation", calibration=[(IDS,)]), progress=False)
