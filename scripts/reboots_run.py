"""Reset a virtual machine in the middle of saves on its ZNS drive, and check every promise.

Ends with 0 when all of them were kept, with 1 when one was broken, with 125 when the machine
itself failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

MACHINE = Path(__file__).resolve().with_name("zns-vm")
# Small zones, so that they are filled, finished, collected and reset all the time.
DRIVE = ("--size", "64M", "--zone-size", "1M", "--zone-capacity", "768K")
BOOT_S = 600.0  # on a loaded machine without KVM


def main() -> None:
    parser = argparse.ArgumentParser(prog="reboots", description=__doc__)
    parser.add_argument("--reboots", type=int, default=3, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the programs")
    parser.add_argument("--keep", metavar="DIR", help="leave the records there; must be empty")
    given = parser.parse_args()
    command = [str(MACHINE), *DRIVE, "--boots", str(given.reboots + 1)]
    command += ["--timeout", str(BOOT_S * (given.reboots + 1))]
    command += ["--share", given.keep] if given.keep else []
    command += ["--", "python", "-m", "tests.reboots"]
    command += ["programs", str(given.reboots), str(given.seed)]
    sys.stdout.flush()
    os.execv(MACHINE, command)


if __name__ == "__main__":
    main()
