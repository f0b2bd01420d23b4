"""What ``scale_search="gptq"`` has finished, kept outside the process, so that an interrupted run can go on where it was.

The text that the model wrote, and each rounded layer or module of experts: its codes, scales and global scales, and what the report says of
them. Everything else (statistics, gradients, Hessians) is measured again, by the same passes over the same dense model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..config import NVFP4Config, weight_only
from ..errors import ConfigError
from ..modules import FP4ExpertWeight, FP4Linear
from .convert import dense_weight, rows_to_pad
from .plan import ExpertsTarget, Target
from .sparsify_experts import PrunedExperts, empty_weight

_TEXT = "text"
_VERSION = 1  # of how layers are rounded: another number, and what an earlier version kept is refused


class LayerStore(Protocol):
    """Named sets of tensors that survive the process. ``place``: for messages."""

    place: str

    def open(self, fingerprint: dict[str, str]) -> None:
        """Begin, or go on with what was written under the same ``fingerprint``; an error if there is another's."""

    def read(self, key: str, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] | None = None) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """``(tensors on the CPU, words)``; None if there is nothing of this key. ``expected``: dtypes and shapes."""

    def write(self, key: str, tensors: dict[str, Tensor], words: dict[str, str]) -> None: ...


class FinishedLayers:
    """The finished layers of one run.

    Args:
        store: where they are.
        items: all that the run has to round, in order.
        given: batches of text that were given.
        settings: all else that the result depends on.

    Raises:
        CheckpointError: ``store`` holds the layers of another run, or is not usable.
        ConfigError: ``given`` holds something that cannot be compared.
    """

    def __init__(self, store: LayerStore, model: nn.Module, items: Sequence[list[Target] | ExpertsTarget], given: list[Any], settings: dict[str, Any]):
        self._store = store
        self._keys = {_name(item): f"layer-{i:05d}" for i, item in enumerate(items)}
        self.total, self.taken = len(items), 0
        store.open({
            "weights": _digest_of_model(model),
            "calibration": _digest_of_batches(given),
            "layers": _sha256([n.encode() + b"\0" for item in items for n in _names(item)]),
            "options": ", ".join(f"{k}={v}" for k, v in {**settings, "version": _VERSION}.items()),
        })  # fmt: skip

    def note(self) -> str:
        """For the report."""
        return f"{self.taken} of {self.total} layers were finished by an earlier run and come from checkpoint_dir={self._store.place!r}"

    def text(self) -> Tensor | None:
        """Token ids that the model wrote."""
        found = self._store.read(_TEXT)
        return None if found is None else found[0]["input_ids"]

    def keep_text(self, ids: Tensor) -> None:
        self._store.write(_TEXT, {"input_ids": ids}, {})

    def layer(self, group: list[Target], config: NVFP4Config, device: torch.device) -> tuple[tuple[FP4Linear, float], list[str]] | None:
        """``((layer, relative error), names of layers whose tokens were weighted by the norm of their inputs)`` as :meth:`keep_layer` got them."""
        dense = dense_weight(group[0])
        prefill = weight_only(config.prefill) if group[0].head else config.prefill
        layer = FP4Linear(dense.shape[1], dense.shape[0], dtype=dense.dtype, device="meta", prefill=prefill)
        found = self._read(group, _parts("", layer))
        if found is None:
            return None
        tensors, said = found
        layer.take(tuple(tensors[n].to(device) for n in layer.TENSOR.PARTS))
        return (layer, said["error"]), said["by_norms"]

    def keep_layer(self, group: list[Target], layer: FP4Linear, error: float, by_norms: list[str]) -> None:
        self._write(group, _parts("", layer), {"error": error, "by_norms": by_norms})

    def experts(self, target: ExpertsTarget, device: torch.device) -> tuple[list[PrunedExperts], list[str]] | None:
        """As :meth:`layer`, of both weights of a module of experts."""
        pads = rows_to_pad(target, FP4ExpertWeight.storage().k_multiple)
        attributes = target.spec.parameters[:2]
        weights = {a: empty_weight(FP4ExpertWeight, target, a, pads[a], torch.device("meta")) for a in attributes}
        found = self._read(target, {k: v for a in attributes for k, v in _parts(a, weights[a]).items()})
        if found is None:
            return None
        tensors, said = found
        for a, weight in weights.items():
            weight.take(tuple(tensors[f"{a}.{n}"].to(device) for n in weight.TENSOR.PARTS))
        rows = {a: said[a] for a in attributes}
        both = [PrunedExperts(target, a, weights[a], pads[a], r["error"], r["output"], r["score"], tuple(r["notes"])) for a, r in rows.items()]
        return both, said["by_norms"]

    def keep_experts(self, both: list[PrunedExperts], by_norms: list[str]) -> None:
        tensors = {k: v for p in both for k, v in _parts(p.attribute, p.weight).items()}
        rows = {p.attribute: {"error": p.error, "output": p.output, "score": p.score, "notes": p.notes} for p in both}
        self._write(both[0].target, tensors, {**rows, "by_norms": by_norms})

    def _read(self, item: list[Target] | ExpertsTarget, parts: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        found = self._store.read(self._keys[_name(item)], {n: (t.dtype, tuple(t.shape)) for n, t in parts.items()})
        if found is None:
            return None
        self.taken += 1
        return found[0], json.loads(found[1]["report"])

    def _write(self, item: list[Target] | ExpertsTarget, parts: dict[str, Tensor], said: dict[str, Any]) -> None:
        self._store.write(self._keys[_name(item)], parts, {"name": _name(item), "report": json.dumps(said)})


def _parts(prefix: str, weight: FP4Linear | FP4ExpertWeight) -> dict[str, Tensor]:
    return {f"{prefix}.{n}".lstrip("."): t for n, t in zip(weight.TENSOR.PARTS, weight.parts(), strict=True)}


def _name(item: list[Target] | ExpertsTarget) -> str:
    return item.name if isinstance(item, ExpertsTarget) else item[0].name


def _names(item: list[Target] | ExpertsTarget) -> list[str]:
    return [item.name] if isinstance(item, ExpertsTarget) else [t.name for t in item]


def _digest_of_model(model: nn.Module) -> str:
    """Of every Parameter and buffer, those that are in no checkpoint included, and of what the config of a model of Transformers says."""
    parts: list[bytes] = [f"{type(model).__module__}.{type(model).__qualname__}".encode()]
    config = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        said = {k: v for k, v in config.to_dict().items() if k != "_name_or_path"} | {"attention": getattr(config, "_attn_implementation", None)}  # type: ignore[union-attr]
        parts.append(json.dumps(said, sort_keys=True, default=str).encode())
    digest = hashlib.sha256(b"\0".join(parts))
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        _add(digest, name, t)
    return digest.hexdigest()


def _digest_of_batches(batches: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        _add(digest, "batch", batch)
    return digest.hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    """Add what ``value`` holds: tensors, containers of them, numbers and text."""
    if isinstance(value, Tensor):
        plain = value.detach().contiguous().cpu()
        digest.update(f"{name}\0{plain.dtype}\0{tuple(plain.shape)}\0".encode())
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"{name}\0{{{len(value)}\0".encode())
        for key, item in value.items():
            _add(digest, repr(key), item)
    elif isinstance(value, (tuple, list)):
        digest.update(f"{name}\0[{len(value)}\0".encode())
        for item in value:
            _add(digest, "", item)
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"{name}\0{value!r}\0".encode())
    else:
        raise ConfigError(
            "checkpoint_dir: it cannot be told whether calibration is the same in another run",
            value=f"{name}: {type(value).__name__}",
            limit="batches of tensors, numbers and text",
            remedy="Leave it out of the batches, or leave checkpoint_dir out.",
        )


def _sha256(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()
