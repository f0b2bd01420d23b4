"""F4: ``generate()`` with every step on the device. Importing this package does not import transformers.

``loop.py`` has the two doors, ``options.py`` and ``reasons.py`` what is refused and what runs Transformers' loop, ``session.py`` the loop over a cache,
``prompts.py`` prompts that are padded and replayed, ``step.py`` one step, ``lookup.py`` one with drafts from the text, ``sampling.py`` and ``processors.py``
the choice of a token, ``aside.py`` what takes all traces of a call off the model. What is specific to CUDA is in ``_replay.py``.
"""

from __future__ import annotations

from .caches import release_memory
from .loop import generate, generate_loop, generation_record
from .options import LoopOptions
from .record import GenerationRecord

__all__ = ["GenerationRecord", "LoopOptions", "generate", "generate_loop", "generation_record", "release_memory"]
