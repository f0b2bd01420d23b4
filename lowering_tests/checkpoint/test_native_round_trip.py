"""save -> load gives the same bits: dense, tied, shared, sharded, subclass Parameters, transformers models on meta."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, NVFP4Tensor, errors
from fp4_inductor.checkpoint import safetensors_file
from fp4_inductor.checkpoint.build import build_empty


class Net(nn.Module):
    def __init__(self, tied: bool = True):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 70)
        self.odd = nn.Linear(70, 64, bias=False)
        self.norm = nn.BatchNorm1d(64)
        self.lm_head = nn.Linear(64, 32, bias=False)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64), persistent=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) * self.table
        x = x + self.odd(torch.relu(self.down(torch.relu(self.up(x)))))
        return self.lm_head(self.norm(x.flatten(0, 1)))


IDS = torch.arange(12).reshape(2, 6)


def bits(model: nn.Module) -> dict[str, tuple]:
    out = {}
    for name, t in model.state_dict().items():
        for part in t.parts() if isinstance(t, NVFP4Tensor) else (t,):
            out[f"{name}/{len(out)}"] = (part.dtype, tuple(part.shape), part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return out


def saved(tmp_path: Path, dtype=torch.bfloat16, **save_options):
    model = fp4_inductor.quantize_model(Net().to(dtype).eval(), progress=False)
    fp4_inductor.save(model, tmp_path, **save_options)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_comes_back(tmp_path, dtype):
    model = saved(tmp_path, dtype)
    torch.manual_seed(5)
    targets = {
        "factory": Net,
        "dense": Net().eval(),
        "dense untied": Net(tied=False).eval(),
        "quantized": fp4_inductor.quantize_model(Net().eval(), progress=False),
    }
    for kind, target in targets.items():
        loaded = fp4_inductor.load(target, tmp_path)
        assert bits(loaded) == bits(model), kind
        assert torch.equal(loaded(IDS), model(IDS)), kind
        assert loaded.lm_head.weight is loaded.embed.weight, kind
        assert loaded.up.dtype == dtype
        if kind != "factory":
            assert loaded is target


def test_a_factory_allocates_no_parameters_and_keeps_buffers(tmp_path):
    model = saved(tmp_path)
    empty = build_empty(Net)
    assert all(p.device.type == "meta" for p in empty.parameters())
    assert empty.lm_head.weight is empty.embed.weight
    assert torch.equal(empty.table, torch.linspace(0.5, 1.5, 64))
    loaded = fp4_inductor.load(Net, tmp_path)
    assert torch.equal(loaded.table, model.table)  # as .to(bfloat16) rounded it
    assert loaded.table.dtype == torch.bfloat16
    assert "table" not in loaded.state_dict()
    assert not loaded.training


def test_a_constructor_that_needs_its_weights_is_called_again(tmp_path):
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.scale = float(self.up.weight.detach().norm())  # a value that the meta device does not have

    model = saved(tmp_path)
    loaded = fp4_inductor.load(Normed, tmp_path)
    assert bits(loaded) == bits(model)
    assert loaded.scale > 0


def test_buffers_computed_from_weights_are_real(tmp_path):
    class Summed(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", self.up.weight.detach().sum(), persistent=False)

    saved(tmp_path)
    assert fp4_inductor.load(Summed, tmp_path).total.device.type == "cpu"


def test_a_meta_module_with_lost_values_is_refused(tmp_path):
    class Attribute(Net):
        def __init__(self):
            super().__init__()
            self.constant = torch.ones(3)

    class Buffer(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("other", torch.ones(3), persistent=False)

    saved(tmp_path)
    for cls, name in ((Attribute, "constant"), (Buffer, "other")):
        with torch.device("meta"):
            model = cls()
        with pytest.raises(errors.CheckpointError, match=rf"{name}.*Pass a function"):
            fp4_inductor.load(model, tmp_path)
        assert isinstance(model.up, nn.Linear)
        assert fp4_inductor.load(cls, tmp_path)(IDS).isfinite().all()


def test_a_meta_module_loads_with_its_derived_buffers(tmp_path):
    model = saved(tmp_path)
    with torch.device("meta"):
        empty = Net().eval()
    loaded = fp4_inductor.load(empty, tmp_path)
    assert torch.equal(loaded(IDS), model(IDS))


def test_a_model_without_a_derived_buffer_does_not_miss_it(tmp_path):
    class Without(Net):
        def __init__(self):
            super().__init__()
            del self.table
            self.table = 1.0

    model = saved(tmp_path)
    assert torch.equal(fp4_inductor.load(Without, tmp_path).up.qdata, model.up.qdata)


def test_a_meta_sequential_loads(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    fp4_inductor.save(fp4_inductor.quantize_model(model, progress=False), tmp_path)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    loaded = fp4_inductor.load(empty, tmp_path)
    assert bits(loaded) == bits(model)
    assert all(t.device.type == "cpu" for t in loaded.state_dict().values())


@pytest.mark.parametrize("limit", ["4KB", 6_000, 1])
def test_shards_and_their_index(tmp_path, limit):
    model = saved(tmp_path, max_shard_size=limit)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"fp4_inductor-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "fp4_inductor.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    stored = {n: t for f in files for n, t in safetensors.torch.load_file(tmp_path / f).items()}
    assert set(stored) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in stored.values())
    assert bits(fp4_inductor.load(Net, tmp_path)) == bits(model)


def test_what_is_on_disk(tmp_path):
    model = saved(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "fp4_inductor.safetensors")
    assert "lm_head.weight" not in stored  # tied: once
    assert stored["up.qdata"].dtype == torch.uint8
    assert stored["up.scale"].dtype == torch.float8_e4m3fn
    assert stored["up.global_scale"].dtype == torch.float32
    assert stored["up.bias"].dtype == torch.bfloat16
    assert torch.equal(stored["up.qdata"], model.up.qdata)
    manifest = json.loads((tmp_path / "fp4_inductor.json").read_text())
    assert manifest["aliases"] == {"lm_head.weight": "embed.weight"}
    assert manifest["layers"]["odd"] == {"in_features": 70, "out_features": 64, "dtype": "bfloat16", "bias": False, "prefill": "auto", "input_scale": False}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp4_inductor.json", "fp4_inductor.safetensors"]
    (tmp_path / "plain").write_text("")
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1  # the umask's, not 0600


def test_two_saves_are_the_same_bytes(tmp_path):
    model = saved(tmp_path / "a")
    fp4_inductor.save(model, tmp_path / "b")
    for name in ("fp4_inductor.json", "fp4_inductor.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saving_over_an_old_checkpoint_leaves_no_old_shards(tmp_path):
    saved(tmp_path, max_shard_size="4KB")
    (tmp_path / "notes.txt").write_text("mine")
    model = saved(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp4_inductor.json", "fp4_inductor.safetensors", "notes.txt"]
    assert bits(fp4_inductor.load(Net, tmp_path)) == bits(model)


def test_a_loaded_model_owns_its_memory(tmp_path):
    """Saving a loaded model into the directory it came from must not write what it reads."""
    model = saved(tmp_path)
    loaded = fp4_inductor.load(Net, tmp_path)
    fp4_inductor.save(loaded, tmp_path)
    (tmp_path / "fp4_inductor.safetensors").write_bytes(b"")
    assert bits(loaded) == bits(model)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    model = saved(tmp_path)
    module = sys.modules["fp4_inductor.checkpoint.save"]

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(errors.CheckpointError, match="No space left"):
        fp4_inductor.save(model, tmp_path)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fp4_inductor.json", "fp4_inductor.safetensors"]
    assert bits(fp4_inductor.load(Net, tmp_path)) == bits(model)


def test_layers_that_share_a_weight_share_it_again(tmp_path):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        model[2].weight = model[0].weight
        return model

    model = fp4_inductor.quantize_model(build(), progress=False)
    fp4_inductor.save(model, tmp_path)
    assert len(safetensors.torch.load_file(tmp_path / "fp4_inductor.safetensors")) == 5
    loaded = fp4_inductor.load(build, tmp_path)
    assert loaded[0].qdata is loaded[2].qdata
    assert loaded[0].bias is not loaded[2].bias
    assert bits(loaded) == bits(model)


def test_one_module_under_two_names(tmp_path):
    def build():
        shared = nn.Linear(64, 64)
        return nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})

    fp4_inductor.save(fp4_inductor.quantize_model(build(), progress=False), tmp_path)
    loaded = fp4_inductor.load(build, tmp_path)
    assert isinstance(loaded["a"], FP4Linear)
    assert loaded["a"] is loaded["b"][0]


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_that_are_nvfp4_tensors(tmp_path, transposed):
    def build(seed=1):
        torch.manual_seed(seed)
        model = nn.Module()
        weight = torch.randn(3, 32, 64)
        model.experts = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        model.fc = nn.Linear(64, 16)
        return model

    model = build()
    dense = model.experts.data.mT if transposed else model.experts.data
    tensor = NVFP4Tensor.from_dense(dense.bfloat16().contiguous())
    model.experts = nn.Parameter(tensor.mT if transposed else tensor, requires_grad=False)
    fp4_inductor.save(model, tmp_path)
    loaded = fp4_inductor.load(build(2), tmp_path)
    assert isinstance(loaded.experts, NVFP4Tensor)
    assert isinstance(loaded.experts, nn.Parameter)
    assert loaded.experts.transposed == transposed
    assert loaded.experts.dtype == torch.bfloat16
    assert bits(loaded) == bits(model)


def test_an_unquantized_model_too(tmp_path):
    model = Net().eval()
    fp4_inductor.save(model, tmp_path)
    assert bits(fp4_inductor.load(Net, tmp_path)) == bits(model)


def test_requires_grad_and_mode_of_the_given_model_are_kept(tmp_path):
    saved(tmp_path)
    target = Net().train()
    target.norm.weight.requires_grad_(False)
    loaded = fp4_inductor.load(target, tmp_path)
    assert loaded.training
    assert loaded.up.training
    assert not loaded.norm.weight.requires_grad
    assert loaded.embed.weight.requires_grad


def test_the_report_survives(tmp_path):
    model = Net().to(torch.bfloat16)
    model = fp4_inductor.quantize_model(model, NVFP4Config("mse"), ignore=["down"], progress=False)
    fp4_inductor.save(model, tmp_path)
    before, after = fp4_inductor.report(model), fp4_inductor.report(fp4_inductor.load(Net, tmp_path))
    assert {i.name: i.relative_error for i in after.layers} == {i.name: i.relative_error for i in before.layers}
    assert after.coverage == before.coverage == 100.0
    assert {s.name: s.reason for s in after.skipped if s.name != "down.bias"} == {s.name: s.reason for s in before.skipped if s.name != "down.bias"}
    assert (after.params, after.bytes_after) == (before.params, before.bytes_after)


def test_strict_false_keeps_what_is_missing_and_says_so(tmp_path):
    class Extended(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.full((3,), 7.0))

    class Reduced(Net):
        def __init__(self):
            super().__init__()
            del self.norm

    model = saved(tmp_path)
    for cls, name in ((Extended, "extra"), (Reduced, r"norm\.\{.*weight\}")):
        target = cls()
        with pytest.raises(errors.CheckpointError, match=name):
            fp4_inductor.load(target, tmp_path)
        assert isinstance(target.up, nn.Linear)
        with pytest.warns(UserWarning, match=name):
            loaded = fp4_inductor.load(target, tmp_path, strict=False)
        assert torch.equal(loaded.up.qdata, model.up.qdata)
    assert Extended().extra.eq(7).all()
    with pytest.raises(errors.CheckpointError, match=r"extra.*meta"):
        fp4_inductor.load(Extended, tmp_path, strict=False)


def test_the_given_model_is_unchanged_by_a_load_elsewhere(tmp_path):
    """Loading copies nothing out of the checkpoint's model: two loads do not share memory."""
    saved(tmp_path)
    a, b = fp4_inductor.load(Net, tmp_path), fp4_inductor.load(Net, tmp_path)
    a.up.qdata.zero_()
    assert b.up.qdata.any()


@pytest.mark.gpu
@pytest.mark.parametrize("staged", [1 << 25, 100])  # bytes at a time: several pieces a tensor
def test_straight_to_the_gpu(tmp_path, monkeypatch, staged):
    monkeypatch.setattr(safetensors_file, "_STAGED", staged)
    model = saved(tmp_path)
    loaded = fp4_inductor.load(Net, tmp_path, device="cuda")
    assert all(t.device.type == "cuda" for t in (*loaded.parameters(), *loaded.buffers()))
    assert bits(loaded) == bits(model)
    assert loaded.lm_head.weight is loaded.embed.weight


def _tiny_llama(tied: bool = False):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_round_trip_from_its_own_config(tmp_path, tied):
    from transformers import AutoConfig, AutoModelForCausalLM

    model = fp4_inductor.quantize_model(_tiny_llama(tied), progress=False)
    fp4_inductor.save(model, tmp_path)
    assert model.config.architectures is None  # made from its config; a server asks the folder for the class
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    built = []

    def factory():
        built.append(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)))
        return built[-1]

    loaded = fp4_inductor.load(factory, tmp_path)
    assert len(built) == 1  # the cheap way worked: Parameters on meta, rotary frequencies real
    assert torch.equal(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert bits(loaded) == bits(model)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    if tied:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_copy_of_a_loaded_model_can_be_saved(tmp_path):
    saved(tmp_path / "a")
    loaded = copy.deepcopy(fp4_inductor.load(Net, tmp_path / "a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4_inductor.save(loaded, tmp_path / "b")
    assert bits(fp4_inductor.load(Net, tmp_path / "b")) == bits(loaded)


@pytest.mark.parametrize("size", [0, -1, "5", "GB", "5XB", True, 1.5])
def test_bad_shard_sizes(tmp_path, size):
    with pytest.raises(errors.CheckpointError, match="max_shard_size"):
        fp4_inductor.save(Net(), tmp_path, max_shard_size=size)


def test_what_cannot_be_saved(tmp_path):
    class Stateful(Net):
        def get_extra_state(self):
            return {"a": 1}

    class Wrapped(torch.Tensor):
        pass

    with torch.device("meta"):
        meta = Net()
    subclass = Net()
    subclass.up.weight = nn.Parameter(subclass.up.weight.data.as_subclass(Wrapped))
    complex_ = Net()
    complex_.register_buffer("c", torch.zeros(2, dtype=torch.complex128))
    for model, match in ((Stateful(), "extra state"), (meta, "meta device"), (subclass, "subclass"), (complex_, "dtype")):
        with pytest.raises(errors.CheckpointError, match=match):
            fp4_inductor.save(model, tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.CheckpointError, match="cannot be written"):
        fp4_inductor.save(Net(), tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_built(tmp_path):
    saved(tmp_path)
    with pytest.raises(errors.ConfigError, match="makes one"):
        fp4_inductor.load(lambda: 3, tmp_path)

    def broken():
        raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        fp4_inductor.load(broken, tmp_path)
