"""The plugin is found, changes nothing unless it is asked for, and where it cannot work vLLM serves other models as before."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
import vllm
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from fp4_inductor.errors import ConfigError
from fp4_inductor.integrations import vllm as plugin
from fp4_inductor.integrations.vllm import engine
from lowering_tests.vllm import served

NAME = "fp4_inductor"


@pytest.fixture(autouse=True)
def _registered():
    yield
    plugin.register()


def config_of(folder, **options):
    """vLLM's configuration of a folder; no engine is built."""
    from vllm import EngineArgs

    return EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=96, **options).create_engine_config()


def test_entry_point_is_found():
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name=NAME)
    assert [e.load() for e in found] == [plugin.register]


def test_versions_are_those_that_run():
    assert vllm.__version__.partition("+")[0] in engine.VERSIONS


def test_every_private_name_exists():
    """What moves in a new version of vLLM is named here at once."""
    for name, module in engine.names().items():
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    importlib.import_module("vllm.ir.ops")
    x, weight = torch.ones(2, 4), torch.ones(4)
    for name, args, results in ((engine.NORM, (x, weight, 1e-6), 1), (engine.ADD_NORM, (x, x, weight, 1e-6), 2)):
        called = getattr(torch.ops.vllm_ir, name.removeprefix("vllm_ir::")).default
        assert called.name() == name
        assert len(called._schema.returns) == results
        given = [a.name for a in called._schema.arguments]
        assert given == ["x", *["x_residual"] * (results - 1), "weight", "epsilon", "variance_size"]
        first = called(*args)[0] if results > 1 else called(*args)
        assert torch.allclose(first, x)


def test_registering_twice_is_harmless():
    plugin.register()
    plugin.register()
    assert get_quantization_config(NAME).override_quantization_method({"quant_method": NAME}, None) == NAME


@pytest.mark.parametrize(("asked", "kind"), [(None, ModelOptNvFp4Config), (NAME, ModelOptNvFp4Config)])
def test_only_who_asks_gets_it(folders, asked, kind):
    """Without quantization= the config is vLLM's own class; with it ours, a subclass that keeps vLLM's name."""
    if asked is None:
        from vllm.model_executor.layers.quantization import modelopt

        source = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        assert get_quantization_config(NAME).override_quantization_method(source, None) is None
        assert get_quantization_config("modelopt_fp4") is modelopt.ModelOptNvFp4Config
        return
    made = config_of(folders("llama-modelopt-nvfp4"), quantization=asked).quant_config
    assert isinstance(made, kind)
    assert type(made) is not kind
    assert made.get_name() == "modelopt_fp4"


def test_untested_version_refuses_by_name_and_leaves_the_rest(monkeypatch):
    monkeypatch.setattr(engine, "version", lambda: "9.9.9")
    plugin.register()
    config = get_quantization_config(NAME)
    assert config.override_quantization_method({"quant_method": "modelopt"}, None) is None
    for refused in (
        lambda: config.override_quantization_method({"quant_method": "modelopt"}, NAME),
        lambda: config.override_quantization_method({"quant_method": NAME}, None),
        lambda: config.from_config({}),
    ):
        with pytest.raises(ConfigError, match=r"9\.9\.9.*0\.22\.1.*Install one of these"):
            refused()


def test_plugin_that_cannot_load_only_warns(monkeypatch):
    """A private name of vLLM that moved, or anything else, is a warning: other models are served."""

    def moved(name):
        raise AttributeError(f"module 'vllm' has no attribute {name}")

    monkeypatch.setattr(plugin, "_register", lambda: moved("register_quantization_config"))
    with pytest.warns(RuntimeWarning, match=r"no attribute register_quantization_config.*all other models are served as before"):
        plugin.register()


def test_a_dense_model_is_served_as_before():
    from lowering_tests.vllm.conftest import ASSETS

    with served.engine(ASSETS / "austen_dense") as llm:
        if served.in_process():
            assert "FP4LinearMethod" not in {type(getattr(m, "quant_method", None)).__name__ for m in llm.model.modules()}
        assert len(llm.ask([[64]], 2)[0][0]) == 2
