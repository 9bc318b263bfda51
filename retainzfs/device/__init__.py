"""The device protocol, and the two ways to get a device: open a formatted target, or format one.

A device is a row of equal zones that are written in order at their write pointer and reset as a
whole, with the rules of NVMe zoned namespaces (NVMe ZNS Command Set Specification 1.1, section 2)
and the kernel's names for their conditions (linux/blkzoned.h). Addresses are a zone's index and a
byte offset from its start.
"""

from retainzfs.device.protocol import (
    BLOCK,
    HEADER,
    TRAILER_BLOCKS,
    Condition,
    Device,
    Geometry,
    Sums,
    ZoneReport,
)
from retainzfs.device.targets import Wanted, create_target, is_memory, open_target

__all__ = [
    "BLOCK",
    "HEADER",
    "TRAILER_BLOCKS",
    "Condition",
    "Device",
    "Geometry",
    "Sums",
    "Wanted",
    "ZoneReport",
    "create_target",
    "is_memory",
    "open_target",
]
