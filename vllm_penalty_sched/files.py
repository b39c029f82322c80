"""Read files that may be damaged, and write JSON so that a reader never sees half a file."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from vllm_penalty_sched.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"
# A write takes milliseconds: a temporary file this much older was left by a killed writer.
_ABANDONED_AFTER_S = 60.0


def read_text(path: Path) -> str:
    """Return a file's text, unpacked if it is gzipped; what is no UTF-8 is replaced.

    Raises:
        ConfigError: If it begins like a gzip file and is no whole one.
        OSError: If it cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"{path} is not a whole gzip file: {error}") from error
    return content.decode("utf-8", errors="replace")


def csv_rows(
    lines: Iterable[str], *, source: str, first_line: int = 1
) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV text, each with the number of its last line.

    Args:
        lines: The text's lines.
        source: The file's name, for the message.
        first_line: Number of the first of them in the file.

    Raises:
        ConfigError: If a line cannot be split, such as for a field of more than 131,072 characters.
    """
    reader = csv.reader(lines)
    try:
        for row in reader:
            yield first_line - 1 + reader.line_num, row
    except csv.Error as error:
        line = first_line - 1 + reader.line_num
        raise ConfigError(f"{source} line {line}: not CSV: {error}") from error


def check_writable(path: str | os.PathLike[str], *, by_rename: bool = False) -> None:
    """Check before long work that a file can be written after it; nothing is made or changed.

    Args:
        path: The file, which need not exist, nor its folder.
        by_rename: Whether ``write_json`` will write it, which needs its folder only.

    Raises:
        ConfigError: If it could not be written now.
    """
    try:
        _try_to_write(Path(path), by_rename=by_rename)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {path}: {reason}") from error


def _try_to_write(file: Path, *, by_rename: bool) -> None:
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if file.exists() and not (by_rename and file.is_file()):
        if not os.access(file, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return
    folder = Path(os.path.realpath(file)).parent
    while not folder.exists():
        folder = folder.parent
    # Permissions alone do not tell: root has all of them, also where nothing can be made.
    with TemporaryFile(dir=folder):
        pass


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write ``content`` to ``path`` through a temporary file beside it and an atomic rename.

    A link is kept, and the file that it names is written. What is no file, such as a device or a
    pipe, is written into. Temporary files that killed writers of the same path left behind are
    deleted.

    Raises:
        OSError: If the folder cannot be made or written, or ``path`` is one; an earlier file stays
            as it was.
        ValueError: If ``content`` holds NaN or infinity, which JSON cannot carry.
    """
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    given = Path(path)
    if given.exists() and not given.is_file():
        given.write_text(text, encoding="utf-8")
    else:
        _replace(Path(os.path.realpath(given)), text)


def _replace(target: Path, text: str) -> None:
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
