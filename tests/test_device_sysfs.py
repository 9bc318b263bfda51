"""What sysfs tells of a block device, over trees that look like the kernel's."""

from pathlib import Path

import pytest

from retainzfs.device.kernel import Found, condition_of, geometry_of, ranges, usable
from retainzfs.device.protocol import Condition, Geometry
from retainzfs.device.sysfs import BlockDevice
from retainzfs.errors import BadGeometry, WriteOrder

pytestmark = pytest.mark.pure

OLD, NEW = "6.1.0-32-amd64", "6.10.0"
ZNS = {
    "zoned": "host-managed",
    "max_open_zones": "8",
    "max_active_zones": "14",
    "write_cache": "write back",
    "logical_block_size": "4096",
    "zone_write_granularity": "4096",
    "scheduler": "none [mq-deadline] kyber",
}
SEQUENTIAL, CONVENTIONAL = 2, 1
SIZE, CAPACITY = 4 << 20, 3 << 20


def disk(path: Path, **attributes: str | None) -> BlockDevice:
    """A disk of sysfs; an attribute of None is one that the kernel does not have."""
    (path / "queue").mkdir(parents=True)
    (path / "mq").mkdir()
    for name, value in {**ZNS, **attributes}.items():
        if value is not None:
            (path / "queue" / name).write_text(f"{value}\n")
    return BlockDevice(path)


def test_a_zns_namespace(tmp_path: Path) -> None:
    found = disk(tmp_path / "nvme0n1")
    assert found.zoned
    assert not found.is_partition
    assert (found.max_open, found.max_active, found.write_granularity) == (8, 14, 4096)
    assert found.volatile_cache


def test_an_old_kernel_tells_less(tmp_path: Path) -> None:
    found = disk(tmp_path / "sda", **dict.fromkeys(ZNS))
    assert not found.zoned
    assert (found.max_open, found.max_active, found.write_granularity) == (0, 0, 512)
    assert found.volatile_cache  # the safe assumption


def test_write_through_needs_no_flush(tmp_path: Path) -> None:
    assert not disk(tmp_path / "sda", write_cache="write through").volatile_cache


@pytest.mark.parametrize("model", ["none", "host-aware"])
def test_disks_that_take_any_write(tmp_path: Path, model: str) -> None:
    assert not disk(tmp_path / "sda", zoned=model).zoned


def test_a_partition_is_as_its_disk(tmp_path: Path) -> None:
    disk(tmp_path / "sda")
    (tmp_path / "sda/sda1").mkdir()
    (tmp_path / "sda/sda1/partition").write_text("1\n")
    (tmp_path / "8:1").symlink_to(tmp_path / "sda/sda1")  # as in /sys/dev/block
    found = BlockDevice(tmp_path / "8:1")
    assert found.is_partition
    assert found.zoned
    assert found.disk.name == "sda"


# --- order of writes ----------------------------------------------------------------------------


def test_the_scheduler_is_left_when_it_keeps_order(tmp_path: Path) -> None:
    found = disk(tmp_path / "nvme0n1")
    assert found.keep_order("target", OLD) == []


def test_the_scheduler_is_left_on_a_kernel_that_keeps_order(tmp_path: Path) -> None:
    found = disk(tmp_path / "nvme0n1", scheduler="[none] mq-deadline")
    assert found.keep_order("target", NEW) == []
    assert (found.disk / "queue/scheduler").read_text() == "[none] mq-deadline\n"


def test_another_scheduler_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disk(tmp_path / "nvme0n1", scheduler="[none] mq-deadline")
    write = Path.write_text

    def kernel(path: Path, text: str) -> int:
        return write(path, f"none [{text}]")

    monkeypatch.setattr(Path, "write_text", kernel)
    assert found.keep_order("target", OLD) == ["nvme0n1"]


def test_a_scheduler_that_is_not_taken(tmp_path: Path) -> None:
    found = disk(tmp_path / "nvme0n1", scheduler="[none]")
    with pytest.raises(WriteOrder) as caught:
        found.keep_order("/dev/nvme0n1", OLD)
    file = tmp_path / "nvme0n1/queue/scheduler"
    assert str(caught.value) == (
        "/dev/nvme0n1: the scheduler none may mix up the writes to a zone, and setting another"
        f" one failed (the kernel did not take it). Do as root: echo mq-deadline > {file}"
    )


def test_a_driver_without_queues_needs_no_scheduler(tmp_path: Path) -> None:
    found = disk(tmp_path / "nullb0", scheduler="none")
    (tmp_path / "nullb0/mq").rmdir()
    assert found.keep_order("target", OLD) == []


def test_a_mapped_device_goes_by_the_disks_below_it(tmp_path: Path) -> None:
    mapped = disk(tmp_path / "dm-0", scheduler="none")
    (tmp_path / "dm-0/mq").rmdir()
    (tmp_path / "dm-0/slaves").mkdir()
    disk(tmp_path / "nvme0n1")
    (tmp_path / "dm-0/slaves/nvme0n1").symlink_to(tmp_path / "nvme0n1")
    assert mapped.keep_order("target", OLD) == []


def test_a_namespace_of_several_controllers_goes_by_its_paths(tmp_path: Path) -> None:
    head = disk(tmp_path / "nvme-subsys0/nvme0n1", scheduler="none")
    (head.path / "mq").rmdir()
    for controller, scheduler in (("nvme0", "[mq-deadline] none"), ("nvme1", "[none]")):
        path = tmp_path / f"pci/{controller}/nvme0c{controller[-1]}n1"
        disk(path, scheduler=scheduler)
        (tmp_path / "nvme-subsys0" / controller).symlink_to(path.parent)
    (tmp_path / "block").mkdir()
    (tmp_path / "block/nvme0n1").symlink_to(head.path)
    with pytest.raises(WriteOrder, match="nvme1/nvme0c1n1/queue/scheduler"):
        BlockDevice(tmp_path / "block/nvme0n1").keep_order("target", OLD)


# --- zones --------------------------------------------------------------------------------------


def zones(kinds: str, capacity: int = CAPACITY) -> list[Found]:
    """C: conventional, S: sequential, r: sequential and smaller, as the last of a disk may be."""
    row = []
    for index, kind in enumerate(kinds):
        length = SIZE // 2 if kind == "r" else SIZE
        held = min(capacity, length) if kind != "C" else length
        kind_number = CONVENTIONAL if kind == "C" else SEQUENTIAL
        row.append(Found(index * SIZE, length, held, index * SIZE, kind_number, 1))
    return row


@pytest.mark.parametrize(
    ("kinds", "first", "count"),
    [
        ("S" * 20, 0, 20),
        ("CC" + "S" * 20, 2, 20),
        ("CC" + "S" * 20 + "r", 2, 20),
        ("C" + "S" * 16 + "C", 1, 16),
        ("S" * 3 + "C" + "S" * 17, 4, 17),
    ],
)
def test_the_zones_that_are_used(tmp_path: Path, kinds: str, first: int, count: int) -> None:
    used = usable(zones(kinds))
    assert [zone.start for zone in used] == [(first + i) * SIZE for i in range(count)]
    device = disk(tmp_path / "nvme0n1")
    assert geometry_of("target", used, device) == Geometry(SIZE, CAPACITY, count, 8, 14)


@pytest.mark.parametrize(
    ("kinds", "capacity", "attributes", "text"),
    [
        ("C" * 20, CAPACITY, {}, "no zones that are written in order"),
        ("S" * 15, CAPACITY, {}, "15 zones; the least is 16"),
        ("S" * 20, CAPACITY, {"max_active_zones": "5"}, "5 active zones at most"),
        ("S" * 20, CAPACITY, {"max_open_zones": "2"}, "2 open zones at most"),
        ("S" * 20, CAPACITY + 512, {}, "is not a multiple of 4096"),
        ("S" * 20, CAPACITY, {"zone_write_granularity": "16384"}, "16384 bytes at a time"),
    ],
)
def test_zones_for_no_volume(
    tmp_path: Path, kinds: str, capacity: int, attributes: dict[str, str], text: str
) -> None:
    device = disk(tmp_path / "nvme0n1", **attributes)
    with pytest.raises(BadGeometry, match=text):
        geometry_of("target", usable(zones(kinds, capacity)), device)


@pytest.mark.parametrize(
    ("reset", "commands"),
    [
        ([], []),
        ([5], [(5, 1)]),
        ([7, 5, 6], [(5, 3)]),
        ([1, 3, 4, 9], [(1, 1), (3, 2), (9, 1)]),
    ],
)
def test_adjacent_zones_are_reset_at_once(
    reset: list[int], commands: list[tuple[int, int]]
) -> None:
    assert list(ranges(reset)) == commands


@pytest.mark.parametrize(
    ("number", "condition"),
    [(1, Condition.EMPTY), (14, Condition.FULL), (5, Condition.READ_ONLY)],
)
def test_a_condition_that_we_do_not_know_is_read_only(number: int, condition: Condition) -> None:
    [zone] = zones("S")
    assert condition_of(zone._replace(condition=number)) is condition
