"""save_pretrained: readable by who has this package, refused by who has not, whole or not there, and never of less than was packed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import modeling_utils

import fp4_inductor
from fp4_inductor import FP4Linear, NVFP4Config, NVFP4Tensor, Sparse24Config, errors
from fp4_inductor.checkpoint import aside
from lowering_tests.foreign import IDS, PLAIN, assert_same, logits, write_mxfp4_pack
from lowering_tests.integrations.test_conversion_rules import qwen3_vl_moe

AUTO = transformers.AutoModelForCausalLM


def quantize(model, config=PLAIN, **options):
    return fp4_inductor.quantize_model(model, config, progress=False, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# --- who has not this package ---------------------------------------------------------------------------------------

READ = """
import sys, transformers
transformers.utils.logging.set_verbosity_error()
for folder in sys.argv[1:]:
    auto = transformers.AutoModelForImageTextToText if "vl_moe" in folder else transformers.AutoModelForCausalLM
    for options in ({}, {"dtype": "float32"}, {"device_map": "cpu"}):
        try:
            auto.from_pretrained(folder, **options)
        except RuntimeError as error:
            continue
        print(folder, options, "was loaded")
assert "fp4_inductor" not in sys.modules
print("done")
"""


def test_a_process_without_this_package_refuses(tiny, tmp_path):
    """It loaded the model with random weights, and returned 0. Each folder on its own: one layer is enough."""
    models = {name: quantize(tiny(name, torch.bfloat16)) for name in ("llama", "mixtral", "gpt2", "gpt_oss", "qwen2")}
    models["vl_moe"] = quantize(qwen3_vl_moe())
    models["one layer"] = quantize(tiny("llama", torch.bfloat16), filter_fn=lambda module, name: name.endswith("layers.1.mlp.up_proj"))
    models["FP8 head only"] = quantize(
        tiny("llama", torch.bfloat16), NVFP4Config("four_over_six", lm_head="fp8"), filter_fn=lambda module, name: name == "lm_head", strict=False
    )
    models["2:4"] = quantize(tiny("llama", torch.bfloat16), Sparse24Config(pruning="magnitude", accept_loss=True))
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", READ, *(tmp_path / name for name in models)], capture_output=True, text=True, timeout=300)
    assert run.stdout.strip() == "done", run.stdout + run.stderr[-2000:]


def test_the_folder_says_what_to_install(tiny, tmp_path):
    model = quantize(tiny("llama", torch.bfloat16))
    model.config.name_or_path = "somebody/some-model"
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert 'pip install "fp4_inductor[models]"' in card
    assert "import fp4_inductor" in card
    assert "from transformers import LlamaForCausalLM" in card
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- fp4_inductor\n- nvfp4\nbase_model: somebody/some-model\n")
    assert "fp4_inductor" in model.model_tags  # of the card that push_to_hub makes
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_dense_model_is_saved_as_ever(tiny, tmp_path):
    model = tiny("llama", torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "README.md").exists()
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


# --- parts and wholes -----------------------------------------------------------------------------------------------


def test_a_model_around_a_quantized_one(tiny, tmp_path):
    """The part that was quantized knows nothing of the model that is saved."""
    model = tiny("llama", torch.bfloat16)
    quantize(model.model)
    before = dict(vars(model)), model.config.to_dict()
    for folder in ("a", "b"):
        model.save_pretrained(tmp_path / folder)
        assert torch.equal(logits(AUTO.from_pretrained(tmp_path / folder, dtype="auto")), logits(model))
    after = model.config.to_dict()
    assert set(vars(model)) == set(before[0])
    assert {k: v for k, v in after.items() if k not in ("architectures", "dtype")} == {
        k: v for k, v in before[1].items() if k not in ("architectures", "dtype")
    }


def test_a_model_that_was_quantized_through_a_wrapper(tiny, tmp_path):
    model = tiny("mixtral", torch.bfloat16)
    quantize(nn.ModuleDict({"a": model}))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path, dtype="auto")), logits(model))


def test_a_part_of_a_quantized_model(tmp_path):
    """With a config of its own, of which the whole model's config must keep no trace."""
    model = quantize(qwen3_vl_moe())
    part = model.model.language_model
    part.save_pretrained(tmp_path / "part")
    assert "quantization_config" not in model.config.to_dict()["text_config"]
    again = type(part).from_pretrained(tmp_path / "part", dtype="auto")
    assert_same(again, part)
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS)[0], part(input_ids=IDS)[0])
    model.save_pretrained(tmp_path / "whole")
    assert_same(type(model).from_pretrained(tmp_path / "whole", dtype="auto"), model)


def test_a_compiled_model(tiny, tmp_path):
    model = quantize(tiny("llama", torch.bfloat16))
    torch.compile(model).save_pretrained(tmp_path)
    assert_same(AUTO.from_pretrained(tmp_path, dtype="auto"), model)


def test_a_model_whose_layers_all_stayed_dense(tiny, tmp_path):
    """Nothing is packed in it, and so nothing is said in config.json."""
    write_mxfp4_pack(tiny("llama", torch.bfloat16), tmp_path / "a", span=18)
    model = fp4_inductor.load_pretrained(tmp_path / "a", strict=False)
    assert not any(isinstance(m, FP4Linear) for m in model.modules())
    model.save_pretrained(tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert torch.equal(logits(AUTO.from_pretrained(tmp_path / "b", dtype="auto")), logits(model))


# --- whole or not there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["no space", "Ctrl-C"])
@pytest.mark.parametrize("old", [False, True], ids=["new folders", "over an old checkpoint"])
def test_an_interrupted_save_leaves_what_was_there(tiny, tmp_path, monkeypatch, error, old):
    model = quantize(tiny("llama", torch.bfloat16))
    folder = tmp_path / "a" / "b"
    if old:
        model.save_pretrained(folder)
    before, real, calls = content(tmp_path), modeling_utils.safe_save_file, []

    def fails(*args, **kwargs):
        calls.append(0)
        if len(calls) == 2:
            raise error
        real(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "safe_save_file", fails)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else errors.CheckpointError, match=getattr(error, "strerror", None)):
        model.save_pretrained(folder, max_shard_size="20kB")
    assert content(tmp_path) == before
    assert (tmp_path / "a").exists() == old


def test_ctrl_c_waits_until_the_files_are_in_place(tiny, tmp_path, monkeypatch):
    tiny("llama", torch.bfloat16).save_pretrained(tmp_path)
    real = aside.os.replace
    monkeypatch.setattr(aside.os, "replace", lambda a, b: (os.kill(os.getpid(), signal.SIGINT), real(a, b)))
    model = quantize(tiny("llama", torch.bfloat16))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert_same(AUTO.from_pretrained(tmp_path, dtype="auto"), model)


def test_paths_that_cannot_be_written(tiny, tmp_path):
    model = quantize(tiny("llama", torch.bfloat16))
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(errors.CheckpointError, match="cannot be written"):
            model.save_pretrained(path)
    for path in (None, "", 3):
        with pytest.raises(errors.ConfigError, match="save_directory is no path"):
            model.save_pretrained(path)


def test_no_file_of_an_earlier_save_is_left(tiny, tmp_path):
    """Transformers reads a single file before an index: the old model, if it stayed."""
    first, second = quantize(tiny("llama", torch.bfloat16)), quantize(tiny("qwen3", torch.bfloat16))
    first.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    second.save_pretrained(tmp_path, max_shard_size="20kB")
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(AUTO.from_pretrained(tmp_path, dtype="auto"), second)
    first.save_pretrained(tmp_path, True, None)  # by position, as the signature has them
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert_same(AUTO.from_pretrained(tmp_path, dtype="auto"), first)
    second.save_pretrained(tmp_path, variant="b", max_shard_size="20kB")
    assert (tmp_path / "model.safetensors").exists()
    assert_same(fp4_inductor.load_pretrained(tmp_path, variant="b"), second)


def test_processes_that_write_nothing(tiny, tmp_path):
    model = quantize(tiny("llama", torch.bfloat16))
    model.save_pretrained(tmp_path)
    before = content(tmp_path)
    model.save_pretrained(tmp_path, is_main_process=False)
    assert content(tmp_path) == before


# --- what nothing would read ----------------------------------------------------------------------------------------


def test_weights_in_modules_of_the_models_own(tiny, tmp_path):
    """The remedy of the error works."""
    model = tiny("llama", torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(NVFP4Tensor.from_dense(layer.weight.detach()), requires_grad=False)
    with pytest.raises(errors.CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight.*fp4_inductor\.save"):
        model.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    fp4_inductor.save(model, tmp_path / "b")
    assert torch.equal(logits(fp4_inductor.load_pretrained(tmp_path / "b")), logits(model))


def test_stacks_of_experts_in_modules_of_the_models_own(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 64}
    config = transformers.JetMoeConfig(vocab_size=128, num_local_experts=4, num_experts_per_tok=2, **sizes)
    model = quantize(transformers.JetMoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval())
    with pytest.raises(errors.CheckpointError, match=r"input_linear.*\.weight.*fp4_inductor\.save"):
        model.save_pretrained(tmp_path / "a")
    fp4_inductor.save(model, tmp_path / "b")
    assert torch.equal(logits(fp4_inductor.load_pretrained(tmp_path / "b")), logits(model))


@pytest.mark.parametrize("where", ["a layer that the architecture has not", "a layer of another size"])
def test_what_does_not_fit_its_own_architecture(tiny, tmp_path, where):
    model = quantize(tiny("llama", torch.bfloat16))
    if where == "a layer of another size":
        model.model.layers[1].mlp.up_proj = FP4Linear.from_weight(torch.randn(256, 64))
        match = r"layers\.1\.mlp\.up_proj\.weight: shape"
    else:
        model.model.layers[1].extra = FP4Linear.from_weight(torch.randn(64, 64))
        match = r"layers\.1\.extra\.weight: not in the model"
    with pytest.raises(errors.CheckpointError, match=rf"(?s)could not read back.*nothing was written.*{match}.*fp4_inductor\.save"):
        model.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_other_refusals(tiny, tmp_path, monkeypatch):
    from fp4_inductor.integrations.pretrained import quantizer

    model = quantize(tiny("llama", torch.bfloat16))
    with pytest.raises(errors.ConfigError, match="distributed_checkpoint"):
        model.save_pretrained(tmp_path / "a", distributed_checkpoint=True)
    with monkeypatch.context() as patch:
        ranks = quantizer.ranks_of
        patch.setattr(quantizer, "ranks_of", lambda m: type("Ranks", (), {"size": 2}) if ranks(m) is None else None)
        with pytest.raises(errors.CheckpointError, match="2 ranks of tensor parallelism.*without tp_plan"):
            model.save_pretrained(tmp_path / "a")
    model.hf_quantizer = object()
    with pytest.raises(errors.ConfigError, match="quantizer of another library"):
        model.save_pretrained(tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_two_checkpoints_in_one_folder(tiny, tmp_path):
    model = quantize(tiny("llama", torch.bfloat16))
    fp4_inductor.save(model, tmp_path / "native")
    with pytest.raises(errors.CheckpointError, match=r"holds a checkpoint of fp4_inductor\.save"):
        model.save_pretrained(tmp_path / "native")
    model.save_pretrained(tmp_path / "packed")
    with pytest.raises(errors.CheckpointError, match="holds a checkpoint of another format"):
        fp4_inductor.save(model, tmp_path / "packed")
    for name in ("native", "packed"):
        assert_same(fp4_inductor.load_pretrained(tmp_path / name), model)
    (tmp_path / "packed" / "fp4_inductor.json").write_bytes((tmp_path / "native" / "fp4_inductor.json").read_bytes())
    with pytest.raises(errors.CheckpointError, match="two checkpoints"):
        fp4_inductor.load_pretrained(tmp_path / "packed")


def test_a_model_of_the_hubs_mixin(tmp_path):
    from huggingface_hub import PyTorchModelHubMixin

    class Model(nn.Sequential, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__(nn.Linear(64, 64), nn.Linear(64, 32))

    model = Model().bfloat16().eval()
    model.save_pretrained(tmp_path / "dense")
    assert torch.equal(Model.from_pretrained(tmp_path / "dense")[1].weight.bfloat16(), model[1].weight)
    quantize(model)
    with pytest.raises(errors.CheckpointError, match=r"Model\.from_pretrained could not read back.*fp4_inductor\.save"):
        model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
