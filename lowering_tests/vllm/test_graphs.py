"""Which steps vLLM is asked to capture: larger ones for models with experts, where nobody has said which."""

from __future__ import annotations

import pytest
from vllm import EngineArgs
from vllm.config import CompilationMode, CUDAGraphMode

from fp4_inductor.errors import ConfigError
from fp4_inductor.integrations.vllm import engine, graphs

MOE, DENSE = "moe-modelopt", "llama-modelopt-nvfp4"


@pytest.fixture
def sizes(folders, monkeypatch):
    """The sizes of a GPU's engine. vLLM's own code makes them from a configuration, which a CPU has with other modes."""

    def sizes_of(name, capability=90, mode=CUDAGraphMode.FULL_AND_PIECEWISE, compiled=CompilationMode.VLLM_COMPILE, given=None, most=None, **options):
        options = {"quantization": "fp4_inductor", "max_num_batched_tokens": 8192, "max_num_seqs": 256, **options}
        args = EngineArgs(model=str(folders(name)), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=96, **options)
        config = args.create_engine_config()
        compilation = config.compilation_config
        compilation.mode, compilation.cudagraph_mode = compiled, mode
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = given, most
        with monkeypatch.context() as m:
            m.setattr(type(engine.current_platform), "is_device_capability", lambda *args, **_: args[-1] == capability)
            config._set_cudagraph_sizes()
        assert compilation.max_cudagraph_capture_size == max(compilation.cudagraph_capture_sizes, default=0)
        return compilation.cudagraph_capture_sizes

    return sizes_of


def test_experts_get_larger_graphs(sizes):
    own = sizes(DENSE)
    assert max(own) == graphs.VLLMS_OWN, "dense models keep what vLLM captures"
    assert sizes(MOE) == [*own, 640, 768, 1024, 1280, 1536, 1792, 2048]
    assert sizes(MOE, max_num_batched_tokens=1100) == [*own, 640, 768, 1024], "no step has more tokens"
    assert sizes(MOE, max_num_seqs=8) == [1, 2, 4, 8, 16, *graphs.TOKENS], "vLLM captures two tokens for a sequence"


@pytest.mark.parametrize(
    "change",
    [
        dict(capability=89), dict(capability=100), dict(mode=CUDAGraphMode.FULL), dict(mode=CUDAGraphMode.FULL_DECODE_ONLY), dict(mode=CUDAGraphMode.NONE),
        dict(compiled=CompilationMode.NONE), dict(given=[1, 8]), dict(most=256), dict(additional_config={"fp4_inductor": {"graphs": "vllm"}}),
        dict(quantization=None),
    ],
)  # fmt: skip
def test_all_else_is_vllms(sizes, change, monkeypatch):
    ours = sizes(MOE, **change)
    monkeypatch.setattr(graphs, "TOKENS", ())
    assert ours == sizes(MOE, **change)


def test_it_is_said_once(sizes, monkeypatch):
    said = []
    monkeypatch.setattr(graphs, "say_once", lambda text, compilation: said.append(text))
    sizes(MOE)
    assert len(said) == 1
    assert said[0].startswith("CUDA graphs of up to 2048 tokens") and '"graphs": "vllm"' in said[0]


def test_other_values_are_refused():
    from fp4_inductor.integrations.vllm.settings import Settings

    with pytest.raises(ConfigError, match="graphs"):
        Settings(graphs="all")
