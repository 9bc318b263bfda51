"""What scripts/zns-vm makes of its command line and of what QEMU says; no machine is started."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from zns_vm_counts import Resets, counts
from zns_vm_kernel import Kernel, uncompressed
from zns_vm_machine import Output
from zns_vm_plan import Namespace, NullBlk, Plan, Refused, job, qemu_command
from zns_vm_run import kept_paths, parser, plan

from retainzfs.device import Geometry
from tests.device_backends import CAPACITY_BELOW_SIZE, GEOMETRY, NO_LIMITS

pytestmark = pytest.mark.pure

MIB = 1 << 20
KERNEL = Kernel("6.1", Path("/k/kernel"), Path("/k/initramfs"))


def planned(*arguments: str, temporary: Path = Path("/")) -> Plan:
    given = parser().parse_args([*arguments, "--", "true"])
    return plan(given, Path("/"), temporary)


def test_by_default_there_is_a_namespace_for_a_filesystem_and_what_the_device_tests_want() -> None:
    made = planned()
    assert made.namespaces[0] == Namespace(512 * MIB, 4 * MIB, 3 * MIB, 8, 14)
    small = [
        Geometry(n.zone_size, n.zone_capacity, n.size // n.zone_size, n.max_open, n.max_active)
        for n in made.namespaces[1:]
    ]
    assert small == [GEOMETRY, CAPACITY_BELOW_SIZE, NO_LIMITS]
    assert (made.block_size, made.null_blks, made.command) == (4096, [], ["true"])


def test_devices_come_in_the_order_they_were_given() -> None:
    made = planned(
        *("--conventional", "24M", "--size", "64M"),
        *("--namespace", "8M:1M:1M:2:3", "--namespace", "16M:2M:1M:0:0"),
        *("--null-blk", "64M:4:3:4:6:1", "--block-size", "512"),
    )
    assert [namespace.size // MIB for namespace in made.namespaces] == [64, 8, 16, 24]
    assert made.null_blks == [NullBlk(64, 4, 3, 4, 6, 1)]
    command = qemu_command(made, KERNEL, {"console": 7, "monitor": 8}, [11, 12, 13, 14])
    devices = [word for word in command if word.startswith("nvme-ns,")]
    assert [f"nsid={number}" in device for number, device in enumerate(devices, 1)] == [True] * 4
    assert ["zoned=true" in device for device in devices] == [True, True, True, False]
    assert all("logical_block_size=512" in device for device in devices)
    assert "file=/proc/self/fd/14,if=none,id=ns4,format=raw" in command
    assert "kvm" not in " ".join(command)


def test_without_the_first_namespace_there_may_be_null_blk_alone() -> None:
    made = planned("--size", "0", "--null-blk", "64M:4:4:0:0:0")
    assert made.namespaces == []
    assert "null_blk 0 64 4 4 0 0 0 4096" in job(made, 0, "end")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--zone-size", "3M"),
        ("--zone-capacity", "5M"),
        ("--zone-capacity", "0"),
        ("--size", "510M"),
        ("--max-open", "15"),
        ("--max-active", "129"),
        ("--zone-capacity", "1000"),
        ("--conventional", "1000"),
        ("--namespace", "8M:16M:1M:0:0"),
        ("--null-blk", "64M:4:3:4:6:16"),
        ("--null-blk", "64M:0:3:4:6:1"),
        ("--share", "/nonexistent"),
    ],
)
def test_what_no_device_can_be_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(Refused):
        planned(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--size", "12X"),
        ("--size", "-1M"),
        ("--namespace", "8M:1M:1M:2"),
        ("--null-blk", "64M:4:3:4:6:"),
        ("--null-blk", "64M:4:3:4:6:x"),
        ("--block-size", "1024"),
        ("--max-open", "-1"),
    ],
)
def test_what_cannot_be_read_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        planned(*arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_job_passes_command_and_environment_on_unchanged(tmp_path: Path) -> None:
    odd = "a 'b' \"c\" $d `e` \\ \n*"
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    made = Plan(
        command=[sys.executable, "-c", show, odd, ""],
        environment={"ODD": odd, "BASH_FUNC_f%%": "() { :; }"},
        directory=tmp_path,
        kept=[Path("/tmp/a b"), Path("/tmp/c")],
        shared=tmp_path,
        zoned=[Namespace(8 * MIB, MIB, MIB), Namespace(8 * MIB, MIB, MIB)],
        conventional=[Namespace(MIB)],
    )
    # The job runs as /init runs it, but in this machine's own root.
    (tmp_path / "setsid").write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    (tmp_path / "setsid").chmod(0o755)
    shell = f"""{job(made, 3, "end")}
        zoned='/dev/z1 /dev/z2' conventional=/dev/c
        echo "$zoned_numbers,$conventional_numbers,$kept_paths"
        run_command"""
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, env=path)
    read, _, shown = done.stdout.partition("\n\n")
    assert read == "1 2,3,/tmp/a b\n/tmp/c"
    arguments, environment, directory = json.loads(shown)
    assert (arguments, directory) == ([odd, ""], str(tmp_path))
    assert environment.items() >= {
        ("ODD", odd),
        ("BASH_FUNC_f%%", "() { :; }"),
        ("ZNS_VM_BOOT", "3"),
        ("ZNS_VM_ZONED", "/dev/z1 /dev/z2"),
        ("ZNS_VM_CONVENTIONAL", "/dev/c"),
    }
    assert "PATH" not in environment


def test_the_guest_keeps_what_the_command_names_below_tmp(tmp_path: Path) -> None:
    tree, tool, script = tmp_path / "tree", tmp_path / "bin", tmp_path / "script"
    (tree / "inside").mkdir(parents=True)
    tool.mkdir()
    script.touch()
    environment = {"PATH": f"{tool}:/usr/bin", "PYTHONPATH": f"{tree}/inside:{tmp_path}/missing"}
    command = ["python", str(script), "../script", "/usr/bin/env", "--option"]
    kept = kept_paths(command, environment, tree)
    if tmp_path.is_relative_to("/tmp"):
        assert {tree, tool, script} <= set(kept)
        assert tree / "inside" not in kept
    assert not any(Path("/usr").is_relative_to(path) for path in kept)
    assert Path("/tmp") not in kept_paths(["ls", "/tmp"], {}, tree)


def test_resets_are_counted_by_namespace() -> None:
    resets = Resets()
    trace = """\
pci_nvme_io_cmd cid 1 nsid 0x1 sqid 2 opc 0x79 opname 'NVME_ZONED_CMD_MGMT_SEND'
pci_nvme_reset_zone reset zone, slba=0, idx=0, all=0
pci_nvme_zns_zone_reset zslba 0x0
pci_nvme_io_cmd cid 2 nsid 0x2 sqid 2 opc 0x79 opname 'NVME_ZONED_CMD_MGMT_SEND'
pci_nvme_reset_zone reset zone, slba=0, idx=0, all=1
pci_nvme_zns_zone_reset zslba 0x0
pci_nvme_io_cmd cid 3 nsid 0x1 sqid 2 opc 0x79 opname 'NVME_ZONED_CMD_MGMT_SEND'
pci_nvme_reset_zone reset zone, slba=1024, idx=1, all=0
pci_nvme_zns_zone_reset zslba 0x400
pci_nvme_zns_zone_reset zslba 0x800
pci_nvme_io_cmd cid 4 nsid 0x1 sqid 2 opc 0x79 opname 'NVME_ZONED_CMD_MGMT_SEND'
pci_nvme_reset_zone reset zone, slba=1024, idx=1, all=0
pci_nvme_io_cmd cid 5 nsid 0x1 sqid 1 opc 0x1 opname 'NVME_NVM_CMD_WRITE'
pci_nvme_zns_zone_reset zslba 0xc00"""
    assert all(resets.read(line) for line in trace.splitlines())
    assert resets.by_namespace == {1: 2, 2: 3}
    assert not resets.read("qemu-system-x86_64: something else")


def test_counts_are_in_the_order_of_the_devices() -> None:
    names = ("wr_bytes", "wr_operations", "rd_bytes", "rd_operations", "flush_operations")
    blockstats = [
        {"device": f"ns{number}", "stats": dict.fromkeys(names, number)} for number in (2, 3, 1)
    ]
    counted = counts(blockstats, Resets(), zoned=2, namespaces=3)
    assert [each["bytes_written"] for each in counted["zoned"]] == [1, 2]
    assert [each["reads"] for each in counted["conventional"]] == [3]


@pytest.mark.parametrize("piece", [1, 2, 7, 100])
def test_output_is_passed_on_up_to_its_end_mark(piece: int, tmp_path: Path) -> None:
    mark = "end:abc"
    said = b"some output\nend:abx en end:ab"
    with (tmp_path / "out").open("wb", buffering=0) as file:
        output = Output(file.fileno(), mark)
        everything = said + mark.encode()
        for start in range(0, len(everything), piece):
            assert not output.ended
            output.write(everything[start : start + piece])
        assert output.ended
    assert (tmp_path / "out").read_bytes() == said


def test_output_that_a_reset_cut_off_is_not_lost() -> None:
    reading, writing = os.pipe()
    output = Output(writing, "end:abc")
    output.write(b"half an end:a")
    output.restart()
    os.close(writing)
    with os.fdopen(reading, "rb") as read:
        assert read.read() == b"half an end:a"


def test_a_kernel_of_another_kind_is_left_as_it_is() -> None:
    image = bytes(0x1F1) + b"\x01" + bytes(4096)
    assert uncompressed(image) == image


def test_abbreviated_options_are_refused() -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        planned("--bl", "512")
