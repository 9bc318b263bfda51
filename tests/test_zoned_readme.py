"""README's section on real drives: its commands, as written, and what they print."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.device_backends import zoned_target

pytestmark = [pytest.mark.zoned, pytest.mark.fuse]

README = Path(__file__).parent.parent / "README.md"
HEADING = "## On a real ZNS SSD"
DRIVE = "nvme0n1"  # README's
MOUNT = "/mnt/ckpt"
END = "end of the output of command"
VARIES = "retainzfs zones"  # where zones lie, and which are reset already
USED = re.compile(r"in \d+ zones")  # streams share some when they are quick


def console(text: str) -> list[tuple[str, list[str]]]:
    """The console block of the section as commands and the lines that each prints."""
    section = text.split(HEADING, 1)[1].split("\n## ", 1)[0]
    block = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    assert block is not None, f"{HEADING!r} has no console block"
    commands: list[tuple[str, list[str]]] = []
    for line in block[1].splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(USED.sub("", line))
    return commands


def script(commands: list[tuple[str, list[str]]]) -> str:
    """A shell script that stops at the first failure; for root, who may lack sudo."""
    marked = [f"{command}\necho {END} {n}" for n, (command, _) in enumerate(commands)]
    prepared = 'set -e; sudo() { command "$@"; }; mount -t tmpfs none /mnt; mkdir /mnt/ckpt'
    left = f"! retainzfs umount {MOUNT} 2>/dev/null; umount /mnt"
    return "\n".join([f"trap '{left}' EXIT", prepared, *marked])


def test_the_section_on_real_drives() -> None:
    drive = Path(zoned_target()).name
    commands = console(README.read_text().replace(DRIVE, drive))
    subprocess.run(["blkzone", "reset", f"/dev/{drive}"], check=True)  # a drive as it is delivered
    done = subprocess.run(
        ["bash", "-c", script(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # as on a terminal
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rest = done.stdout
    for number, (command, printed) in enumerate(commands):
        output, rest = rest.split(f"{END} {number}\n", 1)
        lines = [USED.sub("", line) for line in output.splitlines()]
        if command.startswith(VARIES):
            assert [line[:9] for line in lines[2:]] == [line[:9] for line in printed[2:]], lines
        else:
            assert lines == printed, command
