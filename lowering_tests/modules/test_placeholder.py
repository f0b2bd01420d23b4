"""A module whose weights are all packed still answers ``next(module.parameters())``, by which model code asks for dtype and device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config
from fp4_inductor.modules import FP4ExpertWeight, FP8Linear, SiblingLinear, Sparse24Linear
from fp4_inductor.modules.packed import PLACEHOLDER, PackedWeight
from lowering_tests.models.conftest import build

DTYPES = [torch.float32, torch.bfloat16]


def quantize(model, config=None):
    return fp4_inductor.quantize_model(model, config, progress=False)


class TimeEmbedding(nn.Module):
    """As in Wan's and other diffusion models, here without biases."""

    def __init__(self):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.linear_2(self.linear_1(x))


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.norm = TimeEmbedding(), nn.LayerNorm(64)

    def forward(self, x):
        return self.time(x.to(next(iter(self.time.parameters())).dtype)).type_as(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forward_that_asks_its_parts_for_their_dtype(dtype):
    model = quantize(Conditioned().to(dtype))
    assert model(torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(torch.randn(2, 64, dtype=torch.float64)).dtype == torch.float64


def _layers():
    torch.manual_seed(0)
    plain = quantize(nn.Sequential(nn.Linear(64, 32)))[0]
    sibling = quantize(build("llama")).model.layers[0].self_attn.q_proj
    sparse = quantize(nn.Sequential(nn.Linear(64, 32)), Sparse24Config("magnitude", accept_loss=True))[0]
    head = FP8Linear.from_weight(torch.randn(32, 64))
    experts = quantize(build("mixtral")).model.layers[0].mlp.experts.down_proj
    kinds = {FP4Linear: plain, SiblingLinear: sibling, Sparse24Linear: sparse, FP8Linear: head, FP4ExpertWeight: experts}
    assert all(type(layer) is kind for kind, layer in kinds.items())
    return kinds


@pytest.fixture(scope="module")
def kinds():
    return _layers()


def answers(layer: PackedWeight) -> bool:
    p = next(nn.Sequential(layer).parameters())
    return p is next(layer.parameters()) and (p.dtype, p.device, p.numel(), p.requires_grad) == (layer.dtype, layer.scale.device, 0, False)


@pytest.mark.parametrize("kind", [FP4Linear, SiblingLinear, Sparse24Linear, FP8Linear, FP4ExpertWeight])
def test_it_follows_the_weight(kinds, kind):
    layer = copy.deepcopy(kinds[kind])
    assert answers(layer)
    for change in (lambda m: m.to(torch.float16), lambda m: m.bfloat16(), lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.to("meta"), lambda m: m.float()):
        layer = change(layer)
        assert answers(layer)
    layer = layer.to_empty(device="cpu")
    assert answers(layer) and next(layer.parameters()).device.type == "cpu"


@pytest.mark.parametrize("kind", [FP4Linear, SiblingLinear, Sparse24Linear, FP8Linear, FP4ExpertWeight])
@pytest.mark.parametrize("assign", [False, True])
def test_it_is_in_no_state_dict(kinds, kind, assign):
    layer = kinds[kind]
    saved = layer.state_dict()
    assert not any(PLACEHOLDER in name for name in saved)
    assert [n for n, _ in layer.named_parameters(recurse=False)] == []
    twin = copy.deepcopy(layer)
    if assign:
        twin = twin.to("meta")
    assert str(twin.load_state_dict(saved, assign=assign)) == "<All keys matched successfully>"
    assert answers(twin)
    assert all(torch.equal(t.view(torch.uint8), saved[n].view(torch.uint8)) for n, t in twin.state_dict().items() if t.dim())


def test_a_sibling_on_its_own():
    layer = copy.deepcopy(_layers()[SiblingLinear]).unpack()
    assert type(layer) is FP4Linear and answers(layer)


def whole(model: nn.Module, dtype: torch.dtype) -> None:
    packed = [m for m in model.modules() if isinstance(m, PackedWeight)]
    assert packed and all(answers(m) and m.dtype == dtype and m.scale.device.type == "cpu" for m in packed)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_after_every_way_of_loading(family, tmp_path):
    import transformers

    model = quantize(build(family, torch.bfloat16), NVFP4Config("amax"))
    whole(model, torch.bfloat16)
    fp4_inductor.save(model, tmp_path / "native")
    whole(fp4_inductor.load(build(family), tmp_path / "native"), torch.bfloat16)
    whole(fp4_inductor.load(lambda: build(family), tmp_path / "native"), torch.bfloat16)
    model.save_pretrained(tmp_path / "transformers")
    whole(fp4_inductor.load_pretrained(tmp_path / "transformers"), torch.bfloat16)
    whole(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "transformers"), torch.bfloat16)
    for file in tmp_path.rglob("*.safetensors"):
        assert PLACEHOLDER.encode() not in file.read_bytes()


def test_tools_that_go_by_parameters():
    import accelerate
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, x = quantize(Conditioned()), torch.randn(2, 64)
    want = model(x)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    set_model_state_dict(model, {n: t.clone() for n, t in state.items()})
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), want)
    for strict in (True, False):
        assert torch.equal(torch.export.export(model, (x,), strict=strict).module()(x), want)
    for options in ({}, {"offload_buffers": True}):
        assert torch.equal(accelerate.cpu_offload(copy.deepcopy(model), "cpu", **options)(x), want)


def test_ddp_does_not_wait_for_its_gradient():
    from fp4_inductor.modules.bits import _frozen

    model = quantize(Conditioned()).requires_grad_(True)
    left = dict(model.named_parameters()).keys() - dict(_frozen(model)).keys()
    assert left == {"norm.weight", "norm.bias"}
