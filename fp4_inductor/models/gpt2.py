"""GPT-2 and its relatives: linear layers as ``Conv1D`` with the weight transposed, ``[in, out]``."""

from .family import Family

FAMILY = Family(name="gpt2", linears=(("transformers.pytorch_utils", "Conv1D"),))
