"""The record of promises that crash tests trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.promises import History, Record

pytestmark = pytest.mark.pure


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "mount"
    root.mkdir()
    return root


def history(root: Path, record: Path) -> History:
    told = History(root)
    told.read(record)
    return told


def test_what_is_not_as_it_was_promised_is_found(root: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "record", root)
    for name in ("kept", "changed", "short", "gone", "back"):
        (root / name).write_bytes(b"content")
        record.did(root / name, None if name == "back" else b"content")
    told = history(root, tmp_path / "record")
    assert [line.count("'back'") for line in told.compare()] == [1]
    told = history(root, tmp_path / "record")
    (root / "changed").write_bytes(b"contend")
    (root / "short").write_bytes(b"conten")
    (root / "gone").unlink()
    (root / "back").unlink()
    assert len(told.compare()) == 3
    assert told.compared == len(b"content")
    assert told.compare() == [], "what was found once is what must stay"


def test_the_next_boot_knows_what_the_one_before_has_found(root: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "record", root)
    (root / "file").write_bytes(b"new")
    record.did(root / "file", b"old")
    record.will(root / "file", b"new")
    record.doubt(root / "other")
    record.note("step", 3)
    before = history(root, tmp_path / "record")
    assert before.compare() == []
    after = History.from_json(root, json.loads(json.dumps(before.to_json())))
    assert after.noted("step") == [[3]]
    assert after.promised == 1
    assert after.compare() == []
    (root / "file").write_bytes(b"old")
    (root / "other").touch()
    assert len(after.compare()) == 2


def test_a_torn_line_of_a_record_does_not_count(root: Path, tmp_path: Path) -> None:
    record = tmp_path / "record"
    Record(record, root).did(root / "one", b"x")
    whole = record.read_bytes()
    record.write_bytes(whole + whole[:-1])
    told = history(root, record)
    assert told.promised == 1
    record.write_bytes(whole + whole)
    told.read(record)
    assert told.promised == 2


def test_saves_that_were_deleted_in_part_are_found(root: Path, tmp_path: Path) -> None:
    record = Record(tmp_path / "record", root)
    for save in ("whole", "torn", "gone"):
        (root / "run" / save).mkdir(parents=True)
        for name in ("a", "b"):
            (root / "run" / save / name).touch()
            record.did(root / "run" / save / name, b"")
    (root / "run" / "torn" / "a").unlink()
    for name in ("a", "b"):
        (root / "run" / "gone" / name).unlink()
    told = history(root, tmp_path / "record")
    assert told.torn(root / "run") == [f"{root}/run/torn was deleted in part"]
