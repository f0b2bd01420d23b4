"""``prefill="nvfp4"`` (W4A4): what is rounded and what is not, on a CPU; configuration, report, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config, dispatch, errors
from fp4_inductor.formats import nvfp4
from fp4_inductor.modules import FP4Experts, FP8Linear, Sparse24Linear
from fp4_inductor.ops import linear_w4a4, quantize_rows_nvfp4

fp4 = torch.ops.fp4
LIMIT = 64  # rows up to which a CPU keeps the activations


@pytest.fixture
def weight():
    return nvfp4.quantize(torch.randn(40, 96) / 96**0.5)


def error(y, want) -> float:
    return float((y.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_rows_are_rounded_and_few_are_not(weight, dtype):
    x, bias = torch.randn(2, 40, 96).to(dtype), torch.randn(40).to(dtype)
    few = x[:, :32]
    assert torch.equal(fp4.linear(few, *weight, bias, "nvfp4"), fp4.linear(few, *weight, bias, "bf16"))
    y = fp4.linear(x, *weight, bias, "nvfp4")
    rows = x.view(80, 96)
    scales = quantize_rows_nvfp4.row_scales(rows)
    codes = fp4.quantize_rows_nvfp4(rows, scales)
    want = quantize_rows_nvfp4.dequantize(*codes, scales).double() @ nvfp4.dequantize(*weight, torch.float32).double().T + bias.double()
    assert (y.shape, y.dtype) == ((2, 40, 40), dtype)
    assert error(y.view(80, 40), want) <= linear_w4a4.CONTRACT.tolerance[dtype]
    assert 0.05 < error(y, fp4.linear(x, *weight, bias, "bf16")) < 0.12
    with dispatch(thresholds={"cpu": 100}):
        assert torch.equal(fp4.linear(x, *weight, bias, "nvfp4"), fp4.linear(x, *weight, bias, "bf16"))


def test_rounding_a_gaussian_costs_what_it_costs_weights():
    x = torch.randn(64, 4096)
    scales = quantize_rows_nvfp4.row_scales(x)
    assert error(quantize_rows_nvfp4.dequantize(*fp4.quantize_rows_nvfp4(x, scales), scales), x) < 0.098
    for size in (1e-30, 1e34):
        scaled = quantize_rows_nvfp4.row_scales(x * size)
        assert error(quantize_rows_nvfp4.dequantize(*fp4.quantize_rows_nvfp4(x * size, scaled), scaled).double() / size, x) < 0.098


def test_a_token_is_rounded_alike_in_any_batch_and_a_bad_one_stays_alone(weight):
    x = torch.randn(100, 96)
    alone = [fp4.quantize_rows_nvfp4(row[None], quantize_rows_nvfp4.row_scales(row[None])) for row in x]
    together = fp4.quantize_rows_nvfp4(x, quantize_rows_nvfp4.row_scales(x))
    for part in (0, 1):
        assert torch.equal(torch.cat([a[part].view(torch.uint8) for a in alone]), together[part].view(torch.uint8))
    clean = fp4.linear(x, *weight, None, "nvfp4")
    x[3, 5], x[4, 0], x[5] = float("nan"), float("-inf"), 0
    y = fp4.linear(x, *weight, None, "nvfp4")
    keep = [i for i in range(100) if i not in (3, 4, 5)]
    assert torch.equal(y[keep], clean[keep])
    assert y[[3, 4]].isnan().all()
    assert not y[5].any()


def test_gradients_pass_the_rounding(weight):
    grads = []
    for prefill in ("bf16", "nvfp4"):
        x = torch.randn(80, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
        fp4.linear(x, *weight, None, prefill).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_compiled_and_explained():
    layer = FP4Linear.from_weight(torch.randn(40, 48), torch.randn(40), prefill="nvfp4")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for m in (2, 64, 65, 200):
            x = torch.randn(m, 48)
            assert torch.equal(compiled(x), layer(x))
    for model in (layer, torch.compile(layer)):
        (few,), (many,) = (fp4_inductor.explain(model, torch.randn(m, 48)).rows for m in (64, 65))
        assert (few.regime, few.kernel) == ("cpu", "cpu")
        assert (many.regime, many.kernel) == ("large_nvfp4", "quantize_rows_nvfp4 + linear_w4a4")
        assert many.note.startswith("activations rounded to NVFP4 per token; linear_w4a4: cpu (runs in CI)")


# --- models --------------------------------------------------------------------------------------------------------


def options(model) -> dict[str, str]:
    return {name: m.prefill for name, m in model.named_modules() if isinstance(m, (FP4Linear, FP4Experts))}


def quantized(model, config, **fields):
    return fp4_inductor.quantize_model(model, replace(config, prefill="nvfp4", **fields), progress=False)


@pytest.mark.parametrize("head", ["nvfp4", "fp8"])
def test_experts_and_heads_keep_their_activations(tiny, head):
    model = quantized(tiny("qwen3_moe"), NVFP4Config("four_over_six", lm_head=head))
    kinds = options(model)
    assert {kinds.pop("lm_head")} | {v for n, v in kinds.items() if n.endswith("experts")} == {"auto"}
    assert {v for n, v in kinds.items() if not n.endswith("experts")} == {"nvfp4"}
    (note,) = (n for n in fp4_inductor.report(model).notes if "prefill" in n)
    assert "not measured: no calibration data" in note


def test_the_report_has_the_cost_with_and_without(tiny):
    batches = [torch.randint(0, 128, (2, 48)) for _ in range(2)]
    config = NVFP4Config("activation", calibration=iter(batches))  # read once only
    model = quantized(tiny("llama"), config)
    report = fp4_inductor.report(model)
    assert "prefill=nvfp4" in str(report)
    (note,) = (n for n in report.notes if "prefill" in n)
    total, weights = (float(part.split()[-1]) for part in (note.split(" nats")[0], note.split(" of it")[0]))
    assert report.kl == pytest.approx(total, abs=1e-4)
    assert 0 < weights < total
    assert set(options(model).values()) == {"nvfp4"}
    assert report.warnings == []


def test_a_loud_cost_is_a_warning(tiny, monkeypatch):
    monkeypatch.setattr("fp4_inductor.models.activation_cost.LOUD_KL", 0.0)
    with pytest.warns(errors.QualityWarning, match=r'weights alone .*prefill="auto" keeps the activations'):
        model = quantized(tiny("llama"), NVFP4Config(calibration=[torch.randint(0, 128, (2, 48))]))
    assert "!! NVFP4 weights and activations cost" in fp4_inductor.report(model).text(1000)


@pytest.mark.parametrize("siblings", ["packed", "shared", "separate"])
def test_through_a_checkpoint(tiny, tmp_path, siblings):
    model = quantized(tiny("llama"), NVFP4Config("four_over_six", siblings=siblings))
    fp4_inductor.save(model, tmp_path)
    loaded = fp4_inductor.load(lambda: tiny("llama"), tmp_path)
    assert options(loaded) == options(model)
    assert "activations of many rows are rounded to NVFP4: model.layers.0-1.self_attn.{q_proj" in fp4_inductor.report(loaded).text(1000)
    ids = torch.randint(0, 128, (2, 48))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_through_transformers(tiny, tmp_path):
    from transformers import AutoModelForCausalLM

    tiny("qwen3_moe").save_pretrained(tmp_path / "dense")
    config = fp4_inductor.FP4InductorConfig(scale_search="four_over_six", prefill="nvfp4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "packed")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert options(loaded) == options(model)
    assert set(options(model).values()) == {"nvfp4", "auto"}
    native = fp4_inductor.quantize_model(tiny("qwen3_moe"), NVFP4Config("four_over_six", prefill="nvfp4"), progress=False)
    fp4_inductor.save(native, tmp_path / "native")
    assert fp4_inductor.load(lambda: tiny("qwen3_moe"), tmp_path / "native").config.quantization_config.prefill == "nvfp4"


def test_where_it_is_refused():
    assert NVFP4Config().prefill == "auto"
    with pytest.raises(errors.ConfigError, match="'nvfp4'"):
        Sparse24Config(prefill="nvfp4")
    for make in (FP8Linear, Sparse24Linear):
        with pytest.raises(errors.ConfigError, match=r"'nvfp4'.*\['auto', 'fp8', 'bf16'\]"):
            make(64, 32, prefill="nvfp4")
    w = torch.ops.fp4.sparse_quantize(torch.eye(32), None, "amax", None, None)
    with pytest.raises(errors.ConfigError, match=r"fp4.sparse_linear: unknown prefill; got 'nvfp4'"):
        fp4.sparse_linear(torch.randn(3, 32), *w, None, "nvfp4")


REFUSED = {
    "K": (errors.ShapeError, lambda x, r, q, w: fp4.quantize_rows_nvfp4(x[:, :20], r)),
    "row scales": (errors.ShapeError, lambda x, r, q, w: fp4.quantize_rows_nvfp4(x, r[:2])),
    "row scale dtype": (errors.DTypeError, lambda x, r, q, w: fp4.quantize_rows_nvfp4(x, r.double())),
    "dtype": (errors.DTypeError, lambda x, r, q, w: fp4.quantize_rows_nvfp4(x.double(), r)),
    "device": (errors.DeviceError, lambda x, r, q, w: fp4.quantize_rows_nvfp4(x, r.to("meta"))),
    "product: K": (errors.ShapeError, lambda x, r, q, w: fp4.linear_w4a4(q[0][:, :8], q[1][:, :1], r, *w, None, torch.float32)),
    "product: M": (errors.ShapeError, lambda x, r, q, w: fp4.linear_w4a4(*q, r[:2], *w, None, torch.float32)),
    "product: bias": (errors.ShapeError, lambda x, r, q, w: fp4.linear_w4a4(*q, r, *w, torch.zeros(3), torch.float32)),
    "product: bias dtype": (errors.DTypeError, lambda x, r, q, w: fp4.linear_w4a4(*q, r, *w, torch.zeros(8), torch.bfloat16)),
    "product: dtype": (errors.DTypeError, lambda x, r, q, w: fp4.linear_w4a4(*q, r, *w, None, torch.int8)),
    "product: device": (errors.DeviceError, lambda x, r, q, w: fp4.linear_w4a4(*q, r, *(t.to("meta") for t in w), None, torch.float32)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_operands_are_typed(case):
    x = torch.randn(3, 32)
    rows = quantize_rows_nvfp4.row_scales(x)
    error_class, call = REFUSED[case]
    with pytest.raises(error_class):
        call(x, rows, fp4.quantize_rows_nvfp4(x, rows), nvfp4.quantize(torch.ones(8, 32)))
