"""Places where a process can be made to die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import retainzfs
from retainzfs import failpoints
from retainzfs.errors import UsageError
from tests.conftest import COMMAND

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("setting", ["nowhere", "commit-drained:0", "commit-drained:x", ":3x"])
def test_a_wrong_setting_is_refused(setting: str) -> None:
    with pytest.raises(UsageError):
        failpoints.arm(setting)


def test_mounting_with_a_wrong_setting_says_which_there_are(tmp_path: Path) -> None:
    environment = {**os.environ, failpoints.VARIABLE: "nowhere"}
    command = [*COMMAND, "mount", "mem:64M", str(tmp_path), "--foreground"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert "commit-drained" in done.stderr


@pytest.mark.parametrize(("setting", "survived"), [("finish-after:3", 2), ("finish-after", 0)])
def test_the_process_dies_at_that_time(setting: str, survived: int) -> None:
    code = (
        "import sys; from retainzfs import failpoints; failpoints.arm(sys.argv[1])\n"
        "for _ in range(9): failpoints.reach('finish-after'); print('on', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, setting], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.count("on") == survived


def test_every_place_is_somewhere_in_the_code() -> None:
    code = "".join(path.read_text() for path in Path(retainzfs.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'failpoints\.reach\("([^"]+)"\)', code)) == failpoints.PLACES
