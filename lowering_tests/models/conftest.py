"""The tiny models of the families this package is held to: built and run in milliseconds on a CPU."""

from __future__ import annotations

import pytest

BASE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
ROUTED = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
GDN = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}

# family -> (configuration class, what differs from BASE)
DENSE = {
    "llama": ("LlamaConfig", {"intermediate_size": 128, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {"intermediate_size": 128, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"intermediate_size": 128, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"intermediate_size": 128, "sliding_window": 16}),
    "gemma3": ("Gemma3TextConfig", {"intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"intermediate_size": 128}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
}
MOE = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssConfig", {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "deepseek_v3": ("DeepseekV3Config", {"intermediate_size": 128, "n_group": 2, "topk_group": 1, **ROUTED, **MLA}),
    "glm4_moe": ("Glm4MoeConfig", {"intermediate_size": 128, "head_dim": 16, **ROUTED}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {"intermediate_size": 128, **ROUTED, **MLA}),
    "qwen3_next": ("Qwen3NextConfig", {"intermediate_size": 128, **GDN}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", GDN),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "moe", "attention"],
            "head_dim": 16,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_groups": 1,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            "intermediate_size": 32,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["mamba", "attention"],
            **MAMBA,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {"intermediate_size": 128, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"intermediate_size": 32, "num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "llama4": (
        "Llama4TextConfig",
        {"intermediate_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "moe_layers": [1]},
    ),
}


def build(family: str, dtype=None):
    """The tiny model, seeded, in eval mode."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    name, fields = (DENSE | MOE)[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**BASE | fields)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()


@pytest.fixture
def tiny():
    """``tiny("llama", dtype)``: a tiny model."""
    return build


def pytest_generate_tests(metafunc):
    for fixture, table in (("family", DENSE | MOE), ("dense_family", DENSE), ("moe_family", MOE)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, sorted(table))
