"""Write JSON so that a reader never sees half a file."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# A write takes milliseconds: a temporary file this much older was left by a killed writer.
_ABANDONED_AFTER_S = 60.0


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``content`` to ``path`` through a temporary file beside it and an atomic rename.

    Temporary files that killed writers of the same path left behind are deleted.

    Raises:
        OSError: If the folder cannot be made or written; an earlier file stays as it was.
        ValueError: If ``content`` holds NaN or infinity, which JSON cannot carry.
    """
    target = Path(path)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own: two engines given the same path must not write into one file.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else the rename may reach the disk before the text does
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _delete_abandoned(target)


def _delete_abandoned(target: Path) -> None:
    prefix, suffix = f".{target.name}.", ".tmp"
    with suppress(OSError):
        # Both times are the file system's own: its clock may differ from this machine's.
        newest_s = target.stat().st_mtime - _ABANDONED_AFTER_S
        for file in target.parent.iterdir():
            is_temporary = file.name.startswith(prefix) and file.name.endswith(suffix)
            if is_temporary and file.stat().st_mtime < newest_s:
                file.unlink(missing_ok=True)
