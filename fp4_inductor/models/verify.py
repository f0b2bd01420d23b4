"""``verify``: what a quantized model lost of its source, on a text, and which of its layers lost it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, nn

from ..errors import ConfigError
from . import self_calibration
from .evaluate import Evaluation, evaluate, predictions
from .layer_shares import LayerShare, layer_shares

SEQUENCES, TOKENS = 16, 256  # of the text that the source writes
_SEED = 1  # not that of text to calibrate on
_WORST = 10


@dataclass(frozen=True)
class Verification:
    """What :func:`verify` measured; ``str()`` of it is a table.

    Args:
        model, source: perplexity of both; KL and agreement are those of ``model`` with ``source``.
        layers: the share of each quantized layer, the largest first; empty if they were not asked for or cannot be had.
        notes: why not, and layers without a counterpart.
    """

    model: Evaluation
    source: Evaluation
    layers: tuple[LayerShare, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        """Perplexity of the model over that of the source."""
        return self.model.perplexity / self.source.perplexity

    @property
    def kinds(self) -> dict[str, tuple[int, float]]:
        """``{"down_proj": (layers, share)}``, the largest share first."""
        found: dict[str, list[float]] = defaultdict(list)
        for layer in self.layers:
            found[layer.name.rpartition(".")[2]].append(layer.share)
        return {kind: (len(shares), sum(shares)) for kind, shares in sorted(found.items(), key=lambda item: -sum(item[1]))}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The table."""
        rows = [f"{'':10} {'perplexity':>11} {'ratio':>7} {'nats':>8} {'KL':>8} {'same token':>11}"]
        rows.append(f"{'source':10} {self.source.perplexity:11.4f} {'':7} {self.source.nats:8.4f}")
        kl, agreement = self.model.kl or 0.0, self.model.agreement or 0.0
        rows.append(f"{'quantized':10} {self.model.perplexity:11.4f} {self.ratio:7.4f} {self.model.nats:8.4f} {kl:8.5f} {100 * agreement:9.1f} %")
        return rows + self.shares()

    def shares(self, worst: int = _WORST) -> list[str]:
        """The part of the table that is about layers: by kind, then the ``worst`` single ones."""
        rows = []
        if self.layers:
            total = sum(layer.kl for layer in self.layers)
            rows.append(f"{'share':>7} {'KL':>9} {'error':>7}  each layer alone, predicted; {total:.5f} in all")
            rows += [f"{100 * share:6.1f}% {share * total:9.6f} {'':7}  {kind} ({count})" for kind, (count, share) in self.kinds.items()]
            rows += [f"{100 * i.share:6.1f}% {i.kl:9.6f} {i.output_error:7.4f}  {i.name}" for i in self.layers[:worst]]
            if len(self.layers) > worst:
                rest = self.layers[worst:]
                rows.append(f"{100 * sum(i.share for i in rest):6.1f}% {sum(i.kl for i in rest):9.6f} {'':7}  {len(rest)} others")
        return rows + [f"note: {note}" for note in self.notes]


def own_windows(source: nn.Module, sequences: int | None = None, tokens: int | None = None) -> Tensor:
    """int64 ``[sequences, tokens + 1]`` (default ``[16, 257]``): a text that ``source`` writes, half of it from random tokens.

    It is not the text that ``quantize_model`` calibrates on.

    Raises:
        CalibrationError: the model cannot write.
    """
    count, length = sequences or SEQUENCES, tokens or TOKENS
    return self_calibration.write(source, count, length + 1, random_first=count // 2, seed=_SEED)[0]["input_ids"]  # type: ignore[return-value]


def verify(model: nn.Module, source: nn.Module, windows: Tensor | None = None, *, layers: bool = True, progress: bool = False) -> Verification:
    """Compare a quantized language model with the one that it was made from.

    Perplexity of both, KL(source || model) and how often both find the same token likeliest; and for each quantized layer the KL that it
    alone causes, as one backward pass through ``source`` predicts it. It does not matter who quantized the model: one that
    :func:`fp4_inductor.load_pretrained` read from another exporter's checkpoint is measured in the same way.

    Args:
        model: the quantized model. Neither model is changed.
        source: the dense model, of the same architecture and on the same device.
        windows: int64 ``[W, T + 1]``, T tokens and their successors (:func:`fp4_inductor.models.evaluate.windows_of`); None: a text that
            ``source`` writes.
        layers: False leaves the shares out: no backward pass.
        progress: show progress bars.

    Raises:
        ShapeError, ConfigError: as :func:`fp4_inductor.evaluate`; ConfigError too for ``model is source``.
        CalibrationError: no windows, and ``source`` cannot write.
    """
    if model is source:
        limit = "two models"
        raise ConfigError("a model is compared with itself", value=type(model).__name__, limit=limit, remedy="quantize_model works in place: keep a deepcopy.")
    windows = own_windows(source) if windows is None else windows
    expected = predictions(source, windows, progress=progress)
    got = evaluate(model, windows, reference=expected, progress=progress)
    shares, notes = layer_shares(model, source, windows, progress=progress) if layers else ([], [])
    return Verification(got, evaluate(expected, windows), tuple(shares), tuple(notes))
