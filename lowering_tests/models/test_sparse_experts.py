"""Sparse24Config on models with experts: which tokens prune whom, budgets, checkpoints, both doors, compiled graphs, and what is refused."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config, Sparse24Linear, errors, explain, quantize_model
from fp4_inductor.formats import pruning, sparse24
from fp4_inductor.integrations.transformers import NAME, use_experts_backend
from fp4_inductor.models.calibrate_experts import between
from fp4_inductor.models.convert import unpadded
from fp4_inductor.models.hessian import moments_of
from fp4_inductor.models.plan import make_plan
from fp4_inductor.models.routed import RoutedInputs
from fp4_inductor.models.sparsify_experts import quantize_experts
from fp4_inductor.modules import FP4Experts, FP4ExpertWeight, Sparse24ExpertWeight
from fp4_inductor.modules.experts import quantize_stack
from fp4_inductor.ops.activation import Activation
from lowering_tests.models.doors import as_parameters

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::fp4_inductor.errors.QualityWarning")
IDS = torch.arange(24).reshape(2, 12) % 128


def batches(count: int = 4, rows: int = 4, length: int = 32):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 128, (rows, length), generator=generator), "use_cache": False} for _ in range(count)]


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def experts_of(model) -> list[FP4Experts]:
    return [m for m in model.modules() if isinstance(m, FP4Experts)]


def weights_of(model) -> list[FP4ExpertWeight]:
    return [w for m in experts_of(model) for w in (m.first, m.down_proj)]


def rows_of(model) -> dict[str, fp4_inductor.report.LayerReport]:
    return {i.name: i for i in fp4_inductor.report(model).layers}


def make_24(model):
    """Every weight 2:4 along K, wherever its layout has K; returns the model."""
    plan = make_plan(model)
    pairs = [(t.module.weight, t.transposed) for t in plan.targets]
    pairs += [(e.module.get_parameter(n), e.spec.transposed) for e in plan.experts for n in e.spec.parameters[:2]]
    for p, transposed in pairs:
        w = p.data.mT if transposed else p.data
        w = w * sparse24.magnitude_mask(w)
        p.data = w.mT.contiguous() if transposed else w
    return model


# --- the container -----------------------------------------------------------------------------------------------


def packed(experts=4, n=96, k=64, seed=0):
    torch.manual_seed(seed)
    w = torch.randn(experts, n, k)
    parts = sparse24.quantize_sparse24(w, sparse24.magnitude_mask(w))
    out = Sparse24ExpertWeight(experts, n, k, dtype=torch.float32)
    out.put(slice(None), parts)
    return out, parts


def test_indexing_and_parts():
    w, parts = packed()
    assert (w.shape, w.stored, w.storage().bits_per_weight) == ((4, 96, 64), (4, 96, 64), 3.5)
    dense = sparse24.dequantize_sparse24(*parts, torch.float32)
    assert torch.equal(w.dequantize(), dense)
    for index in (2, slice(1, 3), torch.tensor([3, 0, 3])):
        part = w[index]
        assert type(part) is fp4_inductor.Sparse24NVFP4Tensor
        assert torch.equal(part.dequantize(), dense[index])
    assert w[2].values.data_ptr() == w.values[2].data_ptr()  # no copy
    other = Sparse24ExpertWeight(4, 96, 64, dtype=torch.float32)
    assert not other.dequantize().any()
    other.put(1, w[1].parts())
    assert torch.equal(other.dequantize()[1], dense[1])
    assert not other.dequantize()[[0, 2, 3]].any()


def test_state_dict_casts_and_illegal_metadata():
    w, _ = packed()
    half = copy.deepcopy(w).half()
    assert half.dtype == torch.float16
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(half.parts()[:3], w.parts()[:3], strict=True))
    state = w.state_dict()
    assert set(state) == {"values", "meta", "scale", "global_scale"}
    state["meta"] = state["meta"].clone()
    state["meta"][1, 2, 3] = 0x54
    with pytest.raises(errors.SparsityError, match="0x54"):
        Sparse24ExpertWeight(4, 96, 64).load_state_dict(state)


def test_weights_that_do_not_belong_together():
    with pytest.raises(errors.ShapeError, match=r"\(4, 96, 64\), \(4, 64, 32\)"):
        FP4Experts(packed()[0], packed(n=64, k=32)[0], Activation())


@pytest.mark.parametrize("mixed", [False, True])
def test_compiled_forward_is_the_eager_one(mixed):
    first = quantize_stack(torch.randn(4, 128, 64), None) if mixed else packed(n=128)[0]
    experts = FP4Experts(first, packed(n=64, k=64)[0], Activation())
    compiled = torch.compile(experts, fullgraph=True, dynamic=True, backend="aot_eager")
    for t in (2, 5):
        args = torch.randn(t, 64), torch.randint(0, 4, (t, 2)), torch.rand(t, 2)
        assert torch.equal(compiled(*args), experts(*args))
    (row,) = explain(experts, *args).rows
    assert (row.op, row.kernel, row.k) == ("fp4.moe", "cpu", 64)


# --- whole models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h", "llama4"])
@pytest.mark.parametrize("pruning", ["magnitude", "sparsegpt"])
def test_every_layout(tiny, name, pruning):
    """Concatenated and interleaved gates, [E, N, K] and [E, K, N], biases, no gate, experts called without routing."""
    model = tiny(name)
    dense = logits(model)
    quantize_model(model, Sparse24Config(pruning, calibration=batches() if pruning != "magnitude" else None, accept_loss=True), progress=False)
    assert experts_of(model)
    assert all(type(w) is Sparse24ExpertWeight for w in weights_of(model))
    report = fp4_inductor.report(model)
    assert report.coverage == 100.0
    assert report.bits_per_weight == 3.5
    assert all((i.output_error is not None) == (pruning != "magnitude") for i in report.layers)
    assert 0.0 < (logits(model) - dense).norm() / dense.norm() < 0.9
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_existing_keeps_every_pattern(tiny, name):
    model = make_24(tiny(name))
    plan = make_plan(model)
    masks = {e.name: [(p.mT if e.spec.transposed else p).detach() != 0 for p in map(e.module.get_parameter, e.spec.parameters[:2])] for e in plan.experts}
    quantize_model(model, Sparse24Config(), progress=False)
    for name_, own in masks.items():
        module = model.get_submodule(name_)
        for w, mask in zip((module.first, module.down_proj), own, strict=True):
            assert type(w) is Sparse24ExpertWeight
            assert not (w.dequantize()[:, : mask.shape[1], : mask.shape[2]] != 0)[~mask].any()
    assert max(i.relative_error for i in fp4_inductor.report(model).layers) < 0.12


def odd_sizes(kind, **sizes):
    import transformers

    torch.manual_seed(0)
    kinds = {"mixtral": transformers.MixtralConfig, "gpt_oss": transformers.GptOssConfig}
    common = dict(vocab_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
    config = kinds[kind](num_local_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **common, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("which", ["both", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_sizes_that_are_padded(kind, which, tmp_path):
    """H and I multiples of 16 only: a sparse weight is padded to 32 along K, and what I is padded with, gates and ups get as rows."""
    model = odd_sizes(kind, hidden_size=80, intermediate_size=48)
    layers = None if which == "both" else [f"re:.*experts.{which}"]
    twin = copy.deepcopy(model)
    quantize_model(model, Sparse24Config("magnitude", accept_loss=True, layers=layers), progress=False)
    (experts,) = experts_of(model)
    own = twin.get_submodule(next(n for n, m in model.named_modules() if m is experts))
    assert experts.first.stored == (4, 128 if which != "gate_up_proj" else 96, 96 if which != "down_proj" else 80)
    assert experts.down_proj.stored == (4, 80, 64 if which != "gate_up_proj" else 48)
    for part in ("gate_up_proj", "down_proj"):
        row = rows_of(model)[next(n for n in rows_of(model) if n.endswith(part))]
        assert row.shape == tuple(getattr(own, part).shape) if kind == "mixtral" else row.params == getattr(own, part).numel()
    x, ids, w = torch.randn(5, 80), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    for part, p in (("gate_up_proj", own.gate_up_proj), ("down_proj", own.down_proj)):
        dense = p.data.mT if own.is_transposed else p.data
        packed_ = getattr(experts, part)
        pad = (1, 0) if part == "down_proj" else (1, 2 * (experts.down_proj.stored[2] - 48)) if kind == "gpt_oss" else (2, experts.down_proj.stored[2] - 48)
        q = unpadded(packed_.dequantize(), packed_.columns, pad)
        assert q.shape == dense.shape
        p.data = (q.mT if own.is_transposed else q).contiguous()
    with torch.no_grad():
        want, got = own(x, ids, w), experts(x, ids, w)
    assert (got - want).norm() / want.norm() < 1e-5
    fp4_inductor.save(model, tmp_path)
    assert torch.equal(logits(fp4_inductor.load(lambda: odd_sizes(kind, hidden_size=80, intermediate_size=48), tmp_path)), logits(model))


def test_existing_names_the_experts_that_are_dense(tiny):
    model = make_24(tiny("mixtral"))
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[[0, 2]] += 1.0
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(errors.SparsityError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: \[4, 64, 96\] \(2 of 4 experts\)") as caught:
        quantize_model(model, Sparse24Config(), progress=False)
    assert "1 of 12 layers" in str(caught.value)
    assert not experts_of(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_names_choose_weights_of_experts(tiny):
    model = tiny("mixtral")
    quantize_model(model, Sparse24Config("magnitude", accept_loss=True, layers=["layers.0.mlp.experts", "re:.*1.mlp.experts.down_proj"]), progress=False)
    sparse = {name for name, row in rows_of(model).items() if row.format == "sparse24_nvfp4"}
    stem = "model.layers.{}.mlp.experts.{}_proj"
    assert sparse == {stem.format(0, "gate_up"), stem.format(0, "down"), stem.format(1, "down")}
    kinds = [type(w) for w in weights_of(model)]
    assert kinds == [Sparse24ExpertWeight, Sparse24ExpertWeight, FP4ExpertWeight, Sparse24ExpertWeight]
    assert logits(model).isfinite().all()
    text = fp4_inductor.report(model).text(1000)
    assert "3.5 bits sparse24_nvfp4" in text
    assert "gate_up_proj (1)" in text


@pytest.mark.parametrize("bits", [3.5, 4.0, 4.5])
def test_a_budget_spends_itself_on_experts_too(tiny, bits):
    model = tiny("mixtral")
    quantize_model(model, Sparse24Config("sparsegpt", calibration=batches(), bits=bits), progress=False)
    rows = rows_of(model)
    largest = max(r.params for r in rows.values()) / sum(r.params for r in rows.values())
    assert bits - largest <= fp4_inductor.report(model).bits_per_weight <= bits
    assert any(r.format == "sparse24_nvfp4" for n, r in rows.items() if "experts" in n) == (bits < 4.5)


def test_max_error_and_max_kl(tiny):
    every = tiny("mixtral")
    every.lm_head.weight.data *= 30  # a random model has no opinion; this one has, so that its KL is of a size
    for config in ({"max_error": 0.0}, {"max_error": 1.0}, {"max_kl": 100.0}):
        model = quantize_model(copy.deepcopy(every), Sparse24Config("wanda", calibration=batches(), **config), progress=False)
        assert {r.format for r in rows_of(model).values()} == ({"nvfp4"} if config == {"max_error": 0.0} else {"sparse24_nvfp4"})
    before = {k: v.clone() for k, v in every.state_dict().items()}
    with pytest.raises(errors.ConfigError, match="less than dense NVFP4 costs"):
        quantize_model(every, Sparse24Config("wanda", calibration=batches(), max_kl=1e-7), progress=False)
    assert all(torch.equal(v, before[k]) for k, v in every.state_dict().items())


def test_with_nothing_chosen_the_model_is_what_dense_nvfp4_gives(tiny):
    one, other = tiny("qwen3_moe"), tiny("qwen3_moe")
    quantize_model(one, Sparse24Config("wanda", calibration=batches(), bits=4.5), progress=False)
    quantize_model(other, NVFP4Config("activation", calibration=batches()[:-1], siblings="separate"), progress=False)
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), name


# --- whose tokens ------------------------------------------------------------------------------------------------


def watched(model, data):
    """The first module of experts as a target, and what it was fed with."""
    target = make_plan(model).experts[0]
    inputs, seen = RoutedInputs(target), []
    handle = target.module.register_forward_pre_hook(lambda m, args, kwargs: seen.append([*args, *kwargs.values()]), with_kwargs=True)
    with torch.no_grad():
        for b in data:
            model(**b)
    handle.remove()
    for values in seen:
        inputs.add(values)
    return target, inputs, seen


def test_an_expert_is_pruned_from_the_tokens_it_saw(tiny, monkeypatch):
    monkeypatch.setattr("fp4_inductor.models.sparsify_experts._ENOUGH", 1)
    model = tiny("mixtral")
    target, inputs, seen = watched(model, batches())
    x, ids = torch.cat([v[0] for v in seen]), torch.cat([v[1] for v in seen])
    assert inputs.tokens == [int((ids == e).any(-1).sum()) for e in range(4)]
    assert min(inputs.tokens) > 96  # none is short
    config = Sparse24Config("sparsegpt", calibration=batches())
    names = {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"}
    both = quantize_experts(target, config, names, None, inputs)
    for e in range(4):
        mine = x[(ids == e).any(-1)]
        want = pruning.sparsegpt(target.module.gate_up_proj.detach()[e], moments_of(mine).mean(), "activation")
        assert all(torch.equal(a, b) for a, b in zip(both[0].weight[e].parts(), want, strict=True))
        h = between(target.module, target.spec, e, mine)
        want = pruning.sparsegpt(target.module.down_proj.detach()[e], moments_of(h).mean(), "activation")
        assert all(torch.equal(a, b) for a, b in zip(both[1].weight[e].parts(), want, strict=True))
    assert both[0].notes == ()
    one = pruning.sparsegpt(target.module.gate_up_proj.detach()[0], moments_of(x).mean(), "activation")
    assert not torch.equal(both[0].weight[0].parts()[0], one.values)  # all tokens would give another weight


def test_experts_with_too_few_tokens_are_named_and_borrow(tiny):
    model = tiny("qwen3_moe")
    data = [{"input_ids": torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(3)), "use_cache": False}]
    _, inputs, seen = watched(model, data)
    hidden = torch.cat([v[0] for v in seen])
    own, e = min((n, e) for e, n in enumerate(inputs.tokens))
    assert own < 64
    assert len(inputs.inputs(e)[0]) == own
    x, _ = inputs.inputs(e, 64)
    assert len(x) == 64
    assert len(torch.unique(x, dim=0)) == len(torch.unique(hidden, dim=0)[:64])  # none twice
    quantize_model(model, Sparse24Config("sparsegpt", calibration=data), progress=False)
    notes = rows_of(model)["model.layers.0.mlp.experts.gate_up_proj"].notes
    assert any(re.match(r"8 of 8 experts saw fewer than 512 calibration tokens \(\d saw \d+, \d saw", n) for n in notes), notes
    assert "stood in for the rest" in fp4_inductor.report(model).text(1000)
    assert logits(model).isfinite().all()


def test_a_layer_with_too_few_tokens_is_refused(tiny):
    model = tiny("mixtral")
    short = [{"input_ids": torch.randint(3, 128, (2, 35)), "use_cache": False}]  # 70 tokens: enough for K = 64, not for K = 96
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(errors.CalibrationError, match=r"70 rows for model\.layers\.1\.mlp\.experts.*>= 96 rows"):
        quantize_model(model, Sparse24Config("sparsegpt", calibration=short), progress=False)
    assert kinds == [type(m) for m in model.modules()]


def test_later_layers_are_calibrated_behind_pruned_experts(tiny):
    """Sequential methods: what the second block is fed with has changed, and its target is the dense model's output."""
    results = {}
    for first in (["re:model.layers.*"], ["re:model.layers.1.*"]):
        model = tiny("mixtral")
        quantize_model(model, Sparse24Config("sparsegpt", calibration=batches(), layers=first), progress=False)
        results[len(first[0])] = model.model.layers[1].mlp.experts.down_proj.values
    a, b = results.values()
    assert not torch.equal(a, b)


def test_experts_that_are_not_reached(tiny):
    model = tiny("mixtral")
    model.model.layers[1].mlp.forward = lambda h: h  # the block's experts never run
    with pytest.raises(errors.CalibrationError, match=r"layers\.1\.mlp\.experts"):
        quantize_model(model, Sparse24Config("wanda", calibration=batches()), progress=False)
    quantize_model(model, Sparse24Config("wanda", calibration=batches()), progress=False, strict=False)
    row = rows_of(model)["model.layers.1.mlp.experts.gate_up_proj"]
    assert row.format == "nvfp4"
    assert any("not reached by calibration" in n for n in row.notes)
    assert type(model.model.layers[0].mlp.experts.down_proj) is Sparse24ExpertWeight


def test_calibration_that_is_not_finite(tiny):
    model = tiny("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj.mul_(1e30)
    with pytest.raises(errors.NonFiniteError, match=r"layers\.1\.mlp\.experts"):
        quantize_model(model, Sparse24Config("sparsegpt", calibration=batches()), progress=False)
    assert not experts_of(model)
    assert not any(isinstance(m, FP4Linear) for m in model.modules())


# --- doors and checkpoints ---------------------------------------------------------------------------------------


def sparse(tiny, name, **options):
    return quantize_model(tiny(name), Sparse24Config("magnitude", accept_loss=True, **options), progress=False)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])
def test_both_doors_give_the_same_bits(tiny, name):
    dense = tiny(name)
    ignore = [r"re:(?!.*\.experts$)"]
    model = quantize_model(copy.deepcopy(dense), Sparse24Config("magnitude", accept_loss=True), ignore=ignore, progress=False)
    as_parameters(dense, model)
    assert use_experts_backend(dense)
    assert dense.config._experts_implementation == NAME
    assert torch.equal(logits(dense), logits(model))


@pytest.mark.parametrize("layers", [None, ["re:.*down_proj"]])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4"])
def test_save_and_load(tiny, name, layers, tmp_path):
    model = sparse(tiny, name, layers=layers)
    fp4_inductor.save(model, tmp_path)
    dense = tiny(name)
    for target in (lambda: type(dense)(copy.deepcopy(dense.config)), dense, copy.deepcopy(model)):
        loaded = fp4_inductor.load(target, tmp_path).eval()
        assert [type(w) for w in weights_of(loaded)] == [type(w) for w in weights_of(model)]
        assert torch.equal(logits(loaded), logits(model))
    assert fp4_inductor.report(loaded).bits_per_weight == fp4_inductor.report(model).bits_per_weight
    assert fp4_inductor.report(loaded).coverage == 100.0


def test_dense_experts_are_written_as_before(tiny, tmp_path):
    fp4_inductor.save(quantize_model(tiny("mixtral"), NVFP4Config("amax"), progress=False), tmp_path)
    from fp4_inductor.checkpoint import manifest as mf

    body = json.loads((tmp_path / mf.FILE).read_text())
    assert all("storages" not in e for e in body["experts"].values())


@pytest.mark.parametrize("value", [["nvfp4"], ["nvfp4", "nvfp4", "nvfp4"], "sparse24_nvfp4", ["fp8", "nvfp4"], [1, 2], ["nvfp4", "sparse24_nvfp4"], None])
def test_altered_storages_are_refused(tiny, tmp_path, value):
    from fp4_inductor.checkpoint import manifest as mf

    fp4_inductor.save(sparse(tiny, "mixtral"), tmp_path)
    body = json.loads((tmp_path / mf.FILE).read_text())
    entry = next(iter(body["experts"].values()))
    assert entry["storages"] == ["sparse24_nvfp4", "sparse24_nvfp4"]
    entry["storages"] = value
    body["checksum"] = mf.checksum(body)
    (tmp_path / mf.FILE).write_text(json.dumps(body))
    model = tiny("mixtral")
    with pytest.raises(errors.CheckpointError, match=r"qdata is missing" if value == ["nvfp4", "sparse24_nvfp4"] else r"storages"):
        fp4_inductor.load(model, tmp_path)
    assert not experts_of(model)


def test_illegal_metadata_in_a_checkpoint(tiny, tmp_path):
    model = sparse(tiny, "mixtral")
    model.model.layers[1].mlp.experts.down_proj.meta[3, 2, 1] = 0x45
    fp4_inductor.save(model, tmp_path)
    with pytest.raises(errors.CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj\.meta: 2:4 metadata is corrupt.*0x45 at \(3, 2, 1\)"):
        fp4_inductor.load(tiny("mixtral"), tmp_path)


def test_layouts_without_a_sparse_form_refuse(tiny, tmp_path):
    model = sparse(tiny, "mixtral", layers=["re:.*experts.down_proj"])
    with pytest.raises(errors.CheckpointError, match="2:4-sparse"):
        fp4_inductor.export_pretrained(model, tmp_path, "compressed-tensors")


def test_linear_layers_are_pruned_as_they_were(tiny):
    """The model's attention and shared layers beside the experts."""
    model = sparse(tiny, "deepseek_v3")
    assert all(type(m) is Sparse24Linear for m in model.modules() if isinstance(m, FP4Linear))
    assert fp4_inductor.report(model).bits_per_weight == 3.5
