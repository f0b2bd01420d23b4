"""Sibling layers in one buffer: bits, moves, copies, state_dict and compiled calls are those of layers on their own."""

from __future__ import annotations

import copy
import io
from unittest import mock

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config
from fp4_inductor.errors import ConfigError, DTypeError
from fp4_inductor.modules import SiblingLinear, SiblingWeight, pack_siblings
from fp4_inductor.modules.siblings import ROWS
from fp4_inductor.passes import matches, reset_matches

BF16 = torch.bfloat16
K = 48


class Attention(nn.Module):
    """Grouped-query sizes; N = 24 and N = 40 are off the 16 rows; only q and v have a bias."""

    def __init__(self, biases=(True, False, True)):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(K, n, bias=b) for n, b in zip((40, 24, 32), biases, strict=True))
        for p in self.parameters():
            p.data = torch.randn(p.shape)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def quantized(siblings="packed", biases=(True, False, True), seed=0):
    torch.manual_seed(seed)
    return fp4_inductor.quantize_model(Attention(biases).to(BF16), NVFP4Config(siblings=siblings), progress=False)


def layers(model):
    return [model.q_proj, model.k_proj, model.v_proj]


def bits(t):
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def same(a, b):
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


def test_one_buffer_and_every_bit_as_if_apart():
    apart, model = quantized("separate"), quantized()
    packed = model.q_proj.packed
    assert all(type(m) is SiblingLinear and m.packed is packed for m in layers(model))
    assert all(type(m) is FP4Linear for m in layers(apart))
    assert len({m.qdata.untyped_storage().data_ptr() for m in layers(model)}) == 1
    assert packed.starts == [0, 48, 80]
    assert all(start % ROWS == 0 for start in packed.starts)
    want, got = apart.state_dict(), model.state_dict()
    assert set(want) == set(got)
    assert same([want[k] for k in sorted(want)], [got[k] for k in sorted(got)])
    x = torch.randn(5, K).to(BF16)
    assert same(apart(x), model(x))


def test_padding_and_missing_biases_add_nothing():
    packed = quantized().q_proj.packed
    assert not packed.qdata[40:48].any()
    assert not packed.scale.view(torch.uint8)[40:48].any()
    bias = packed.bias[48:72]
    assert torch.equal(bias.view(torch.int16), torch.full((24,), -0.0, dtype=BF16).view(torch.int16))
    minus_zero = torch.full((24,), -0.0, dtype=BF16)
    assert torch.equal((minus_zero + bias).view(torch.int16), minus_zero.view(torch.int16))
    assert quantized(biases=(False,) * 3).q_proj.packed.bias is None


def test_memory_is_that_of_the_layers_and_their_padding():
    apart, model = quantized("separate"), quantized()
    pads = model.q_proj.packed.qdata.shape[0] - 40 - 24 - 32
    row = K // 2 + K // 16 + 2
    missing = 24 * 2  # rows of the bias that k_proj has not
    assert fp4_inductor.report(model).bytes_after == fp4_inductor.report(apart).bytes_after + pads * row + missing


def test_moves_and_casts_keep_one_buffer_and_the_bits():
    model = quantized()
    before = [m.qdata.clone() for m in layers(model)] + [m.scale.view(torch.uint8).clone() for m in layers(model)]
    model.to(torch.float16)
    packed = model.q_proj.packed
    assert {m.dtype for m in layers(model)} == {torch.float16} == {packed.bias.dtype}
    assert packed.scale.dtype == torch.float8_e4m3fn
    assert packed.global_scale.dtype == torch.float32
    assert same(before, [m.qdata for m in layers(model)] + [m.scale.view(torch.uint8) for m in layers(model)])
    with pytest.raises(DTypeError):
        model.to(torch.float64)
    assert packed.bias.dtype == torch.float16
    meta = model.to("meta")
    assert {m.qdata.device.type for m in layers(meta)} == {"meta"}
    assert meta.q_proj.packed is meta.v_proj.packed


def test_deepcopy_and_pickle_keep_them_together():
    model = quantized()
    x = torch.randn(3, K).to(BF16)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert twin.q_proj.packed is twin.k_proj.packed is twin.v_proj.packed
        assert twin.q_proj.packed is not model.q_proj.packed
        assert same(model(x), twin(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("source", ["packed", "shared", "separate"])
def test_state_dicts_of_any_kind_load(source, assign):
    model, other = quantized(), quantized(source, seed=1)
    x = torch.randn(3, K).to(BF16)
    assert not same(model(x), other(x))
    model.load_state_dict(other.state_dict(), assign=assign)
    assert same(model(x), other(x))
    if assign:
        assert all(type(m) is FP4Linear for m in layers(model))
    else:
        assert model.q_proj.packed is model.v_proj.packed
        assert model.q_proj.packed.shared == (source == "shared")


def test_wrong_state_dicts_are_refused_as_for_one_layer():
    model, state = quantized(), quantized(seed=1).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*k_proj\.qdata"):
        model.load_state_dict({k: v for k, v in state.items() if k != "k_proj.qdata"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*k_proj\.bias"):
        model.load_state_dict({**state, "k_proj.bias": torch.zeros(24)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "v_proj.scale": state["k_proj.scale"]})
    with pytest.raises(DTypeError, match=r"v_proj\.scale"):
        model.load_state_dict({**state, "v_proj.scale": state["v_proj.scale"].view(torch.uint8)})
    assert all(type(m) is SiblingLinear for m in layers(model))


def test_assigning_a_part_gives_the_layer_buffers_of_its_own():
    model = quantized()
    x = torch.randn(3, K).to(BF16)
    before = model(x)
    model.k_proj.global_scale = model.k_proj.global_scale * 2
    assert type(model.k_proj) is FP4Linear
    assert type(model.q_proj) is SiblingLinear
    after = model(x)
    assert same(before[::2], after[::2])
    assert torch.equal(after[1], (before[1].float() * 2).to(BF16))
    model.q_proj.bias = nn.Parameter(torch.zeros(40, dtype=BF16))
    assert "q_proj.bias" in dict(model.named_parameters())
    assert not torch.equal(model(x)[0], before[0])


def test_layers_that_differ_are_not_packed():
    for a, b in ((FP4Linear(64, 16), FP4Linear(32, 16)), (FP4Linear(64, 16), FP4Linear(64, 16, dtype=torch.float16))):
        with pytest.raises(ConfigError, match="cannot be packed"):
            pack_siblings([a, b])
    one = FP4Linear(64, 16)
    for wrong in ([one], [one, one], []):
        with pytest.raises(ConfigError, match="cannot be packed"):
            pack_siblings(wrong)
    assert type(one) is FP4Linear


def test_weights_and_biases_that_others_hold_stay_apart():
    model = Attention().to(BF16)
    model.other = nn.Linear(K, 40).to(BF16)
    model.other.bias = model.q_proj.bias
    fp4_inductor.quantize_model(model, progress=False)
    assert type(model.q_proj) is FP4Linear
    assert model.q_proj.bias.data_ptr() == model.other.bias.data_ptr()
    assert type(model.k_proj) is type(model.v_proj) is SiblingLinear


def test_different_inputs_and_single_siblings_are_right():
    """LoRA-like code calls one sibling, cross attention gives q another input."""
    apart, model = quantized("separate"), quantized()

    def forward(m, x, y):
        return m.q_proj(x), m.k_proj(y), m.v_proj(y) + m.k_proj(y)[:, :1]

    def alone(m, x, y):
        return (m.k_proj(x) + y[:, :24],)

    x, y = torch.randn(2, 3, K).to(BF16).unbind()
    for f, merged in ((forward, 1), (alone, 0)):
        reset_matches()
        compiled = torch.compile(f, fullgraph=True)
        assert same(compiled(model, x, y), f(apart, x, y))
        assert matches().get("siblings", 0) == merged


@pytest.mark.parametrize("siblings", ["packed", "shared"])
@pytest.mark.parametrize("m", [1, 3, 40])
def test_compiled_calls_are_one_and_bit_identical(siblings, m):
    model = quantized(siblings)
    x = torch.randn(m, K).to(BF16)
    reset_matches()
    assert same(torch.compile(model, fullgraph=True)(x), model(x))
    assert matches() == {"siblings": 1}


def test_without_packing_nothing_is_merged():
    model = quantized("separate")
    reset_matches()
    torch.compile(model, fullgraph=True)(torch.randn(3, K).to(BF16))
    assert matches() == {}


def test_a_new_state_reaches_compiled_code():
    model, other = quantized("shared"), quantized("separate", seed=1)
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(3, K).to(BF16)
    compiled(x)
    model.load_state_dict(other.state_dict())
    assert same(compiled(x), other(x))
    model.k_proj.unpack()
    model.k_proj.bias = torch.ones(24, dtype=BF16)
    assert same(compiled(x), model(x))


def test_export_and_its_archive():
    model = quantized()
    x = torch.randn(3, K).to(BF16)
    program = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert same(again(x), model(x))
    reset_matches()
    assert same(torch.compile(again)(x), model(x))
    assert matches() == {"siblings": 1}


def test_the_report_names_them_and_the_checkpoint_is_per_layer(tmp_path):
    model = quantized()
    notes = {i.name: i.notes for i in fp4_inductor.report(model).layers}
    assert all("q_proj/k_proj/v_proj" in " ".join(n) for n in notes.values())
    fp4_inductor.save(model, tmp_path / "a")
    fp4_inductor.save(quantized("separate"), tmp_path / "b")
    read = [(tmp_path / d / "fp4_inductor.safetensors").read_bytes() for d in "ab"]
    assert read[0] == read[1]
    x = torch.randn(3, K).to(BF16)
    for target in (Attention().to(BF16), quantized(seed=2), quantized("separate", seed=2), lambda: Attention().to(BF16), quantized(seed=3).to("meta")):
        loaded = fp4_inductor.load(target, tmp_path / "a")
        assert loaded.q_proj.packed is loaded.k_proj.packed is loaded.v_proj.packed
        assert same(loaded(x), model(x))
        assert "q_proj/k_proj/v_proj" in str(fp4_inductor.report(loaded))
        assert "q_proj/k_proj/v_proj" in str(fp4_inductor.report(copy.deepcopy(loaded)))


def test_gradients_flow_through_the_rows():
    apart, model = quantized("separate"), quantized()
    grads = []
    for m in (apart, model):
        x = torch.ones(3, K, dtype=BF16, requires_grad=True)
        torch.cat(m(x), -1).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_no_tensor_is_copied_by_a_call():
    """The operands of the merged call lie where the packed weight lies."""
    model = quantized("shared")
    seen = []
    real = torch.ops.fp4.linear.default

    def spy(x, qdata, *rest):
        seen.append(qdata.untyped_storage().data_ptr())
        return real(x, qdata, *rest)

    x = torch.randn(1, K).to(BF16)
    with mock.patch.object(torch.ops.fp4.linear, "default", spy):
        model(x)
    assert set(seen) == {model.q_proj.packed.qdata.untyped_storage().data_ptr()}
    assert isinstance(model.q_proj.packed, SiblingWeight)
