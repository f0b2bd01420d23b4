"""Where a checkpoint is: a folder, a file, or a repository on the hub. Answered before transformers looks, which tries for half a minute."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...checkpoint.aside import as_path
from ...checkpoint.shards import CONFIG
from ...errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PATIENCE = 3.0  # seconds for a connection to the hub


def find_checkpoint(path_or_id: str | os.PathLike, options: Mapping[str, Any]) -> tuple[Path, bool]:
    """``(path, False)`` of a folder or file on this machine, its ``subfolder`` included, or ``(path_or_id, True)`` of a hub id.

    Raises:
        ConfigError: no path at all. CheckpointError: a path that does not exist, a subfolder that the folder has not.
    """
    path = as_path(path_or_id, "path_or_id")
    if path.is_file():
        return path, False
    if path.is_dir():
        subfolder = str(options.get("subfolder") or "")
        inside = path / subfolder
        if not inside.is_dir():
            raise CheckpointError("the checkpoint has no such subfolder", value=subfolder, limit=f"a folder in {path}", remedy="Correct subfolder=.")
        return inside, False
    if isinstance(path_or_id, os.PathLike) or not _HUB_ID.fullmatch(str(path_or_id)) or path.suffix in (".gguf", ".safetensors"):
        there = next((p for p in path.parents if p.exists()), Path())
        raise CheckpointError(
            "there is no such file or folder", value=str(path), limit=f"a path that exists (as far as {there} it does), or a hub id", remedy="Correct the path."
        )
    return path, True


def hub_options(repository: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``local_files_only=True`` if the hub cannot be reached and the checkpoint is in the cache; else nothing to add.

    Raises:
        CheckpointError: the hub cannot be reached and the checkpoint is not in the cache.
    """
    import huggingface_hub
    from huggingface_hub import constants

    prefix = f"{options['subfolder']}/" if options.get("subfolder") else ""
    cached = huggingface_hub.try_to_load_from_cache(repository, prefix + CONFIG, cache_dir=options.get("cache_dir"), revision=options.get("revision"))
    offline = constants.HF_HUB_OFFLINE or bool(options.get("local_files_only"))
    if not offline and (_has_proxy(options) or _reachable(constants.ENDPOINT)):
        return {}
    if isinstance(cached, str):
        return {"local_files_only": True}
    raise CheckpointError(
        f"{repository} is no folder here, and not in the cache of the hub",
        value="HF_HUB_OFFLINE or local_files_only is set" if offline else f"{constants.ENDPOINT} cannot be reached",
        limit="a folder, or a hub id that is in the cache or can be downloaded",
        remedy="Correct the path, or connect to the hub once.",
    )


def adapter_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """``adapter_kwargs`` of an auto class that is not to ask the hub: it looks for an adapter, and tells that search nothing of ``local_files_only``."""
    return {"adapter_kwargs": {**(options.get("adapter_kwargs") or {}), "local_files_only": True}} if options.get("local_files_only") else {}


def _has_proxy(options: Mapping[str, Any]) -> bool:
    """A proxy may reach what this machine does not."""
    return bool(options.get("proxies")) or any(os.environ.get(name) for key in ("https_proxy", "http_proxy", "all_proxy") for name in (key, key.upper()))


def _reachable(endpoint: str) -> bool:
    """Does the host of ``endpoint`` accept a connection within some seconds? In a thread, since a name server may take longer to answer."""
    parts = urlsplit(endpoint)
    answers: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)), timeout=_PATIENCE).close()
        except OSError:
            return
        answers.append(True)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answers)
