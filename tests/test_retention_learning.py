"""What a volume learns from saves and deletions, and what it makes of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing

from retainzfs.volume import ROOT, FSError, Options, Volume
from retainzfs.zone import Kind
from tests.helpers import (
    FILE,
    Clock,
    formatted,
    mounted,
    noise,
    put,
    small_device,
    zones_of,
)
from tests.test_retention import archive, directory, row, states

pytestmark = [pytest.mark.volume, pytest.mark.power_cuts(3)]

CADENCE_S = 100.0
SAVE_S = 4.0
SHARD = noise(70_000)
LARGE = noise(1 << 20)


class Trainer:
    """Saves directories with a marker, and keeps the newest K by deleting behind the save, or,
    `late`, just before the next one."""

    def __init__(
        self, volume: Volume, clock: Clock, run: int, keep: int, *, late: bool = False
    ) -> None:
        self.volume = volume
        self.clock = clock
        self.run = run
        self.keep = keep
        self.late = late
        self.marker: bytes | None = b".metadata"
        self.form = b"step-%d"
        self.data = SHARD
        self.spares: Callable[[int], bool] = lambda number: False
        self.live: list[int] = []

    async def save(self, *numbers: int) -> None:
        for number in numbers:
            self.clock.time_s += CADENCE_S - SAVE_S
            if self.late:
                await self._retain()
            step = await directory(self.volume, self.form % number, self.run)
            await put(self.volume, step, b"__0_0.distcp", self.data)
            self.clock.time_s += SAVE_S
            if self.marker:
                await put(self.volume, step, self.marker, b"m" * 300)
            self.live.append(number)
            if not self.late:
                await self._retain()

    async def _retain(self) -> None:
        for number in self.live[: -self.keep]:
            if not self.spares(number):
                await self.delete(number)
        self.live = self.live[-self.keep :]

    async def delete(self, number: int) -> None:
        name = self.form % number
        step = self.volume.lookup(self.run, name).ino
        for inside, _ in self.volume.entries(step):
            await self.volume.unlink(step, inside)
        await self.volume.rmdir(self.run, name)


def history(volume: Volume, ino: int = ROOT) -> dict[int, dict[str, Any]]:
    told = json.loads(volume.getxattr(ino, b"user.retainz.history"))
    return {one["number"]: one for one in told}


def kinds(volume: Volume, run: int, name: bytes) -> set[Kind]:
    shard = volume.lookup(volume.lookup(run, name).ino, b"__0_0.distcp")
    return {volume.table[z].kind for z in zones_of(volume, shard.ino)}


# Lifetimes


async def test_what_was_foretold_happens(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"3")
        await Trainer(volume, clock, run, 3).save(*range(1, 13))
        told = history(volume)
        assert list(told) == list(range(1, 10))
        for one in (told[n] for n in range(2, 10)):
            assert one["saves"] == pytest.approx(3.04, abs=0.01)
            assert one["saves_predicted"] == pytest.approx(3, abs=0.01)
            assert one["deleted_epoch"] - one["predicted_epoch"] == pytest.approx(SAVE_S, abs=0.1)
            assert one["stream"] == "/run"
            assert one["origin"] == "keep_last=3, learned cadence 100 s"
        assert history(volume, run) == told


async def test_a_lag_corrects_later_hints(clock: Clock, mount: Options) -> None:
    """The program keeps one more than it said."""
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2")
        trainer = Trainer(volume, clock, run, 2, late=True)
        await trainer.save(*range(1, 5))
        assert "deleted" not in row(volume, 4)["origin"]
        await trainer.save(5, 6)
        told = row(volume, 6)
        assert told["retire_epoch"] - told["birth_epoch"] == pytest.approx(300, abs=1)
        assert told["origin"] == "keep_last=2, but deleted 1.0 saves later, learned cadence 100 s"
        assert row(volume, 4)["state"] == "retired", "what is promised is a matter of policy alone"
        assert row(volume, 4)["retire_epoch"] > clock.time_s - 1000, "older hints follow"
        await volume.setxattr(run, b"user.retainz.keep_last", b"4")
        told = row(volume, 6)
        assert told["retire_epoch"] - told["birth_epoch"] == pytest.approx(500, abs=1)


async def test_what_is_deleted_before_the_next_save_teaches_without_a_marker(
    clock: Clock, mount: Options
) -> None:
    """As accelerate does: then the newest directory does not count yet, and is one all the same."""
    async with mounted(await formatted(small_device()), mount) as volume:
        trainer = Trainer(volume, clock, await directory(volume, b"run"), 1, late=True)
        trainer.form, trainer.marker = b"checkpoint_%d", None
        await trainer.save(*range(1, 6))
        told = row(volume, 5)
        assert told["origin"] == "history: deleted after 2.0 saves, learned cadence 100 s"
        await trainer.delete(5)
        trainer.live.remove(5)
        await trainer.save(6)
        told = row(volume, 6)
        assert "after 2.0 saves" in told["origin"], "who deletes the newest one teaches nothing"


async def test_early_deletion_is_noticed_too(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"5")
        await Trainer(volume, clock, run, 2).save(*range(1, 8))
        told = row(volume, 7)
        assert told["retire_epoch"] - told["birth_epoch"] == pytest.approx(204, abs=1)
        assert "deleted 3.0 saves earlier" in told["origin"]


async def test_without_a_policy_history_teaches(clock: Clock, mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run")
        trainer = Trainer(volume, clock, run, 2)
        await trainer.save(1, 2, 3)
        assert row(volume, 3)["retire_epoch"] is None
        assert kinds(volume, run, b"step-3") == {Kind.UNHINTED}
        await trainer.save(4, 5)
        told = row(volume, 5)
        assert told["origin"] == "history: deleted after 2.0 saves, learned cadence 100 s"
        assert kinds(volume, run, b"step-5") == {Kind.FINITE}
        assert history(volume)[3]["predicted_epoch"] is None
    async with mounted(device, mount) as volume:
        trainer.volume, trainer.run = volume, volume.lookup(ROOT, b"run").ino
        await trainer.save(6)
        assert "history: deleted after 2.0 saves" in row(volume, 6)["origin"]
        assert list(history(volume)) == [1, 2, 3, 4]


async def test_milestones_show_without_a_policy(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run")
        trainer = Trainer(volume, clock, run, 1)
        trainer.form, trainer.marker = b"iter_%07d", b"metadata.json"
        trainer.spares = lambda number: number % 30 == 0
        await trainer.save(*range(10, 100, 10))
        assert {n: row(volume, n)["anchor"] for n in (30, 60, 90)} == {30: True, 60: True, 90: True}
        assert row(volume, 90)["origin"] == "history: multiples of 30 were kept"
        assert kinds(volume, run, b"iter_0000090") == {Kind.ANCHOR}, "from its first byte"
        await trainer.save(100)
        assert row(volume, 100)["retire_epoch"] is not None


async def test_reaping_teaches_no_lag(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1")
        trainer = Trainer(volume, clock, run, 100)
        for number in range(1, 7):
            await trainer.save(number)
            await volume.syncfs()
            await trio.testing.wait_all_tasks_blocked()
        told = history(volume)
        assert all(one["reaped"] for one in told.values())
        assert list(told) == [1, 2, 3, 4]
        assert row(volume, 6)["origin"] == "keep_last=2, learned cadence 100 s"


async def test_a_removed_run_teaches_nothing_new(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"3")
        trainer = Trainer(volume, clock, run, 3)
        await trainer.save(*range(1, 8))
        for number in (5, 6, 7):
            await trainer.delete(number)
        trainer.live = []
        await trainer.save(8)
        assert row(volume, 8)["origin"] == "keep_last=3, learned cadence 100 s"


async def test_a_cadence_survives_pauses_restarts_and_failed_saves(
    clock: Clock, mount: Options
) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run", keep_last=b"1")
        trainer = Trainer(volume, clock, run, 1)
        await trainer.save(1, 2, 3)
    async with mounted(device, mount) as volume:
        trainer.volume = volume
        clock.time_s += 5000
        trainer.run = volume.lookup(ROOT, b"run").ino
        for _ in range(3):  # a job that crashes at once, again and again
            broken = await directory(volume, b"step-4", trainer.run)
            await put(volume, broken, b"__0_0.distcp", SHARD)
            clock.time_s += 3
            await volume.unlink(broken, b"__0_0.distcp")
            await volume.rmdir(trainer.run, b"step-4")
        await trainer.save(4)
        assert volume.statistics()["streams"][0]["cadence_s"] == pytest.approx(100, abs=1)


# Names that no layout has


@pytest.mark.parametrize("form", [b"zork_%d", b"zork.%05d", b"%d", b"a=%d b"])
async def test_unknown_names_are_learned(form: bytes, clock: Clock, mount: Options) -> None:
    device = await formatted(small_device(zones=96))
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run")
        trainer = Trainer(volume, clock, run, 2)
        trainer.form, trainer.marker, trainer.data = form, None, LARGE
        await trainer.save(1, 2, 3)
        assert states(volume) == {}
        await trainer.save(4, 5, 6)
        assert states(volume) == {5: "complete", 6: "writing"}
        assert "history: deleted after 2.0 saves" in row(volume, 6)["origin"]
    async with mounted(device, mount) as volume:
        trainer.volume, trainer.run = volume, volume.lookup(ROOT, b"run").ino
        await trainer.save(7)
        assert states(volume) == {6: "complete", 7: "writing"}


async def test_a_directory_with_keep_last_holds_generations(mount: Options) -> None:
    """Also by names that are more often something else; and nothing deeper does."""
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2")
        for name in (b"7", b"0008", b"run_9"):
            await put(volume, await directory(volume, name, run), b"shard", SHARD)
        await put(volume, run, b"weights10.pt", archive())
        await put(volume, run, b"weights11.txt", b"no checkpoint")
        deeper = await directory(volume, b"deeper", run)
        await put(volume, await directory(volume, b"12", deeper), b"shard", SHARD)
        assert set(states(volume)) == {7, 8, 10}


async def test_an_experiment_with_a_number_is_never_reaped(clock: Clock, mount: Options) -> None:
    """Its directory looks like a generation, but there are streams in it."""
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        for number in (1, 2, 3, 4):
            run = await directory(volume, b"%d" % number)
            await put(volume, run, b"config.json", SHARD)
            await put(volume, run, b"trainer_state.json", b"{}")
            step = await directory(volume, b"checkpoint-%d" % (10 * number), run)
            await put(volume, step, b"trainer_state.json", b"{}")
        await volume.syncfs()
        await volume.syncfs()
        assert [name for name, _ in volume.entries(ROOT)] == [b"1", b"2", b"3", b"4"]


# Where the marker is on another mount


async def test_a_mount_without_markers_counts_closed_directories(
    clock: Clock, mount: Options
) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        run = await directory(volume, b"run", keep_last=b"3", reap=b"1")
        trainer = Trainer(volume, clock, run, 100)
        trainer.marker = None
        for number in range(1, 21):
            await trainer.save(number)
            await volume.syncfs()
            await volume.syncfs()
        assert states(volume) == {17: "complete", 18: "complete", 19: "complete", 20: "writing"}
        assert [row(volume, n)["presumed"] for n in (19, 20)] == [True, False]
    async with mounted(device, mount) as volume:
        trainer.volume, trainer.run = volume, volume.lookup(ROOT, b"run").ino
        await trainer.save(21)
        assert states(volume)[20] == "complete", "a clean end of the mount closes no save badly"


async def test_one_marker_makes_all_others_due(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", reap=b"1")
        trainer = Trainer(volume, clock, run, 100)
        trainer.marker = None
        await trainer.save(1, 2)
        assert states(volume) == {1: "complete", 2: "writing"}
        trainer.marker = b".metadata"
        await trainer.save(3)
        assert states(volume) == {1: "incomplete", 2: "incomplete", 3: "complete"}
        trainer.marker = None
        await trainer.save(4, 5, 6)
        await volume.syncfs()
        assert states(volume)[3] == "complete", "what has no marker counts for nothing"
        assert set(states(volume)) == set(range(1, 7))


async def test_half_a_directory_is_not_presumed(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"9")
        trainer = Trainer(volume, clock, run, 100)
        trainer.marker = None
        await trainer.save(1, 2)
        trainer.data = SHARD[: len(SHARD) // 2]
        await trainer.save(3)
        trainer.data = SHARD
        temporary = await directory(volume, b"tmp-step-4", run)
        await put(volume, temporary, b"__0_0.distcp", SHARD)
        await trainer.save(5, 6)
        whole = {number for number, state in states(volume).items() if state == "complete"}
        assert whole == {1, 2, 5}


# Generations of several files


async def test_a_generation_waits_for_the_files_that_the_one_before_had(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"1")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        for name in (b"model", b"optimizer"):
            await put(volume, ROOT, name + b"-1.pt", archive())
        await put(volume, ROOT, b"model-2.pt", archive())
        await volume.syncfs()
        assert states(volume) == {1: "complete", 2: "writing"}
        assert row(volume, 2)["reason"] == (
            "files are missing that the one before had: optimizer-.pt"
        )
        await put(volume, ROOT, b"optimizer-2.pt", archive())
        await volume.syncfs()
        await volume.syncfs()
        assert states(volume) == {2: "complete"}
        await put(volume, ROOT, b"model-3.pt", archive())
        await put(volume, ROOT, b"model-4.pt", archive())
        assert states(volume) == {2: "complete", 3: "incomplete", 4: "writing"}
        for number in (5, 6, 7):
            await put(volume, ROOT, b"model-%d.pt" % number, archive())
        await volume.syncfs()
        await volume.syncfs()
        assert states(volume)[7] == "complete", "a program that saves it no more is believed"


async def test_two_jobs_in_a_directory_keep_their_own(clock: Clock, mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        await volume.setxattr(ROOT, b"user.retainz.reap", b"1")
        await put(volume, ROOT, b"slow-10.pt", archive())
        for number in range(15, 60, 10):
            clock.time_s += 100
            await put(volume, ROOT, b"fast-%d.pt" % number, archive())
        await volume.syncfs()
        await volume.syncfs()
        assert states(volume) == {10: "complete", 45: "complete", 55: "complete"}
        assert [s["cadence_s"] for s in volume.statistics()["streams"]] == [
            None, pytest.approx(100, abs=1),
        ]  # fmt: skip
    async with mounted(device, mount) as volume:
        await put(volume, ROOT, b"slow-20.pt", archive())
        await put(volume, ROOT, b"fast-65.pt", archive())
        await volume.syncfs()
        await volume.syncfs()
        assert set(states(volume)) == {10, 20, 55, 65}


async def test_what_was_learned_is_nobodys_attribute(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await put(volume, ROOT, b"step-1.pt", archive())
        assert volume.inode(ROOT).xattrs
        assert volume.listxattr(ROOT) == []
        with pytest.raises(FSError, match="not supported"):
            await volume.setxattr(ROOT, b"retainz.streams", b"[]")
        with pytest.raises(FSError, match="No data"):
            await volume.removexattr(ROOT, b"retainz.streams")
        with pytest.raises(FSError, match="retainz"):
            volume.getxattr(ROOT, b"retainz.streams")


async def test_a_damaged_memory_costs_no_mount(mount: Options) -> None:
    device = await formatted(small_device())
    async with mounted(device, mount) as volume:
        await put(volume, ROOT, b"step-1.pt", archive())
        stored = volume.inode(ROOT).xattrs
        assert stored is not None
        stored[b"retainz.streams"] = b'[{"births": 7'
        await volume.committer.snapshot()
    async with mounted(device, mount) as volume:
        assert states(volume) == {1: "complete"}
        assert math.isinf(volume.retention.retire_of(1))


# What placement is told before the first byte


async def test_the_size_is_known_before_the_first_byte(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2")
        trainer = Trainer(volume, clock, run, 2)
        await trainer.save(1)
        step = await directory(volume, b"step-2", run)
        ino = (await volume.make(step, b"__0_0.distcp", FILE, 0, 0)).ino
        whole = len(SHARD) + 300
        assert volume.retention.hint_of(volume.inode(ino).generation).size == whole, "as the last"
        await volume.setattr(ino, size=500_000)
        assert volume.retention.hint_of(volume.inode(ino).generation).size == 500_000, "announced"
        await volume.setxattr(run, b"user.retainz.size", b"3M")
        assert volume.retention.hint_of(volume.inode(ino).generation).size == 3 << 20, "stated"


async def test_a_generation_tells_with_whom_it_shares_zones(mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        await volume.setxattr(ROOT, b"user.retainz.cadence", b"100s")
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"2")
        for number in (1, 2):
            await put(volume, ROOT, b"step-%d.pt" % number, archive())
        (first, second) = volume.generations(ROOT)
        assert first["zones"] == second["zones"]
        assert (first["shared_with"], second["shared_with"]) == (["/step-2.pt"], ["/step-1.pt"])
        await volume.unlink(ROOT, b"step-1.pt")
        assert row(volume, 2)["shared_with"] == []


async def test_a_changed_policy_reaches_the_zones(clock: Clock, mount: Options) -> None:
    async with mounted(await formatted(small_device()), mount) as volume:
        run = await directory(volume, b"run", keep_last=b"2", cadence=b"100s")
        await Trainer(volume, clock, run, 2).save(1)

        def retirement() -> float:
            (zone,) = [z for z in volume.zone_map() if z["class"] == "finite"]
            retire: float = zone["retire_max"]
            return retire

        before = retirement()
        await volume.setxattr(run, b"user.retainz.keep_last", b"5")
        assert retirement() == pytest.approx(before + 300)
        await volume.setxattr(run, b"user.retainz.cadence", b"200s")
        assert retirement() == pytest.approx(before + 800)
        await volume.removexattr(run, b"user.retainz.keep_last")
        assert next(z for z in volume.zone_map() if z["class"] == "finite")["retire_max"] is None
