"""The public module for training code, as far as it needs no mount."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retainzfs import asking, hints
from retainzfs.errors import BadAttribute, NotRetainzfs

pytestmark = pytest.mark.pure


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What is set, on a path where everything can be."""
    attributes: dict[str, bytes] = {}

    def write(_path: object, name: str, value: bytes) -> None:
        attributes[name.removeprefix("user.retainz.")] = value

    monkeypatch.setattr("xattr.setxattr", write)
    monkeypatch.setattr(asking, "computed", lambda *_: {})
    monkeypatch.setattr(asking, "attribute", lambda _, name: attributes.get(name))
    return attributes


@pytest.mark.parametrize(
    ("parameter", "value", "name", "text"),
    [
        ("keep_last", 3, "keep_last", b"3"),
        ("keep_last", "3", "keep_last", b"3"),
        ("cadence", 90, "cadence", b"90"),
        ("cadence", 0.1, "cadence", b"0.1"),
        ("cadence", 200 / 3, "cadence", b"66.666666667"),
        ("cadence", "30m", "cadence", b"30m"),
        ("keep_every", 500, "keep_every", b"500"),
        ("anchor", True, "anchor", b"1"),
        ("anchor", False, "anchor", b"0"),
        ("reap", True, "reap", b"1"),
        ("birth", -1.5, "birth", b"-1.5"),
        ("retire", math.inf, "retire", b"inf"),
        ("retire", 1234.0, "retire", b"1234"),
        ("size", 8 << 30, "size", b"8589934592"),
        ("size", "8G", "size", b"8G"),
        ("file_class", hints.FileClass.CACHE, "class", b"cache"),
        ("file_class", "output", "class", b"output"),
        ("commit", "close", "commit", b"close"),
        ("commit", 1, "commit", b"1s"),
        ("commit", 0.5, "commit", b"0.5s"),
    ],
)
def test_values_are_stored_as_setfattr_has_them(
    stored: dict[str, bytes], parameter: str, value: object, name: str, text: bytes
) -> None:
    arguments: dict[str, Any] = {parameter: value}
    hints.set("path", **arguments)
    assert stored == {name: text}


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("keep_last", 0),
        ("keep_last", True),
        ("keep_last", 2.5),
        ("keep_every", -1),
        ("cadence", 0),
        ("cadence", -1),
        ("cadence", math.nan),
        ("cadence", math.inf),
        ("cadence", "soon"),
        ("cadence", 1e300),
        ("cadence", 1e-12),
        ("anchor", 2),
        ("retire", math.nan),
        ("retire", -math.inf),
        ("size", -1),
        ("size", 1.5),
        ("size", True),
        ("size", 2**63),
        ("file_class", "best"),
        ("commit", "1"),
        ("commit", True),
        ("commit", "\udcff"),
    ],
)
def test_bad_values_name_the_attribute_and_change_nothing(
    stored: dict[str, bytes], parameter: str, value: object
) -> None:
    arguments: dict[str, Any] = {"keep_last": 3, "reap": True, parameter: value}
    with pytest.raises(BadAttribute, match=r"user\.retainz\..*accepted: "):
        hints.set("path", **arguments)
    assert stored == {}


def test_another_filesystem_is_named_and_left_alone(tmp_path: Path) -> None:
    missing = tmp_path / "run" / "step-1"
    assert not hints.is_retainzfs(tmp_path)
    assert not hints.is_retainzfs(missing)
    for call in (
        lambda: hints.set(tmp_path, keep_last=3),
        lambda: hints.get(tmp_path),
        lambda: hints.clear(tmp_path),
        lambda: hints.explain(tmp_path),
        lambda: hints.generations(tmp_path),
        lambda: hints.commit(tmp_path),
        lambda: hints.wait_durable(tmp_path),
        lambda: hints.generation(missing, size="1G").__enter__(),
    ):
        with pytest.raises(NotRetainzfs, match=str(tmp_path)):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        hints.set(tmp_path / "missing", keep_last=3)
    assert caught.value.filename == str(tmp_path / "missing")


def test_importing_brings_neither_fuse_nor_a_framework() -> None:
    code = "import sys, retainzfs.hints, retainzfs.hooks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"trio", "pyfuse3", "torch", "numpy", "transformers", "lightning", "asyncio"}
    assert not heavy & set(done.stdout.split())


def test_everything_public_is_documented() -> None:
    for name in hints.__all__:
        assert getattr(hints, name).__doc__, name


def test_a_value_that_grows_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bytes | int] = [errno.ERANGE, errno.ERANGE, b"[]", *[errno.ERANGE] * 100]

    def read(path: str, _name: str) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, int):
            raise OSError(answer, os.strerror(answer), path.encode())
        return answer

    monkeypatch.setattr("xattr.getxattr", read)
    assert asking.computed("path", "generations") == []
    with pytest.raises(OSError, match="path"):
        asking.computed("path", "generations")
