"""Formatting: zones, an empty volume in them, and a root directory that belongs to who made it."""

from __future__ import annotations

import os
import time
import uuid
from typing import Unpack

import trio

from retainzfs.device import Device, Geometry, Wanted, create_target, is_memory
from retainzfs.errors import RetainzError, UsageError
from retainzfs.volume import ROOT, Options, Volume


def make(target: str, **wanted: Unpack[Wanted]) -> Geometry:
    """Format a target; sizes in bytes, None is the default. Return the zones that it got.

    Raises what `device.create_target` does, and leaves no new image behind then.
    """
    if is_memory(target):
        raise UsageError(f"{target}: memory needs no format; mount it")
    missing = not os.path.lexists(target)
    if missing and wanted.get("size") is None:
        raise UsageError(f"{target}: no such target; give --size S to make an image there")
    device = create_target(target, **wanted)
    try:
        trio.run(_format_new, device)
    except RetainzError:
        if missing:
            os.unlink(target)
        raise
    return device.geometry


async def _format_new(device: Device) -> None:
    try:
        await device.start()
        await format_started(device)
    finally:
        await device.aclose()


async def format_started(device: Device) -> None:
    """Write an empty volume to a started device. Its root belongs to the user who does this."""
    await Volume.format(device, uuid=uuid.uuid4().bytes, now_ns=time.time_ns())
    if os.geteuid() != 0:
        async with Volume.mounted(device, Options()) as volume:
            await volume.setattr(ROOT, uid=os.geteuid(), gid=os.getegid())
