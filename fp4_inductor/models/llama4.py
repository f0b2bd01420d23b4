"""Llama 4: dense ``bmm`` over transposed experts, the router's weight already on the tokens; the router is an nn.Linear with its own forward."""

from .family import Experts, Family

FAMILY = Family(name="llama4", experts=(Experts(r"Llama4TextExperts", (("gate_up_proj", "[E, K, N]"), ("down_proj", "[E, K, N]")), dense=True),))
