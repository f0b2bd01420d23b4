"""gpt-oss: experts stored transposed, gate and up interleaved along the output, with biases."""

from .family import Experts, Family

FAMILY = Family(name="gpt_oss", experts=(Experts(r"GptOssExperts", (("gate_up_proj", "[E, K, N]"), ("down_proj", "[E, K, N]"))),))
