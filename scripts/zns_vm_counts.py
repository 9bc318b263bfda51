"""What the device itself counted: bytes and commands by QEMU's statistics, resets by its trace."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

COMMAND = re.compile(r"pci_nvme_io_cmd cid \d+ nsid 0x([0-9a-f]+) ")
RESET = re.compile(r"pci_nvme_reset_zone .* all=(\d)")
ZONE_RESET = "pci_nvme_zns_zone_reset "


class Resets:
    """Counts by namespace the zones that a reset has emptied; one that was empty does not count.

    A zone's reset does not name its namespace. It is traced right behind its command, or, when the
    command was for all zones, one zone after another and later.
    """

    def __init__(self) -> None:
        self.by_namespace: Counter[int] = Counter()
        self._command = 0  # the namespace of the newest command
        self._one: int | None = None  # the namespace of a zone about to be reset
        self._all = 0  # the namespace of the newest reset of all zones

    def read(self, line: str) -> bool:
        """Take one line of QEMU's standard error; False: it is no part of the trace."""
        if command := COMMAND.match(line):
            self._command, self._one = int(command[1], 16), None
        elif reset := RESET.match(line):
            if reset[1] == "1":
                self._all = self._command
            else:
                self._one = self._command
        elif line.startswith(ZONE_RESET):
            self.by_namespace[self._all if self._one is None else self._one] += 1
            self._one = None
        else:
            return False
        return True


def counts(blockstats: list[Any], resets: Resets, zoned: int, namespaces: int) -> dict[str, Any]:
    """Put together what is known of every namespace, in the order of the guest's variables."""
    statistics = {drive["device"]: drive["stats"] for drive in blockstats}
    each = [
        {
            "bytes_written": (stats := statistics[f"ns{number}"])["wr_bytes"],
            "writes": stats["wr_operations"],
            "bytes_read": stats["rd_bytes"],
            "reads": stats["rd_operations"],
            "flushes": stats["flush_operations"],
            "zones_reset": resets.by_namespace[number],
        }
        for number in range(1, namespaces + 1)
    ]
    return {"zoned": each[:zoned], "conventional": each[zoned:]}
