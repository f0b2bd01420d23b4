"""What a ``generate()`` did: which loop ran and why, how many steps, replays and looks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GenerationRecord:
    """Of one call of :func:`fp4_inductor.generate` or of ``model.generate(custom_generate=fp4_inductor.generate_loop)``.

    Attributes:
        loop: ``"device"``: this package's loop. ``"transformers"``: Transformers' own.
        reasons: why Transformers' loop ran; empty if it did not.
        notes: what this loop did otherwise than usual: what was not compiled or not captured, why every token was looked at, what was changed in the
            model for a KVCache that it made, or why it made a StaticCache.
        prompt: how this loop ran the prompt: padded and replayed, or as it is, and why.
        tokens: tokens of each row in the result, behind the prompt.
        steps: decode steps that were run, the prompt not counted.
        replays: steps that were a replay of a CUDA graph.
        captures: CUDA graphs that were captured.
        looks: how often the host waited for the device, to see whether all rows have ended.
        overrun: steps that were run after all rows had ended; result and cache do not have them.
        drafted: with prompt lookup, tokens that were taken from the text, in steps where something was found.
        accepted: how many tokens came without a step of their own, because a draft was right.
        seed: of the sampling; None for greedy tokens.
    """

    loop: str = "device"
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prompt: str = ""
    tokens: int = 0
    steps: int = 0
    replays: int = 0
    captures: int = 0
    looks: int = 0
    overrun: int = 0
    drafted: int = 0
    accepted: int = 0
    seed: int | None = None

    def __str__(self) -> str:
        if self.loop != "device":
            return "generate(): Transformers' loop, because " + "; ".join(self.reasons)
        text = f"generate(): {self.tokens} tokens, {self.steps} steps ({self.replays} replayed), {self.looks} looks, {self.overrun} steps over"
        if self.drafted:
            text += f", {self.accepted} of {self.drafted} drafted tokens accepted"
        if self.prompt:
            text += f", the prompt {self.prompt}"
        return "; ".join([text, *self.notes])
