"""The README.md beside a saved model, which a hub shows as its model card: what to install to read it."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from transformers import PreTrainedModel

FILE = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CARD = """---
library_name: transformers
tags:
- fp4_inductor
- nvfp4
{base}---

# {title}

The weights of this model are packed in 4 bits by `fp4_inductor`. Install it, and import it before the model is loaded:

```sh
pip install "fp4_inductor[models]"
```

```python
import fp4_inductor  # teaches Transformers this format
from transformers import {auto}

model = {auto}.from_pretrained("path/to/this/folder")
```

Without that import Transformers answers "Unknown quantization type, got fp4_inductor", reports weights of another size, and
raises. Do not pass `ignore_mismatched_sizes=True` then: it replaces the weights by random ones.
"""


def card_of(model: PreTrainedModel) -> str:
    """The text of the card."""
    name = str(model.config.name_or_path or "")
    of_hub = _HUB_ID.fullmatch(name) is not None and not Path(name).exists()
    architecture = type(model).__name__
    return _CARD.format(
        base=f"base_model: {name}\nbase_model_relation: quantized\n" if of_hub else "",
        title=f"{Path(name).name if name else architecture} in FP4",
        auto=architecture if hasattr(transformers, architecture) else "AutoModel",
    )
