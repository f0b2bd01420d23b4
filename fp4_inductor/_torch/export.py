"""What torch.export says of itself."""

from __future__ import annotations

import torch


def is_exporting() -> bool:
    """Whether ``torch.export`` traces now.

    Dynamo of torch 2.11 takes ``torch.compiler.is_exporting()`` for True whatever it traces for; the flag itself it reads.
    """
    return bool(torch.compiler._is_exporting_flag)
