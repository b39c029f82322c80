import gzip
import json
import os
import stat
from pathlib import Path

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.files import check_writable, csv_rows, read_text, write_json

GZIPPED = gzip.compress(b"some text " * 50)


def leave_temporary(target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a writer killed between writing and renaming leaves behind."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        write_json(target, {"killed": True})
    (left,) = set(target.parent.iterdir()) - {target}
    return left


def age(path: Path, seconds: float, *, than: Path) -> None:
    time_s = than.stat().st_mtime - seconds
    os.utime(path, (time_s, time_s))


def test_a_failed_write_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "state.json"
    write_json(target, {"turn": 1})

    def fail(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_json(target, {"turn": 2})

    assert json.loads(target.read_text()) == {"turn": 1}
    assert list(tmp_path.iterdir()) == [target]


def test_the_text_is_on_the_disk_before_the_file_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "state.json"
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda *paths: (done.append("rename"), replace(*paths)))

    write_json(target, {"turn": 1})

    assert done == ["fsync", "rename"]


def test_what_killed_writers_left_is_deleted_and_what_others_write_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, other = tmp_path / "state.json", tmp_path / ".state.json.notes"
    write_json(target, {"turn": 1})
    abandoned = leave_temporary(target, monkeypatch)
    age(abandoned, 3600, than=target)
    write_json(target, {"turn": 2})
    assert not abandoned.exists()
    fresh = leave_temporary(target, monkeypatch)
    other.write_text("mine")
    age(other, 3600, than=target)

    write_json(target, {"turn": 3})

    assert set(tmp_path.iterdir()) == {target, fresh, other}
    assert json.loads(target.read_text()) == {"turn": 3}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_kept_and_what_it_names_is_written(is_there: bool, tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to("real.json")
    if is_there:
        write_json(real, {"turn": 1})

    write_json(link, {"turn": 2})

    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"turn": 2}
    assert set(tmp_path.iterdir()) == {real, link}


def test_a_pipe_is_written_into_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    write_json(pipe, {"turn": 1})

    text = os.read(reader, 1000)
    os.close(reader)
    assert json.loads(text) == {"turn": 1}
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("path", ["", ".", "folder"])
def test_a_folder_is_no_file_to_write(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()

    with pytest.raises(IsADirectoryError):
        write_json(path, {"turn": 1})

    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


@pytest.mark.parametrize("by_rename", [True, False])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "Is a directory"),
        ("folder", "Is a directory"),
        ("file/new.json", "Not a directory"),
        ("file/new/new.json", "Not a directory"),
        ("/proc/no-such/new.json", "No such file"),
        ("a\0b", "null byte"),
    ],
)
def test_a_path_that_cannot_be_written_is_told_before_the_work(
    path: str, reason: str, by_rename: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("mine")

    with pytest.raises(ConfigError, match=f"cannot write .*: .*{reason}"):
        check_writable(path, by_rename=by_rename)


@pytest.mark.parametrize("by_rename", [True, False])
@pytest.mark.parametrize("path", ["file", "link", "new.json", "new/new/new.json", "pipe"])
def test_checking_a_path_makes_and_changes_nothing(
    path: str, by_rename: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    Path("link").symlink_to("not-there-yet")
    os.mkfifo("pipe")

    check_writable(path, by_rename=by_rename)

    assert {place.name for place in tmp_path.iterdir()} == {"file", "link", "pipe"}
    assert Path("file").read_text() == "mine"


@pytest.mark.parametrize(
    "content", [GZIPPED[:-9], GZIPPED[:3], GZIPPED[:10] + b"\xff" * 9 + GZIPPED[19:], b"\x1f\x8b?"]
)
def test_a_damaged_gzip_file_is_told_with_its_name(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"log\.gz is not a whole gzip file"):
        read_text(path)


def test_text_is_read_gzipped_or_not_and_foreign_bytes_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"a\xff")
    (tmp_path / "packed").write_bytes(gzip.compress(b"a\xff"))

    assert read_text(tmp_path / "plain") == read_text(tmp_path / "packed") == "a\ufffd"


def test_rows_are_numbered_by_their_line_and_a_field_that_is_too_long_is_told_with_its_line() -> (
    None
):
    rows = csv_rows(["a,b", "", "c" * 140_000], source="some.csv", first_line=2)

    assert [next(rows), next(rows)] == [(2, ["a", "b"]), (3, [])]
    with pytest.raises(ConfigError, match=r"some\.csv line 4: not CSV: field larger"):
        next(rows)
