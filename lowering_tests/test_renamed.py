"""The old name of ``prefill``: where users wrote it, it still works and warns; where files have it, it is read."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fp4_inductor
from fp4_inductor import FP4Experts, FP4Linear, FP8Linear, NVFP4Config, Sparse24Config, Sparse24Linear, errors
from fp4_inductor._renamed import OLD_NAMES, current
from fp4_inductor.checkpoint import manifest as mf
from fp4_inductor.integrations.pretrained import load_pretrained
from fp4_inductor.integrations.pretrained.config import FP4InductorConfig, ModelOptConfig
from fp4_inductor.modules.experts import FP4ExpertWeight
from fp4_inductor.ops.activation import Activation
from lowering_tests.foreign import MODELOPT

OLD = "large_m"
WEIGHT = torch.randn(32, 64, dtype=torch.bfloat16)
SPARSE = WEIGHT * torch.tensor([1, 0, 0, 1], dtype=torch.bfloat16).repeat(16)


def experts(**options):
    first, down = (FP4ExpertWeight(2, n, k, device="meta") for n, k in ((64, 32), (32, 32)))
    return FP4Experts(first, down, Activation(), **options)


TAKERS = {
    "NVFP4Config": NVFP4Config,
    "Sparse24Config": Sparse24Config,
    "FP4InductorConfig": FP4InductorConfig,
    "ModelOptConfig": ModelOptConfig,
    "FP4Linear": lambda **options: FP4Linear(64, 32, **options),
    "Sparse24Linear": lambda **options: Sparse24Linear(64, 32, **options),
    "FP4Experts": experts,
    "FP4Linear.from_weight": lambda **options: FP4Linear.from_weight(WEIGHT, **options),
    "FP8Linear.from_weight": lambda **options: FP8Linear.from_weight(WEIGHT, **options),
    "Sparse24Linear.from_weight": lambda **options: Sparse24Linear.from_weight(SPARSE, **options),
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_keyword_under_its_old_name(name):
    with pytest.warns(DeprecationWarning, match=f"{OLD} is called prefill now") as seen:
        made = TAKERS[name](**{OLD: "bf16"})
    assert made.prefill == "bf16"
    assert [warning.filename for warning in seen] == [__file__]  # at the caller's line, where Python shows it
    with pytest.warns(DeprecationWarning, match="prefill"):
        assert getattr(made, OLD) == "bf16"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TAKERS[name](prefill="bf16").prefill == "bf16"


@pytest.mark.parametrize("name", TAKERS)
def test_both_names_are_refused(name):
    with pytest.raises(errors.ConfigError, match=f"{OLD} and prefill are one option") as error:
        TAKERS[name](**{OLD: "bf16", "prefill": "fp8"})
    assert error.value.value == f"{OLD}='bf16' and prefill='fp8'" and error.value.limit == "prefill" and OLD in error.value.remedy


def test_a_value_by_position_is_the_new_name():
    with pytest.raises(errors.ConfigError, match="one option"):
        NVFP4Config("amax", None, "bf16", **{OLD: "fp8"})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_bad_value_is_refused_under_the_new_name():
    with pytest.raises(errors.ConfigError, match="prefill is not a known choice"):
        NVFP4Config(**{OLD: "int3"})


def test_bounds():
    with pytest.warns(DeprecationWarning, match=OLD):
        old = fp4_inductor.bounds([(4096, 4096)], device="sm_90", **{OLD: "bf16"})
    assert old == fp4_inductor.bounds([(4096, 4096)], device="sm_90", prefill="bf16") != fp4_inductor.bounds([(4096, 4096)], device="sm_90")
    with pytest.raises(errors.ConfigError, match="one option"):
        fp4_inductor.bounds([(4096, 4096)], device="sm_90", prefill="bf16", **{OLD: "bf16"})


def test_load_pretrained():
    with pytest.warns(DeprecationWarning, match=f"load_pretrained: {OLD} is called prefill"):
        model = load_pretrained(MODELOPT, **{OLD: "bf16"})
    assert {m.prefill for m in model.modules() if type(m) is FP4Linear} == {"bf16"}
    with pytest.raises(errors.ConfigError, match="one option"):
        load_pretrained(MODELOPT, prefill="bf16", **{OLD: "bf16"})


def test_the_attribute_of_a_layer_can_be_set_by_its_old_name():
    layer = FP4Linear(64, 32)
    with pytest.warns(DeprecationWarning, match="FP4Linear"):
        setattr(layer, OLD, "bf16")
    assert layer.prefill == "bf16" and OLD not in vars(layer)


def test_the_settings_of_vllm():
    from fp4_inductor.integrations.vllm.settings import settings_of

    def of(**options):
        return settings_of(SimpleNamespace(additional_config={"fp4_inductor": options}))

    with pytest.warns(DeprecationWarning, match=OLD):
        assert of(**{OLD: "bf16"}) == of(prefill="bf16") != of()
    with pytest.raises(errors.ConfigError, match="one option"):
        of(prefill="bf16", **{OLD: "bf16"})


def stored(value: dict) -> dict:
    """``value`` as an earlier version wrote it: its own names, at any depth."""
    old = {new: name for name, new in OLD_NAMES.items()}
    return {old.get(name, name): stored(v) if isinstance(v, dict) else v for name, v in value.items()}


@pytest.fixture
def silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)


def test_a_checkpoint_of_version_2(tmp_path, silent):
    """The manifest as the version before wrote it: version 2, the old name in each layer."""
    torch.manual_seed(0)
    model = fp4_inductor.quantize_model(Net().bfloat16(), NVFP4Config("amax", prefill="bf16"), progress=False)
    fp4_inductor.save(model, tmp_path)
    file = tmp_path / mf.FILE
    body = json.loads(file.read_text())
    assert body["version"] == 3 and body["layers"]["up"]["prefill"] == "bf16" and OLD not in file.read_text()
    body = stored(body) | {"version": 2}
    body["checksum"] = mf.checksum(body)
    file.write_text(json.dumps(body))
    loaded = fp4_inductor.load(Net, tmp_path)
    assert loaded.up.prefill == loaded.down.prefill == "bf16" and torch.equal(loaded.up.qdata, model.up.qdata)


def test_experts_in_a_manifest_of_version_2(silent):
    entry = {"first": "gate_up_proj", "gate_up": [2, 64, 32], "down": [2, 32, 32], "dtype": "bfloat16", "bias": False, "dense": False}
    entry |= {"activation": {"name": "silu", "alpha": 1.702, "limit": None, "interleaved": False}, "input_scales": [], OLD: "bf16"}
    assert mf._experts("mlp.experts", entry, 2).prefill == "bf16"
    with pytest.raises(errors.CheckpointError, match="experts"):
        mf._experts("mlp.experts", entry | {"prefill": "bf16"}, 2)


def test_the_quantization_config_of_a_saved_model(silent):
    """What ``save_pretrained`` of the version before wrote into config.json, as transformers reads it."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    body = {"quant_method": "fp4_inductor", "scale_search": "amax", OLD: "bf16", "ignore": None, "version": 2}
    config = AutoQuantizationConfig.from_dict(body)
    assert type(config) is FP4InductorConfig and config.prefill == "bf16"
    assert config.to_dict()["prefill"] == "bf16" and OLD not in config.to_dict()
    assert ModelOptConfig.from_dict({"quant_method": "modelopt", OLD: "fp8"}).prefill == "fp8"
    with pytest.raises(errors.ConfigError, match="one option"):
        FP4InductorConfig.from_dict(body | {"prefill": "bf16"})


def test_a_folder_that_transformers_saved(tiny_saved, silent):
    from transformers import AutoModelForCausalLM

    for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
        model = load(tiny_saved)
        assert any(type(m) is FP4Linear for m in model.modules())
    assert model.model.layers[0].mlp.up_proj.prefill == "bf16"


@pytest.fixture
def tiny_saved(tmp_path):
    """A folder of ``save_pretrained`` whose config.json has the old name."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp4_inductor.quantize_model(model, NVFP4Config("amax", prefill="bf16"), progress=False).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    body = json.loads(file.read_text())
    assert body["quantization_config"]["prefill"] == "bf16"
    file.write_text(json.dumps(stored(body)))
    assert OLD in file.read_text()
    return tmp_path


def test_diffusers_config(silent):
    pytest.importorskip("diffusers")
    from fp4_inductor.integrations.diffusers.quantizer import FP4DiffusersConfig

    body = {"quant_method": "fp4_inductor", "version": 1, "layers": {}}
    assert FP4DiffusersConfig.from_dict(body | {OLD: "bf16"}).prefill == "bf16"
    with pytest.raises(errors.ConfigError, match="one option"):
        FP4DiffusersConfig.from_dict(body | {OLD: "bf16", "prefill": "bf16"})


@pytest.mark.parametrize("make", [lambda: FP4Linear(64, 32, prefill="bf16"), lambda: experts(prefill="bf16"), lambda: NVFP4Config("amax", prefill="bf16")])
def test_a_pickle_of_an_earlier_version(make, silent):
    value = make()
    state = value.__getstate__() if isinstance(value, FP4Linear) else vars(value)
    new = object.__new__(type(value))
    new.__setstate__(stored(dict(state)))
    assert new.prefill == "bf16" and OLD not in vars(new)
    assert copy.deepcopy(value).prefill == "bf16"
    if dataclasses.is_dataclass(value):
        assert pickle.loads(pickle.dumps(value)) == value == new
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    assert torch.load(file, weights_only=False).prefill == "bf16"


def test_current_leaves_what_has_both():
    assert current({OLD: 1, "k": 2}) == {"prefill": 1, "k": 2}
    assert current({OLD: 1, "prefill": 2}) == {OLD: 1, "prefill": 2}


def test_the_command_line():
    from fp4_inductor import cli
    from fp4_inductor.cli import quantize

    said = []
    screen = SimpleNamespace(error=lambda text, kind: said.append((kind, text)))

    def prefill_of(*given):
        return quantize.config_of(quantize.with_defaults(cli.parser().parse_args(["quantize", "MODEL", "OUT", *given]), screen)).prefill

    assert prefill_of() == "auto" and prefill_of("--prefill", "bf16") == "bf16" and not said
    assert prefill_of("--large-m", "bf16") == "bf16"
    assert said == [("warning", "quantize: --large-m is called --prefill now; the old name will be removed.")]
    with pytest.raises(errors.ConfigError, match="--large-m and --prefill are one option"):
        prefill_of("--large-m", "bf16", "--prefill", "fp8")


def test_the_old_option_is_not_in_the_help(capsys):
    from fp4_inductor import cli

    with pytest.raises(SystemExit):
        cli.main(["quantize", "--help"])
    shown = capsys.readouterr().out
    assert "--prefill" in shown and "--large" not in shown
