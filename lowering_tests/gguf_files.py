"""GGUF files with random values for any architecture that transformers reads, by its own maps; and gpt-oss as llama.cpp's converter writes it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

BLOCK = {"NVFP4": (64, 36), "MXFP4": (32, 17)}


def blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random weights of ``shape`` in the bytes of ggml, about 0.02 in size."""
    weights, bytes_ = BLOCK[kind]
    out = rng.integers(0, 256, (*shape[:-1], shape[-1] // weights, bytes_), dtype=np.uint8)
    if kind == "NVFP4":
        out[..., :4] = rng.integers(1, 0x20, out[..., :4].shape, dtype=np.uint8)
    else:
        out[..., 0] = rng.integers(116, 122, out[..., 0].shape, dtype=np.uint8)
    return out.reshape(*shape[:-1], -1)


def dequantized(raw: np.ndarray, kind: str) -> Tensor:
    return torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).copy())


class Writer:
    """A file and its metadata. ``config_keys``: transformers' map of metadata keys to config attributes."""

    def __init__(self, path: Path, arch: str, config, config_keys: dict[str, str | None]):
        self.file = gguf.GGUFWriter(path, arch)
        extra = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}
        for key, attribute in (extra | config_keys).items():
            value = getattr(config, attribute, None) if attribute not in (None, -1) else None
            if key == "rope.freq_base":
                value = float((config.rope_parameters or {}).get("rope_theta", 10000.0))
            if isinstance(value, bool):
                self.file.add_bool(f"{arch}.{key}", value)
            elif isinstance(value, int):
                self.file.add_uint32(f"{arch}.{key}", value)
            elif isinstance(value, float):
                self.file.add_float32(f"{arch}.{key}", value)
        if config.pad_token_id is not None:
            self.file.add_pad_token_id(config.pad_token_id)
        self.file.add_tokenizer_model("gpt2")
        self.file.add_token_list([f"t{i}" for i in range(config.vocab_size)])

    def packed(self, name: str, raw: np.ndarray, kind: str) -> None:
        self.file.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])

    def close(self) -> None:
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def write_random(model, path: Path, arch: str, kind: str) -> None:
    """Every matrix of a layer of ``model`` in ``kind``, all else in float32; names by transformers' map, turned round."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = model.config
    writer = Writer(path, arch, config, GGUF_CONFIG_MAPPING.get(arch) or GGUF_CONFIG_MAPPING[config.model_type.removesuffix("_text")])
    names = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(arch, TensorProcessor)(config=config.to_dict()))
    state, rng = model.state_dict(), np.random.default_rng(0)
    tied = model.all_tied_weights_keys
    for stored, name in names.items():
        if name in tied:
            continue
        shape = tuple(state[name].shape)
        if ".ffn_gate_exps" in stored or ".ffn_up_exps" in stored:
            shape = (shape[0], shape[1] // 2, shape[2])
        if arch == "gpt2" and len(shape) == 2 and any(part in stored for part in ("attn_qkv", "ffn_", "attn_output")):
            shape = shape[::-1]
        if "ffn_gate_inp_shexp" in stored:
            shape = shape[1:]
        file_name = stored if stored.endswith((".weight", ".bias")) else f"{stored}.weight"
        if len(shape) > 1 and "blk." in stored and "gate_inp" not in stored:
            writer.packed(file_name, blocks(rng, shape, kind), kind)
        else:
            values = rng.normal(0, 0.02, shape).astype(np.float32) + ("norm" in stored)
            writer.file.add_tensor(file_name, values.astype(np.float32))
    writer.close()


def write_gpt_oss(model, path: Path, kind: str = "MXFP4", *, scales: bool = False) -> dict[str, Tensor]:
    """As llama.cpp's GptOssModel: gate and up apart, biases too, sinks as attn_sinks.weight, experts in ``kind``; returns the dense values.

    ``scales``: a global scale for each expert beside the weights, as llama.cpp writes for NVFP4.
    """
    c = model.config
    keys = {
        "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size", "expert_feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim",
        "attention.value_length": "head_dim", "attention.sliding_window": "sliding_window", "rope.freq_base": "rope_theta",
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    }  # fmt: skip
    writer = Writer(path, "gpt-oss", c, keys)
    writer.file.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.file.add_rope_scaling_factor(8.0)
    writer.file.add_rope_scaling_orig_ctx_len(512)
    rng, dense = np.random.default_rng(0), {}
    for i in range(c.num_hidden_layers):
        block, layer = f"blk.{i}", f"model.layers.{i}"

        def plain(stored: str, name: str, *, block=block, layer=layer, dense=dense) -> None:
            values = rng.normal(0, 0.02, tuple(model.get_parameter(f"{layer}.{name}").shape)).astype(np.float32) + ("norm" in name)
            writer.file.add_tensor(f"{block}.{stored}", values.astype(np.float32))
            dense[f"{layer}.{name}"] = torch.from_numpy(values.astype(np.float32))

        plain("attn_norm.weight", "input_layernorm.weight")
        plain("post_attention_norm.weight", "post_attention_layernorm.weight")
        plain("attn_sinks.weight", "self_attn.sinks")
        for stored, name in (("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v"), ("attn_output", "o")):
            plain(f"{stored}.weight", f"self_attn.{name}_proj.weight")
            plain(f"{stored}.bias", f"self_attn.{name}_proj.bias")
        plain("ffn_gate_inp.weight", "mlp.router.weight")
        plain("ffn_gate_inp.bias", "mlp.router.bias")
        e, h, inner = c.num_local_experts, c.hidden_size, c.intermediate_size
        whole = rng.uniform(0.5, 2, e).astype(np.float32)
        values, biases = {}, {}
        for part, n, k in (("gate", inner, h), ("up", inner, h), ("down", h, inner)):
            raw = blocks(rng, (e, n, k), kind)
            writer.packed(f"{block}.ffn_{part}_exps.weight", raw, kind)
            values[part] = dequantized(raw, kind) * (torch.from_numpy(whole)[:, None, None] if scales else 1)
            if scales:
                writer.file.add_tensor(f"{block}.ffn_{part}_exps.scale", whole)
                writer.file.add_tensor(f"{block}.ffn_{part}_exps.input_scale", whole)
            bias = rng.normal(0, 0.02, (e, n)).astype(np.float32)
            writer.file.add_tensor(f"{block}.ffn_{part}_exps.bias", bias)
            biases[part] = torch.from_numpy(bias)
        gate_up, bias = torch.empty(e, h, 2 * inner), torch.empty(e, 2 * inner)
        gate_up[..., ::2], gate_up[..., 1::2] = values["gate"].mT, values["up"].mT
        bias[:, ::2], bias[:, 1::2] = biases["gate"], biases["up"]
        experts = f"{layer}.mlp.experts"
        dense |= {f"{experts}.gate_up_proj": gate_up, f"{experts}.down_proj": values["down"].mT.contiguous()}
        dense |= {f"{experts}.gate_up_proj_bias": bias, f"{experts}.down_proj_bias": biases["down"]}
    for stored, name in (("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")):
        values = rng.normal(0, 0.02, tuple(model.get_parameter(f"{name}.weight").shape)).astype(np.float32) + ("norm" in stored)
        writer.file.add_tensor(f"{stored}.weight", values.astype(np.float32))
        dense[f"{name}.weight"] = torch.from_numpy(values.astype(np.float32))
    writer.close()
    return dense
