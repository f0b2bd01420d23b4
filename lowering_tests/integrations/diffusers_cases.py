"""Run by test_diffusers.py in a process of its own, with diffusers, or with a stand-in where it is not installed. Prints each case that passed."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import load_file, save_file
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, NVFP4Tensor, Sparse24Config, Sparse24Linear, errors
from lowering_tests.foreign import assert_same

PLAIN = NVFP4Config("four_over_six")
REAL = "standin" not in sys.modules["diffusers"].__file__
NAME = "diffusion_pytorch_model"
TEMP = Path(tempfile.mkdtemp())
register = None
if REAL:
    from diffusers.configuration_utils import ConfigMixin, register_to_config

    bases: tuple = (ModelMixin, ConfigMixin)
else:
    bases = (ModelMixin,)

    def register_to_config(init: Callable) -> Callable:
        def wrapped(self, width=64, depth=2):
            init(self, width, depth)
            self.register_to_config(width=width, depth=depth)

        return wrapped


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width, bias=i == 0) for i in range(3))
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm(x)
        return x + self.ff(torch.tanh(self.to_q(y)) * self.to_k(y) + self.to_v(y))


class Denoiser(*bases):
    @register_to_config
    def __init__(self, width: int = 64, depth: int = 2):
        super().__init__()
        self.conv_in = nn.Conv1d(4, width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.proj_out = nn.Linear(width, 4)

    def forward(self, x):
        y = self.conv_in(x).mT
        for block in self.blocks:
            y = block(y)
        return self.proj_out(y).mT


def make(dtype=torch.bfloat16, **fields) -> Denoiser:
    torch.manual_seed(0)
    return Denoiser(**fields).to(dtype).eval()


def quantize(model, config=PLAIN, **options):
    return fp4_inductor.quantize_model(model, config, progress=False, **options)


@torch.no_grad()
def run(model):
    return model(torch.linspace(-1, 1, 48).reshape(1, 4, 12).to(next(model.parameters()).dtype))


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=TEMP)) / "model"


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refuses(kind: type[Exception], text: str, do: Callable) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        do()


# --- the cases ------------------------------------------------------------------------------------------------------


def round_trips():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for options in ({}, {"max_shard_size": 20000}, {"variant": "fp4"}):
            model, path = quantize(make(dtype)), folder()
            model.save_pretrained(path, **options)
            again = Denoiser.from_pretrained(path, torch_dtype=dtype, **{k: v for k, v in options.items() if k == "variant"})
            assert_same(again, model)
            assert torch.equal(run(again), run(model))
            assert fp4_inductor.report(again).coverage == fp4_inductor.report(model).coverage
            assert again.half().blocks[0].to_q.dtype == torch.float16


def two_of_four():
    model = quantize(make(), Sparse24Config(pruning="magnitude", accept_loss=True, layers=["to_q", "ff.0"]))
    path = folder()
    model.save_pretrained(path)
    again = Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16)
    assert sum(type(m) is Sparse24Linear for m in again.modules()) == 4
    assert_same(again, model)
    assert torch.equal(run(again), run(model))


def prefill():
    model, path = quantize(make(), NVFP4Config("four_over_six", prefill="bf16")), folder()
    model.save_pretrained(path)
    again = Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16)
    assert {m.prefill for m in again.modules() if isinstance(m, FP4Linear)} == {"bf16"}
    again.save_pretrained(path)
    assert_same(Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16), model)


def a_part_that_was_quantized():
    model, path = make(), folder()
    quantize(model.blocks[0])
    before = dict(model.config)
    model.save_pretrained(path)
    assert dict(model.config) == before
    again = Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16)
    assert_same(again, model)
    assert sum(isinstance(m, FP4Linear) for m in again.modules()) == 5
    quantize(model.blocks[1])  # after the first time it said what is packed
    model.save_pretrained(path)
    assert sum(isinstance(m, FP4Linear) for m in Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16).modules()) == 10


def a_dense_model_is_saved_as_ever():
    model, path = make(), folder()
    model.save_pretrained(path)
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    again = Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16)
    assert torch.equal(run(again), run(model))
    config = quantize(make()).hf_quantizer.quantization_config
    refuses(errors.ConfigError, "not quantized while they load", lambda: Denoiser.from_pretrained(path, quantization_config=config))


def whole_or_not_there():
    import safetensors.torch as library

    where = library if REAL else sys.modules["diffusers.models.modeling_utils"]
    real, calls = library.save_file, []
    for old in (False, True):
        for error, kind in ((OSError(28, "No space left on device"), errors.CheckpointError), (KeyboardInterrupt("no"), KeyboardInterrupt)):
            model, path = quantize(make()), folder()
            if old:
                model.save_pretrained(path)
            before = content(path.parent)
            calls.clear()

            def fails(*args, error=error, **kwargs):
                calls.append(0)
                if len(calls) == 2:
                    raise error
                real(*args, **kwargs)

            where.save_file = fails
            try:
                refuses(kind, "no" if kind is KeyboardInterrupt else "No space left", lambda m=model, p=path: m.save_pretrained(p, max_shard_size=20000))
            finally:
                where.save_file = real
            assert len(calls) == 2
            assert content(path.parent) == before
            assert path.exists() == old
    (path.parent / "file").write_text("")
    refuses(errors.CheckpointError, "cannot be written", lambda: model.save_pretrained(path.parent / "file"))
    model.save_pretrained(path, is_main_process=False)
    assert content(path.parent).keys() - before.keys() == {"file"}


def no_file_of_an_earlier_save_is_left():
    first, second, path = quantize(make()), quantize(make(depth=3)), folder()
    first.save_pretrained(path)
    second.save_pretrained(path, max_shard_size=20000)
    assert not (path / f"{NAME}.safetensors").exists()
    assert_same(Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16), second)
    first.save_pretrained(path)
    assert sorted(content(path)) == ["config.json", f"{NAME}.safetensors"]


def what_nothing_would_read():
    def refused(model, text, **options):
        path = folder()
        refuses(errors.CheckpointError, text, lambda: model.save_pretrained(path, **options))
        assert not path.exists()

    model = make()
    model.proj_out.weight = nn.Parameter(NVFP4Tensor.from_dense(model.proj_out.weight.detach()), requires_grad=False)
    refused(model, "proj_out.weight: a NVFP4Tensor in a module of the model's own")
    model = quantize(make())
    refused(model, "safe_serialization=False", safe_serialization=False)
    model.blocks[0].ff[0] = FP4Linear.from_weight(torch.randn(256, 64))
    refused(model, "blocks.0.ff.0: 256 x 64, in the architecture (128, 64)")
    model = quantize(make())
    model.more = FP4Linear.from_weight(torch.randn(64, 64))
    refused(model, "more: 64 x 64, in the architecture NoneType")
    model = quantize(make())
    model.hf_quantizer = object()
    refused(model, "a quantizer of another library")


def damage():
    def state_of(path):
        return load_file(path / f"{NAME}.safetensors")

    def damaged(change):
        path = folder()
        quantize(make()).save_pretrained(path)
        state, config = state_of(path), json.loads((path / "config.json").read_text())
        change(state, config["quantization_config"])
        save_file(state, path / f"{NAME}.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        return lambda: Denoiser.from_pretrained(path, torch_dtype=torch.bfloat16)

    layer = "blocks.1.ff.2"
    refused = [
        ("NaN or negative scale", lambda s, c: s[f"{layer}.scale"].view(torch.uint8).view(-1)[:1].fill_(0x7F)),
        ("must be finite and positive", lambda s, c: s[f"{layer}.global_scale"].fill_(float("inf"))),
        (f"{layer}.qdata", lambda s, c: s.pop(f"{layer}.qdata")),
        ("blocks.0.norm.bias", lambda s, c: s.pop("blocks.0.norm.bias")),
        (f"{layer}.qdata has the wrong shape", lambda s, c: s.update({f"{layer}.qdata": s[f"{layer}.qdata"][:8].contiguous()})),
        (f"{layer}.qdata has the wrong shape or dtype", lambda s, c: s.update({f"{layer}.qdata": s[f"{layer}.qdata"].view(torch.int8)})),
        (f"{layer}.scale has the wrong shape or dtype", lambda s, c: s.update({f"{layer}.scale": s[f"{layer}.scale"].view(torch.uint8)})),
        (f"{layer}.weight has the wrong shape", lambda s, c: s.update({f"{layer}.weight": torch.zeros(64, 128)})),
        ("nothing.there: nothing in the model", lambda s, c: c["layers"].update({"nothing.there": "nvfp4"})),
        ("conv_in: Conv1d in the model", lambda s, c: c["layers"].update({"conv_in": "nvfp4"})),
        ("not one that can be read", lambda s, c: c["layers"].update({layer: "int4"})),
        ("not one that can be read", lambda s, c: c.update(version=2)),
        ("not one that can be read", lambda s, c: c.update(prefill="fp9")),
        ("not one that can be read", lambda s, c: c.update(layers=[layer])),
        ("not one that can be read", lambda s, c: c.update(more=1)),
    ]
    for text, change in refused:
        refuses(errors.CheckpointError, text, damaged(change))
    # A layer that the config does not name is read as dense: its marker is of another shape.
    refuses(ValueError, f"{layer}.weight expected shape", damaged(lambda s, c: c["layers"].pop(layer)))
    refuses(ValueError, "Unknown quantization type", damaged(lambda s, c: c.update(quant_method="unheard_of")))
    path = folder()
    quantize(make()).save_pretrained(path)
    refuses(errors.DeviceError, "cannot stay on disk", lambda: Denoiser.from_pretrained(path, device_map={"": "disk"}))


def a_process_without_this_package():
    import subprocess

    path = folder()
    quantize(make()).save_pretrained(path)
    code = f"import sys; sys.path[:0] = {sys.path!r}; import diffusers.quantizers.auto as a, json; c = json.load(open({str(path / 'config.json')!r}))\n"
    code += "make = getattr(a, 'config_from', None) or a.DiffusersAutoQuantizer.from_dict\nmake(c['quantization_config'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "Unknown quantization type, got fp4_inductor" in run.stderr, run.stderr


CASES = [
    round_trips,
    two_of_four,
    prefill,
    a_part_that_was_quantized,
    a_dense_model_is_saved_as_ever,
    whole_or_not_there,
    no_file_of_an_earlier_save_is_left,
    what_nothing_would_read,
    damage,
    a_process_without_this_package,
]
if __name__ == "__main__":
    for case in CASES:
        case()
        print(case.__name__)
    assert "diffusers" in sys.modules
