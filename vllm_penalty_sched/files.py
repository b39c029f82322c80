"""Write JSON so that a reader never sees half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path`` through a temporary file beside it and an atomic rename.

    Raises:
        OSError: If the folder cannot be made or written; an earlier file stays as it was.
        ValueError: If ``content`` holds NaN or infinity, which JSON cannot carry.
    """
    target = Path(path)
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
