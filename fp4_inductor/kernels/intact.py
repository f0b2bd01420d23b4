"""Length and hash of a compiled library, recorded beside it: a damaged one is never loaded.

Loading a truncated library kills the process with SIGBUS, and one with a changed byte may run anything, so both are found
before the loader sees the file.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from pathlib import Path


def _record_of(library: Path) -> Path:
    return library.with_name(f"{library.name}.sha256")


def _summary(library: Path) -> str:
    content = library.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"


def is_intact(library: Path) -> bool:
    """True if ``library`` exists with the length and the hash that were recorded for it.

    A library whose bytes differ, or that has no record, gives one RuntimeWarning; the caller builds it again.
    """
    if not library.exists():
        return False
    try:
        wanted, found = _record_of(library).read_text(), _summary(library)
    except (OSError, UnicodeDecodeError) as error:
        wanted, found = "", f"{type(error).__name__} "
    if found == wanted:
        return True
    if not wanted:
        why = "has no readable record of its hash"
    elif found.split()[0] != wanted.split()[0]:
        why = f"has {found.split()[0]} bytes, {wanted.split()[0]} were written"
    else:
        why = "has other bytes than were written"
    warnings.warn(f"fp4_inductor: the compiled library {library} {why}; it is built again", RuntimeWarning, stacklevel=3)
    return False


def publish(partial: Path, library: Path) -> None:
    """Move the finished file ``partial`` to ``library``, its record first: a library without a record is never seen.

    If two processes build one library at a time and the compiler's bytes differ, the record can be that of the other
    process. The next process then builds the library once more.
    """
    handle, record = tempfile.mkstemp(dir=library.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(_summary(partial))
        os.replace(record, _record_of(library))
        os.replace(partial, library)
    finally:
        Path(record).unlink(missing_ok=True)
