"""The harness of damaged files: headers taken apart and put together, and random changes aimed at the structure."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path


def header(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def put_header(path: Path, fields: dict | bytes, data: bytes) -> None:
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def mutate(rng: random.Random, directory: Path, header_end: int | None = None) -> tuple[str, str]:
    """One random change to one file; returns (file, kind). ``header_end``: where its structure ends, if it is no safetensors file."""
    file = rng.choice(sorted(p.name for p in directory.iterdir()))
    path = directory / file
    raw = bytearray(path.read_bytes())
    # Most of a shard is data: aim at the structure, mostly.
    structure = 8 + struct.unpack("<Q", raw[:8])[0] if file.endswith(".safetensors") else header_end or len(raw)
    end = len(raw) if rng.random() < 0.2 else structure
    kind = rng.choice(["flip", "byte", "digit", "truncate", "insert", "delete", "swap", "copy"])
    i = rng.randrange(end)
    if kind == "flip":
        raw[i] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        raw[i] = rng.randrange(256)
    elif kind == "digit":
        places = [j for j in range(end) if chr(raw[j]).isdigit()]
        raw[rng.choice(places)] = ord(rng.choice("0123456789"))
    elif kind == "truncate":
        del raw[rng.randrange(len(raw)) :]
    elif kind == "insert":
        raw[i:i] = bytes(rng.choices(b'0123456789-[]{},:"eE. \0\xff', k=rng.randint(1, 4)))
    elif kind == "delete":
        del raw[i : i + rng.randint(1, 8)]
    else:
        j = rng.randrange(end)
        n = rng.randint(1, 12)
        a, b = bytes(raw[i : i + n]), bytes(raw[j : j + n])
        raw[j : j + len(a)] = a
        if kind == "swap" and abs(i - j) >= n:
            raw[i : i + len(b)] = b
    path.write_bytes(raw)
    return file, kind
