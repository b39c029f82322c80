import json
import os
from pathlib import Path

import pytest

from vllm_penalty_sched.files import write_json


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
