"""CPython's own tests of files and directories, with their working directory on a mount.

What fails or skips is run again on an ordinary directory: if it does so there too, it says nothing
about the mount.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import Live

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(600)]

MODULES = (
    *("test_os", "test_posix", "test_posixpath", "test_genericpath", "test_pathlib", "test_stat"),
    *("test_io", "test_file", "test_fileio", "test_bufio", "test_largefile", "test_mmap"),
    *("test_fcntl", "test_shutil", "test_tempfile", "test_glob", "test_filecmp", "test_fileinput"),
    *("test_zipfile", "test_tarfile", "test_gzip", "test_mailbox", "test_zipimport", "test_import"),
    *("test_shelve", "test_dbm", "test_dbm_dumb", "test_dbm_gnu", "test_dbm_ndbm", "test_sqlite3"),
    "test_unicode_file_functions",
)
# They spend their time in interpreters, compressors and signal handlers.
LEFT_OUT = (
    "test.test_tarfile.CommandLineTest.*",
    "test.test_tarfile.NoneInfoExtractTests_*",
    "test.test_zipfile.CommandLineTest.*",
    "test.test_zipfile.Lzma*",
    "test.test_zipfile.Bzip2*",
    "test.test_io.*SignalsTest.*",
    "test.test_io.*TextIOWrapperTest.*",
    "test.test_os.SpawnTests.*",
    "test.test_os.*.test_closerange",  # is skipped or not by what descriptors the process has
)
WORSE = {"ok": 0, "skipped": 1, "failure": 2, "error": 2}


def run(directory: Path, report: Path, *arguments: str) -> dict[str, str]:
    """Run CPython's tests in the directory; return test → one of WORSE."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-m", "test", "-j2", "--tempdir", str(directory)]
    done = subprocess.run(
        [*command, "--junit-xml", str(report), *arguments],
        env=clean | {"TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout, done.stderr)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {part.tag for part in case} & WORSE.keys()
        found[case.attrib["name"]] = max(tags, key=WORSE.__getitem__, default="ok")
    bad = {"failure", "error"} & set(found.values())
    assert bad or done.returncode in (0, 4), "something else than a test failed"  # 4: no tests
    return found


def module(name: str) -> str:
    return name.split(".")[1]


def modules(tests: Iterable[str]) -> list[str]:
    return sorted({module(name) for name in tests})


def test_they_pass_as_on_an_ordinary_directory(live: Live, room: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("test.test_os") is None:
        pytest.skip("CPython's tests are missing (Debian: package libpython3.N-testsuite)")
    # Debian leaves some out.
    present = [name for name in MODULES if importlib.util.find_spec(f"test.{name}") is not None]
    left_out = [argument for pattern in LEFT_OUT for argument in ("--ignore", pattern)]
    here = run(room, tmp_path / "here.xml", *left_out, *present)
    live.check()
    assert sum(outcome == "ok" for outcome in here.values()) > 2000
    again = [name for name, outcome in here.items() if outcome != "ok"]
    again += [f"test.{name}.*" for name in present if name not in modules(here)]
    (tmp_path / "again").write_text("\n".join(again))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = ("--matchfile", str(tmp_path / "again"), *modules(again))
    there = run(elsewhere, tmp_path / "there.xml", *arguments)
    worse = {
        name: f"{here.get(name, 'did not run')}, elsewhere {outcome}"
        for name, outcome in there.items()
        if name not in here or WORSE[here[name]] > WORSE[outcome]
    }
    assert not worse
    lost = {name for name, outcome in here.items() if WORSE[outcome] > 1} - there.keys()
    assert not lost
