"""Images made wrong on purpose.

`Medium` is what a device remembers: the bytes and the state of its zones. It comes from a
`MemoryDevice` and goes back into one, or into the bytes of an image. Mutations are of two sorts:
- `RAW` changes bytes and write pointers as failing hardware or a careless copy would.
- `SEALED` changes what the structures say and then makes every checksum right again, as a mistake
  in a program or somebody with bad intent would.
`HEAD` does both to the head of an image.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retainzfs import layout
from retainzfs._zio import crc32c
from retainzfs.device import Condition, Geometry
from retainzfs.device.head import Header, StatePage, base_of, encode_header
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.rules import ZoneState
from retainzfs.journal import metadata_zones
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Record, Superblock
from retainzfs.namespace import Namespace
from tests.contradictions import CONTRADICTIONS, INTEGERS, Unfit, absurd

DEVICE_UUID = b"d" * 16


@dataclass
class Medium:
    """What the zones hold and how they stand."""

    geometry: Geometry
    zones: dict[int, bytearray]
    states: list[ZoneState]

    @classmethod
    def of(cls, device: MemoryDevice) -> Medium:
        zones = {zone: bytearray(data) for zone, data in device._zones.items() if data}
        return cls(device.geometry, zones, [replace(state) for state in device.rules.states])

    def copy(self) -> Medium:
        zones = {zone: bytearray(data) for zone, data in self.zones.items()}
        return Medium(self.geometry, zones, [replace(state) for state in self.states])

    def device(self) -> MemoryDevice:
        device = MemoryDevice(self.geometry)
        device._zones = {zone: bytearray(data) for zone, data in self.zones.items()}
        device.rules = type(device.rules)("mem", self.geometry, map(replace, self.states))  # type: ignore[arg-type]
        return device

    def image(self) -> bytearray:
        """Return the file of an emulated device with these zones."""
        header = Header(DEVICE_UUID, base_of(self.geometry.zone_count), self.geometry)
        out = bytearray(header.end)
        write_head(out, header, self.states)
        for zone, data in self.zones.items():
            at = header.base + zone * self.geometry.zone_size
            out[at : at + len(data)] = data
        return out

    @property
    def metadata(self) -> list[int]:
        limit = metadata_zones(self.geometry.zone_count)
        return [zone for zone in self.zones if zone < limit]


def write_head(image: bytearray, header: Header, states: Sequence[ZoneState], **page: int) -> None:
    """Write both copies of header and state pages; the second one of a page is the newest."""
    image[: 2 * BLOCK] = encode_header(header) * 2
    for index in range(header.pages):
        for copy in (0, 1):
            written = StatePage(header, index, page.get("sequence", copy), copy ^ 1)
            for zone in written.zones:
                written.put(zone, states[zone])
            block = memoryview(written.seal())
            image[written.next_offset : written.next_offset + BLOCK] = block


# --- bytes --------------------------------------------------------------------------------------

Raw = Callable[[Medium, Medium, random.Random], None]  # the medium, another one to copy from


def _piece(medium: Medium, rng: random.Random) -> bytearray:
    metadata = rng.random() < 0.7
    zones = [z for z in medium.zones if (z in medium.metadata) == metadata and medium.zones[z]]
    return medium.zones[rng.choice(zones or list(medium.zones))]


def _block(data: bytearray, rng: random.Random) -> slice:
    at = rng.randrange(max(1, len(data) // BLOCK)) * BLOCK
    return slice(at, at + BLOCK)


def flip_bits(medium: Medium, other: Medium, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 3, 40))):
        data = _piece(medium, rng)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def zero_blocks(medium: Medium, other: Medium, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 8))):
        data = _piece(medium, rng)
        data[_block(data, rng)] = bytes(BLOCK)


def swap_blocks(medium: Medium, other: Medium, rng: random.Random) -> None:
    one, two = _piece(medium, rng), _piece(medium, rng)
    here, there = _block(one, rng), _block(two, rng)
    one[here], two[there] = two[there], one[here]


def repeat_block(medium: Medium, other: Medium, rng: random.Random) -> None:
    data = _piece(medium, rng)
    data[_block(data, rng)] = data[_block(data, rng)]


def take_block(medium: Medium, other: Medium, rng: random.Random) -> None:
    """A block as another volume, or the same one earlier, has it."""
    zone = rng.choice([z for z in medium.zones if z in other.zones])
    here = _block(medium.zones[zone], rng)
    medium.zones[zone][here] = other.zones[zone][here].ljust(BLOCK, b"\0")


def take_zones(medium: Medium, other: Medium, rng: random.Random) -> None:
    for zone in rng.sample(range(len(medium.states)), rng.choice((1, 1, 2, 5))):
        if rng.random() < 0.8:
            medium.states[zone] = replace(other.states[zone])
        medium.zones[zone] = bytearray(other.zones.get(zone, b""))


def take_states(medium: Medium, other: Medium, rng: random.Random) -> None:
    """Write pointers of an older time, with the bytes of now."""
    medium.states = [replace(state) for state in other.states]


def change_states(medium: Medium, other: Medium, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 20))):
        state = medium.states[rng.randrange(len(medium.states))]
        state.condition = rng.choice(list(Condition)[1:])
        if rng.random() < 0.5:
            state.pointer = rng.randrange(medium.geometry.zone_capacity // BLOCK + 1) * BLOCK
        if state.condition is Condition.EMPTY:
            state.pointer = 0
    for zone, state in enumerate(medium.states):
        data = medium.zones.setdefault(zone, bytearray())
        data += bytes(max(0, state.pointer - len(data)))  # what a device has there, if nothing else


def copy_zone(medium: Medium, other: Medium, rng: random.Random) -> None:
    one, two = rng.sample(range(len(medium.states)), 2)
    medium.zones[two] = bytearray(medium.zones.get(one, b""))
    medium.states[two] = replace(medium.states[one])


RAW: dict[str, Raw] = {
    function.__name__: function
    for function in (
        flip_bits, zero_blocks, swap_blocks, repeat_block, take_block, take_zones, take_states,
        change_states, copy_zone,
    )
}  # fmt: skip


# --- structures, with right checksums -----------------------------------------------------------


@dataclass
class Batch:
    header: BatchHeader
    payload: bytes
    claimed: int | None = None  # length that the header states, if not the true one


@dataclass
class Part:
    """One metadata zone."""

    zone: int
    superblock: Superblock
    batches: list[Batch] = field(default_factory=list)


class Log:
    """The metadata zones of a medium, taken apart; `seal` puts them together again."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.parts: list[Part] = []
        for zone in medium.metadata:
            data = bytes(medium.zones[zone])
            superblock = Superblock.decode(data[:BLOCK], "mem")
            if superblock is None:
                continue
            part = Part(zone, superblock)
            at = BLOCK
            while (found := layout.decode_batch(data[at:])) is not None:
                part.batches.append(Batch(found[0], bytes(found[1])))
                at += -(-(layout.BATCH_HEADER + len(found[1])) // BLOCK) * BLOCK
            self.parts.append(part)
        self.parts.sort(key=lambda part: part.superblock.position)

    @property
    def batches(self) -> list[Batch]:
        return [batch for part in self.parts for batch in part.batches]

    def append(self, records: Sequence[Record], **header: Any) -> None:
        """Add a batch of the log, and say behind it that the volume was unmounted cleanly."""
        last = self.parts[-1].batches[-1].header
        sequence = last.sequence
        for kind, payload in ((BatchKind.LOG, encoded(records)), (BatchKind.CLEAN, b"")):
            sequence += 1
            made = last._replace(kind=kind, sequence=sequence, snapshot=0, durable=last.sequence)
            self.parts[-1].batches.append(Batch(made._replace(**header), payload))

    def seal(self) -> None:
        """Write everything back with right lengths, write pointers and checksums."""
        capacity = self.medium.geometry.zone_capacity
        for part in self.parts:
            try:
                data = part.superblock.encode() + b"".join(map(_sealed, part.batches))
            except struct.error as error:
                raise Unfit(error) from error
            if len(data) > capacity:
                raise Unfit(f"{len(data)} bytes of log")
            self.medium.zones[part.zone] = bytearray(data)
            state = self.medium.states[part.zone]
            state.pointer = len(data)
            if len(data) == capacity:
                state.condition = Condition.FULL


def _sealed(batch: Batch) -> bytes:
    length = len(batch.payload) if batch.claimed is None else batch.claimed
    header = layout._BATCH.pack(layout.BATCH_MAGIC, *batch.header._replace(length=length))
    covered = batch.payload[:length].ljust(min(length, 1 << 20), b"\0")
    body = header + crc32c(covered, crc32c(header)).to_bytes(4, "little") + batch.payload
    return body.ljust(-(-len(body) // BLOCK) * BLOCK, b"\0")


def encoded(records: Sequence[Record]) -> bytes:
    try:
        return layout.encode_all(records)
    except struct.error as error:
        raise Unfit(error) from error


Sealed = Callable[[Log, Namespace, random.Random], None]


def superblock_field(log: Log, namespace: Namespace, rng: random.Random) -> None:
    part = rng.choice(log.parts)
    names = [name for name in Superblock._fields if name != "uuid"]
    part.superblock = absurd(part.superblock, rng.choice(names), rng)


def batch_field(log: Log, namespace: Namespace, rng: random.Random) -> None:
    batch = rng.choice(log.batches)
    names = [name for name in BatchHeader._fields if name not in ("uuid", "length")]
    batch.header = absurd(batch.header, rng.choice(names), rng)


def batch_length(log: Log, namespace: Namespace, rng: random.Random) -> None:
    batch = rng.choice(log.batches)
    batch.claimed = rng.choice([n for n in INTEGERS if 0 <= n < 1 << 32])


def batch_order(log: Log, namespace: Namespace, rng: random.Random) -> None:
    """Drop, double or swap batches; half of the time with sequences that fit again."""
    batches = rng.choice(log.parts).batches
    if len(batches) < 2:
        raise Unfit("one batch has no order")
    i, j = rng.sample(range(len(batches)), 2)
    match rng.randrange(3):
        case 0:
            del batches[i]
        case 1:
            batches.insert(i, replace(batches[j]))
        case 2:
            batches[i], batches[j] = batches[j], batches[i]
    if rng.random() < 0.5:
        renumber(log)


def renumber(log: Log) -> None:
    sequence = log.parts[0].superblock.first_sequence
    for part in log.parts:
        part.superblock = part.superblock._replace(first_sequence=sequence)
        for batch in part.batches:
            snapshot = batch.header.snapshot
            if batch.header.kind == BatchKind.SNAPSHOT_BEGIN:
                snapshot = sequence
            batch.header = batch.header._replace(sequence=sequence, snapshot=snapshot)
            sequence += 1


def payload_noise(log: Log, namespace: Namespace, rng: random.Random) -> None:
    batch = _full(log, rng)
    data = bytearray(batch.payload)
    for _ in range(rng.choice((1, 1, 2, 20))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    batch.payload = bytes(data)


def record_field(log: Log, namespace: Namespace, rng: random.Random) -> None:
    batch = _full(log, rng)
    records = list(layout.decode(batch.payload))
    for _ in range(rng.choice((1, 1, 1, 3, 10))):
        i = rng.randrange(len(records))
        records[i] = absurd(records[i], rng.choice(records[i]._fields), rng)
    batch.payload = encoded(records)


def record_order(log: Log, namespace: Namespace, rng: random.Random) -> None:
    """Drop, double, swap or mix in records."""
    batch = _full(log, rng)
    records = list(layout.decode(batch.payload))
    i, j = rng.randrange(len(records)), rng.randrange(len(records))
    match rng.randrange(4):
        case 0:
            del records[i]
        case 1:
            records.insert(i, records[j])
        case 2:
            records[i], records[j] = records[j], records[i]
        case 3:
            records.insert(i, rng.choice(list(layout.decode(_full(log, rng).payload))))
    batch.payload = encoded(records)


def contradict(log: Log, namespace: Namespace, rng: random.Random) -> None:
    """End the log with hand-made records, one or several sorts of them."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        log.append(rng.choice(list(CONTRADICTIONS.values()))(namespace, rng))


SEALED: dict[str, Sealed] = {
    function.__name__: function
    for function in (
        superblock_field, batch_field, batch_length, batch_order, payload_noise, record_field,
        record_order, contradict,
    )
}  # fmt: skip


def _full(log: Log, rng: random.Random) -> Batch:
    return rng.choice([batch for batch in log.batches if batch.payload])


# --- the head of an image -----------------------------------------------------------------------

Image = Callable[[bytearray, Medium, random.Random], None]


def head_field(image: bytearray, medium: Medium, rng: random.Random) -> None:
    header = Header(DEVICE_UUID, base_of(medium.geometry.zone_count), medium.geometry)
    names = ("base", "compatible", "incompatible", "version")
    shapes = ("zone_size", "zone_capacity", "zone_count", "max_open", "max_active")
    name = rng.choice((*names, *shapes))
    choices = [n for n in (*INTEGERS, BLOCK * 2, BLOCK * 3, header.base + BLOCK) if n >= 0]
    for value in rng.sample(choices, len(choices)):
        changes: dict[str, Any] = {name: value}
        if name in shapes:
            changes = {"geometry": replace(medium.geometry, **{name: value})}
        try:
            image[: 2 * BLOCK] = encode_header(replace(header, **changes)) * 2
        except struct.error:
            continue
        return


def states_field(image: bytearray, medium: Medium, rng: random.Random) -> None:
    header = Header(DEVICE_UUID, base_of(medium.geometry.zone_count), medium.geometry)
    states = [replace(state) for state in medium.states]
    for _ in range(rng.choice((1, 2, 30))):
        state = rng.choice(states)
        match rng.randrange(3):
            case 0:
                state.condition = rng.choice([*Condition, 7, 200])
            case 1:
                state.pointer = rng.choice((0, BLOCK, 1, 256 << 10, (256 << 10) + BLOCK, 1 << 63))
            case 2:
                state.resets = rng.choice((0, 1, 1 << 31, (1 << 32) - 1))
    sequence = rng.choice((1, 1, (1 << 63) - 1, (1 << 64) - 2))
    write_head(image, header, states, sequence=sequence)


def cut_file(image: bytearray, medium: Medium, rng: random.Random) -> None:
    sizes = (0, 1, 511, BLOCK, BLOCK + 1, 5 * BLOCK, 1 << 20, len(image) - 1, len(image) - BLOCK)
    del image[rng.choice((*sizes, rng.randrange(len(image)))) :]


def extend_file(image: bytearray, medium: Medium, rng: random.Random) -> None:
    image += rng.randbytes(rng.choice((1, 511, BLOCK, 300_000)))


def flip_head(image: bytearray, medium: Medium, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 3, 200))):
        image[rng.randrange(8 * BLOCK)] ^= 1 << rng.randrange(8)


def noise(image: bytearray, medium: Medium, rng: random.Random) -> None:
    """Overwrite a stretch of the file, alignment or not."""
    at, length = rng.randrange(len(image)), rng.choice((10, 5000, 1 << 20))
    image[at : at + length] = rng.randbytes(min(length, len(image) - at))


HEAD: dict[str, Image] = {
    function.__name__: function
    for function in (head_field, states_field, cut_file, extend_file, flip_head, noise)
}
