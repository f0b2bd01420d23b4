"""What the tests of other libraries' checkpoints share: the fixtures, writers for formats without one, comparing models."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp4_inductor import FP4Linear, NVFP4Config
from fp4_inductor.formats import mxfp4
from fp4_inductor.modules import FP4Experts

FIXTURES = Path(__file__).parent / "fixtures" / "checkpoints"
MODELOPT, COMPRESSED, TORCHAO, MIXTRAL = (
    FIXTURES / name for name in ("llama-modelopt-nvfp4", "llama-compressed-tensors-nvfp4", "llama-torchao-nvfp4", "mixtral-modelopt-nvfp4")
)
PLAIN = NVFP4Config("four_over_six")  # no text to write first: quick
IDS = torch.arange(24).reshape(2, 12) % 128


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Equal names, dtypes, shapes and bits."""
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, t in left.items():
        assert (t.dtype, t.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(bits(t), bits(right[name])), name


@torch.no_grad()
def logits(model) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits.double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def dequantized(model, config) -> nn.Module:
    """A dense model of transformers with the values that ``model`` has packed."""
    import transformers

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._experts_implementation = "eager"
    dense = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    plain = dense.state_dict()
    state = {n: t for n, t in model.state_dict().items() if n in plain}
    for name, module in model.named_modules():
        if isinstance(module, FP4Linear):
            w = module.dequantize()
            state[f"{name}.weight"] = w.t() if type(dense.get_submodule(name)).__name__ == "Conv1D" else w
        elif isinstance(module, FP4Experts):
            for part in (module.first_name, "down_proj"):
                weight = getattr(module, part)
                w, shape = weight.dequantize(), plain[f"{name}.{part}"].shape
                transposed = type(dense.get_submodule(name)).__name__ in ("GptOssExperts", "Llama4TextExperts")
                state[f"{name}.{part}"] = w.mT if transposed else w
                assert state[f"{name}.{part}"].shape == shape
                if weight.bias is not None:
                    state[f"{name}.{part}_bias"] = weight.bias
    dense.load_state_dict(state, strict=False)
    missing = set(plain) - set(state) - set(dense.all_tied_weights_keys)
    assert not missing, missing
    return dense


def reloaded(model, directory: Path):
    """``model`` as from_pretrained gives it: some architectures keep some tensors in float32 then."""
    import transformers

    model.save_pretrained(directory)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=model.dtype)


def write(directory: Path, state: dict[str, Tensor], config: dict) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({n: t.contiguous().clone() for n, t in state.items()}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def config_of(model, quantization: dict) -> dict:
    body = json.loads(model.config.to_json_string(use_diff=False))
    return body | {"quantization_config": quantization, "architectures": [type(model).__name__], "dtype": "bfloat16"}


def random_mxfp4(n: int, k: int, span: int, lead: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    """Codes and exponents, the exponents from 2**-16 to ``span`` octaves above."""
    qdata = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(111, 111 + span + 1, (*lead, n, k // mxfp4.GROUP), dtype=torch.uint8)
    scale[..., 0, 0], scale[..., -1, -1] = 111, 111 + span
    return qdata, scale


def write_gpt_oss(model, directory: Path, span: int = 9) -> dict[str, Tensor]:
    """openai's layout of ``model``, with random experts; returns the dense values of the expert weights."""
    state, dense = {}, {}
    for name, t in model.state_dict().items():
        if t.dim() == 3:
            e, k, n = t.shape
            qdata, scale = random_mxfp4(n, k, span, (e,))
            state[f"{name}_blocks"], state[f"{name}_scales"] = qdata.unflatten(-1, (-1, 16)), scale
            dense[name] = mxfp4.dequantize(qdata, scale, torch.float32).mT
        else:
            state[name] = torch.randn_like(t) if name.endswith("_bias") else t
    write(directory, state, config_of(model, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}))
    return dense


def write_mxfp4_pack(model, directory: Path, span: int = 9) -> dict[str, Tensor]:
    """compressed-tensors' mxfp4-pack-quantized of ``model``'s projections, with random values; returns the dense ones."""
    state, dense = {}, {}
    for name, t in model.state_dict().items():
        if name.endswith("_proj.weight"):
            qdata, scale = random_mxfp4(*t.shape, span)
            state[f"{name}_packed"], state[f"{name}_scale"] = qdata, scale
            dense[name] = mxfp4.dequantize(qdata, scale, torch.float32)
        else:
            state[name] = t
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    group = {"format": "mxfp4-pack-quantized", "weights": weights, "targets": ["Linear"]}
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed"}
    write(directory, state, config_of(model, quantization | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}))
    return dense


def write_mixed(directory: Path, *, kv_cache: bool = True, high: str = "q_proj") -> dict[str, str]:
    """A ModelOpt MIXED_PRECISION checkpoint, ``high`` in bfloat16; returns the algorithm of every layer that has one.

    No real export was at hand: the NVFP4 fixture, whose o_proj and down_proj are made FP8 and whose ``high`` bfloat16 as modelopt 0.47's
    source does it (quant_utils.to_quantized_weight, process_layer_quant_config; convert_hf_config for config.json).
    """
    state, algorithms = load_file(MODELOPT / "model.safetensors"), {}
    for name in [n.removesuffix(".weight_scale_2") for n in state if n.endswith(".weight_scale_2")]:
        last = name.rpartition(".")[2]
        algorithms[name] = {"o_proj": "FP8", "down_proj": "FP8", high: ""}.get(last, "NVFP4")
        if algorithms[name] == "NVFP4":
            continue
        parts = [state.pop(f"{name}.{part}") for part in ("weight", "weight_scale", "weight_scale_2")]
        dense = torch.ops.fp4.dequantize(*parts, torch.bfloat16)
        state[f"{name}.weight"] = dense
        of_input = state.pop(f"{name}.input_scale")
        if last != high:
            scale = dense.abs().amax().float() / 448
            state[f"{name}.weight"], state[f"{name}.weight_scale"] = (dense / scale).to(torch.float8_e4m3fn), scale
            state[f"{name}.input_scale"] = of_input * 6  # amax / 448 where NVFP4 has amax / (6 * 448)
    if kv_cache:
        for i in range(2):
            for part in "kv":
                state[f"model.layers.{i}.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.25)
    algorithms = {name: kind for name, kind in algorithms.items() if kind}
    layers = {name: {"quant_algo": kind} | ({"group_size": 16} if kind == "NVFP4" else {}) for name, kind in algorithms.items()}
    groups = {
        f"group_{i}": {
            "input_activations": {"dynamic": False, "num_bits": bits_, "type": "float"} | size,
            "weights": {"dynamic": False, "num_bits": bits_, "type": "float"} | size,
            "targets": sorted(n for n, k in algorithms.items() if k == kind),
        }
        for i, (kind, bits_, size) in enumerate((("NVFP4", 4, {"group_size": 16}), ("FP8", 8, {})))
    }
    config = json.loads((MODELOPT / "config.json").read_text())
    producer = {"name": "modelopt", "version": "0.47.0"}
    config["quantization_config"] = {
        "config_groups": groups, "quantized_layers": layers, "ignore": [], "quant_algo": "MIXED_PRECISION",
        **({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}} if kv_cache else {}),
        "producer": producer, "quant_method": "modelopt",
    }  # fmt: skip
    write(directory, state, config)
    body = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8" if kv_cache else None, "quantized_layers": layers}
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": body}))
    return algorithms


def write_gguf(model, path: Path) -> dict[str, Tensor]:
    """A llama GGUF of ``model`` written with gguf-py: projections in NVFP4 with random values, the embedding in Q8_0; returns the dense values.

    The NVFP4 values are those of gguf-py's own decoder, in llama.cpp's order of rows, put back into the model's.
    """
    import gguf

    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, c.num_hidden_layers)
    rng, dense = np.random.default_rng(0), {}
    for name, t in model.state_dict().items():
        stored = table.get_name(name, try_suffixes=(".weight",))
        if name.endswith("_proj.weight"):
            n, k = t.shape
            blocks = rng.integers(0, 256, (n, k // 64, 36), dtype=np.uint8)
            blocks[..., :4] = rng.integers(1, 0x60, (n, k // 64, 4), dtype=np.uint8)
            whole = np.float32(rng.uniform(1e-4, 1e-3))
            writer.add_tensor(stored, blocks.reshape(n, -1), raw_dtype=gguf.GGMLQuantizationType.NVFP4)
            writer.add_tensor(stored.replace(".weight", ".scale"), np.array([whole]))
            w = gguf.quants.NVFP4.dequantize_blocks(blocks.reshape(-1, 36)).reshape(n, k) * whole
            heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(name.split(".")[-2])
            if heads:
                w = w.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k)
            dense[name] = torch.from_numpy(np.ascontiguousarray(w))
        elif name == "model.embed_tokens.weight":
            q = gguf.quantize(t.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(stored, q, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            dense[name] = torch.from_numpy(gguf.dequantize(q, gguf.GGMLQuantizationType.Q8_0).copy())
        else:
            writer.add_tensor(stored, t.float().numpy())
            dense[name] = t.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dense


def raw(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")
