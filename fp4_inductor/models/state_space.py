"""State-space and linear-attention layers: Mamba 1 and 2, gated delta net (Qwen3-Next, Qwen3.5), RG-LRU (RecurrentGemma)."""

from .family import Family, Skip, Stack

FAMILY = Family(
    name="state_space",
    skips=(
        Skip(r"(^|\.)conv1d$", "short convolution, not a matrix product"),
        Skip(r"(^|\.)conv\.conv$", "short convolution, not a matrix product"),
        Skip(r"(^|\.)in_proj_(a|b|ba)$", "decay and write strength of the recurrent state: a few rows whose error accumulates over time"),
        Skip(r"(^|\.)dt_proj$", "step size of the state-space scan, which reads the weight itself"),
    ),
    stacks=(
        Stack(r".*", r"A_log", "decay of the state-space scan: exponentiated element by element, no matrix product"),
        Stack(r".*", r"dt_proj_weight", "step size of the state-space scan, one small matrix a head"),
        Stack(r".*Rglru", r"(input|recurrent)_gate_weight", "gate of the recurrence, one small matrix a head: its error accumulates over time"),
    ),
    siblings=(("in_proj_qkv", "in_proj_z"),),  # gated delta net of Qwen3.5
)
