"""A state_dict of packed layers is refused by a dense model, strict or not: it never goes on with the values it was made with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, Sparse24Config
from fp4_inductor.modules.marker import markers_of
from lowering_tests.foreign import PLAIN, assert_same, bits
from lowering_tests.models.conftest import build

SPARSE = Sparse24Config(pruning="magnitude", accept_loss=True)
HEAD = NVFP4Config("four_over_six", lm_head="fp8")
CASES = {
    "siblings": ("llama", PLAIN),
    "an FP8 head": ("llama", HEAD),
    "Conv1D": ("gpt2", PLAIN),
    "experts": ("mixtral", PLAIN),
    "transposed": ("gpt_oss", PLAIN),
}
CASES |= {"2:4": ("llama", SPARSE), "2:4 experts": ("qwen3_moe", SPARSE)}


@pytest.fixture(params=CASES)
def pair(request):
    """``(a dense model, the same quantized)``."""
    family, config = CASES[request.param]
    dense = build(family, torch.bfloat16)
    return dense, fp4_inductor.quantize_model(copy.deepcopy(dense), config, progress=False)


def test_a_dense_model_refuses_every_packed_layer(pair):
    dense, packed = pair
    state = packed.state_dict()
    markers = markers_of(packed)
    left = {n for n, _ in packed.named_parameters(remove_duplicate=False)} | {n for n in dense.state_dict() if n.endswith("bias")}
    assert markers == set(dense.state_dict()) - left
    for name in markers:
        # As if only this layer were packed: the others' shapes do not matter.
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            dense.load_state_dict({name: state[name]}, strict=False)


def test_a_packed_model_reads_its_own(pair):
    _, packed = pair
    other = copy.deepcopy(packed)
    for buffer in other.buffers():
        if buffer.dtype in (torch.uint8, torch.float32):
            buffer.zero_()
    other.load_state_dict(packed.state_dict())
    assert_same(other, packed)
    # What was written before there were markers.
    old = {name: t for name, t in packed.state_dict().items() if name not in markers_of(packed)}
    other.load_state_dict(old)
    assert_same(other, packed)


def test_a_packed_model_refuses_dense_weights(pair):
    dense, packed = pair
    before = {name: t.clone() for name, t in packed.state_dict().items()}
    with pytest.raises(RuntimeError, match="is a dense weight, and this layer is packed: load dense weights first"):
        packed.load_state_dict({name: t for name, t in dense.state_dict().items() if name in markers_of(packed)}, strict=False)
    assert all(torch.equal(bits(t), bits(before[name])) for name, t in packed.state_dict().items())


def test_memory_devices_and_text():
    """Each entry has memory of its own, as safetensors wants it, where the layer is."""
    layers = nn.Sequential(FP4Linear(64, 32), FP4Linear(8, 32))
    first, second = layers.state_dict()["0.weight"], layers.state_dict()["1.weight"]
    assert first.data_ptr() != second.data_ptr()
    assert "pip install fp4_inductor" in bytes(first.tolist()).decode()
    assert first.dim() == 1  # and so of no dense weight's shape, padded to whole blocks or not
    assert all(t.is_meta for t in copy.deepcopy(layers).to("meta").state_dict().values())
    assert not torch.export.export(layers[0], (torch.zeros(2, 64, dtype=torch.bfloat16),)).state_dict.keys() & {"weight"}


def test_checkpoints_of_torch_distributed():
    """Each entry of the state_dict leads to something in the model, as DCP and FSDP2 ask."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    packed = fp4_inductor.quantize_model(build("mixtral", torch.bfloat16), PLAIN, progress=False)
    state = get_model_state_dict(packed)
    other = copy.deepcopy(packed)
    other.model.layers[0].mlp.experts.down_proj.qdata.zero_()
    other.model.layers[0].self_attn.q_proj.global_scale.fill_(3.0)
    set_model_state_dict(other, state)
    assert_same(other, packed)
    with pytest.raises(RuntimeError, match="size mismatch"):
        set_model_state_dict(build("mixtral", torch.bfloat16), state)
