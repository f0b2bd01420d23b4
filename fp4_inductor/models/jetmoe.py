"""JetMoE and Aria: one module for each product of the experts, called with the tokens sorted by expert. JetMoE's attention has experts too."""

from .family import Family, Stack

FAMILY = Family(
    name="jetmoe",
    stacks=(
        Stack(r"JetMoeParallelExperts", r"weight", quantized="[E, N, K]"),
        Stack(r"AriaGroupedExpertsGemm", r"weight", quantized="[E, K, N]"),
    ),
)
