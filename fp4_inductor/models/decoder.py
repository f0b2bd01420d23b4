"""What every decoder shares: output heads and routers."""

from __future__ import annotations

from torch import nn

from .family import Experts, Family, Skip, Stack


def _narrow(module: nn.Module) -> bool:
    """A router has few outputs. A feed-forward layer that happens to be called ``gate`` has more outputs than inputs."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and 2 * weight.shape[0] <= weight.shape[1]


FAMILY = Family(
    name="decoder",
    skips=(
        Skip(r"(^|\.)(lm_head|embed_out|output_projection|codebooks_head)$", "output head: its error goes straight into the logits"),
        Skip(r"(^|\.)(score|classifier|qa_outputs)$", "task head: few weights, and its error goes straight into the answer", _narrow),
        Skip(
            r"(^|\.)(gate|router|wg|gate\.(wg|moe_statics)|router\.(layer|classifier|proj))$",
            "router: a changed expert choice costs more than its weights weigh",
            _narrow,
        ),
        Skip(r"(^|\.)(gate|router)\.moe_statics$", "router: balancing bias"),
        Skip(r"(^|\.)shared_expert_gate$", "router: gate of the shared expert"),
    ),
    stacks=(
        # Gemma 4's and Kimi's vision towers: [2, positions, H], or a grid [height, width, H].
        Stack(r".*", r"(.*_)?pos(ition(al)?)?(_.*|s)?", "position table: a lookup or a sum, no matrix product"),
    ),
    # The storage that transformers' @use_experts_implementation gives most families: mixtral, qwen2/3_moe, olmoe,
    # deepseek, glm4_moe, granitemoe, minimax, ernie4_5_moe, lfm2_moe, hunyuan_moe.
    experts=(Experts(r".*Experts", (("gate_up_proj", "[E, N, K]"), ("down_proj", "[E, N, K]"))),),
    # Gate before up: the fused act(gate) * up wants that order.
    siblings=(
        ("q_proj", "k_proj", "v_proj"),  # llama, qwen, mistral, gemma, opt, whisper ...
        ("gate_proj", "up_proj"),  # llama and its relatives
        ("query", "key", "value"),  # bert, vit
        ("w1", "w3"),  # llama's own names; w2 is the down projection
        ("wi_0", "wi_1"),  # t5
        ("q_lin", "k_lin", "v_lin"),  # distilbert
        ("to_q", "to_k", "to_v"),  # diffusion transformers
        ("q_a_proj", "kv_a_proj_with_mqa"),  # deepseek
    ),
)
