"""Nemotron-H: experts without a gate (relu squared)."""

from .family import Experts, Family

FAMILY = Family(name="nemotron_h", experts=(Experts(r"NemotronHExperts", (("up_proj", "[E, N, K]"), ("down_proj", "[E, N, K]"))),))
