"""Which generations may be deleted: what policy keeps no longer, and nothing points at."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from retainzfs import layout, lifetimes
from retainzfs.completion import Completion
from retainzfs.namespace import ROOT, Inode
from retainzfs.streams import State, Stream

LINKS_MAX = 40  # symbolic links that are followed in one path, as by Linux
Budget: TypeAlias = Iterator[int]  # of links that may yet be followed


class Reaping(Completion):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.best: dict[int, bytes] = {}  # directory → name of the best, as a trainer says

    def reapable(self, generation: int) -> list[int]:
        """Return the generations that the stream of a just completed one keeps no longer.

        The newest K in commit order, anchors, and what is `kept` are never among them, nor what is
        perhaps no checkpoint: what holds generations is an experiment with a number.
        """
        beyond = [r for r in self._beyond(generation) if self._is_checkpoint(r)]
        kept = self.kept(self._of[generation]) if beyond else {}
        return [record.generation for record in beyond if record.generation not in kept]

    def overdue(self, generation: int) -> frozenset[int]:
        """Return those that have their K successors, whatever may yet keep them."""
        return frozenset(record.generation for record in self._beyond(generation))

    def _beyond(self, generation: int) -> list[layout.GenerationRecord]:
        newest = self.namespace.generations.get(generation)
        inode = self.namespace.inodes.get(newest.stream) if newest is not None else None
        if newest is None or inode is None:
            return []
        policy = self.policy_of(inode)
        stream = self._of[generation]
        # What is sighted is deleted by its program, as it likes.
        if not policy.reap or policy.keep_last is None or stream.sighted:
            return []
        beyond = self.counted(stream)[policy.keep_last :]
        return [record for record in beyond if not math.isinf(record.retire)]

    def _is_checkpoint(self, record: layout.GenerationRecord) -> bool:
        """Whether what is named like a generation is surely none of an experiment's directories."""
        matches = [self.context(*place).match for place in self.names_of(record.generation)]
        usual = all(match is not None and match.usual for match in matches)
        weak = record.state == State.PRESUMED and not usual
        return not (weak or self._holds_generations(record) or self._holds_streams(record))

    def _holds_generations(self, record: layout.GenerationRecord) -> bool:
        """Whether directories in it are named like other generations. DeepSpeed's in one of the
        Hugging Face Trainer has the same number."""
        above = len(self.namespace.components(record.stream)) + 1
        parents = {self.namespace.get(i).parent for i in self.members[record.generation]}
        for parent in parents & self.namespace.inodes.keys():
            names = self.namespace.components(parent)[above:]
            if any(
                match is not None and match.is_directory and match.number != record.number
                for match in (lifetimes.recognise([name, b"*"]) for name in names)
            ):
                return True
        return False

    def _holds_streams(self, record: layout.GenerationRecord) -> bool:
        tops = {top.ino for top in self.tops(record)}
        others = self.streams.keys() - {record.stream, *self.members[record.generation]}
        streams = [self.namespace.get(ino) for ino in others & self.namespace.inodes.keys()]
        return any(self.namespace.below(inode, top) for inode in streams for top in tops)

    def kept(self, stream: Stream) -> dict[int, str]:
        """Return what is not to be deleted whatever policy says: generation → why."""
        return self._last(stream) | self._pointed_at(stream.ino)

    def why_kept(self, record: layout.GenerationRecord) -> str | None:
        """Return why a generation is not deleted, None when policy alone decides."""
        stream = self._of.get(record.generation)
        keep = None if stream is None else self._policy_for(record).keep_last
        if stream is None or keep is None or record not in self.counted(stream)[keep:]:
            return None
        return self.kept(stream).get(record.generation)

    def _last(self, stream: Stream) -> dict[int, str]:
        """Return the generations with the last file of its kind: perhaps that of a job that saves
        less often than the one that it is taken together with."""
        found: dict[int, str] = {}
        seen: set[bytes] = set()
        for record in self.counted(stream):
            matches = {
                name: self.context(directory, name).match
                for directory, name in self.names_of(record.generation)
            }
            stems = {match.stem: name for name, match in matches.items() if match is not None}
            for stem in sorted(stems.keys() - seen):
                found[record.generation] = f"none newer has a file like {os.fsdecode(stems[stem])}"
            seen |= stems.keys()
        return found

    def _pointed_at(self, directory: int) -> dict[int, str]:
        """Return the generations that a symbolic link in a stream's directory or above it, or the
        trainer, points at: generation → what does."""
        found: dict[int, str] = {}
        if directory in self.best:
            best = self.known(directory, self.best[directory])
            found[best] = "best_model_checkpoint of the newest"
        for above in self._ancestors(directory):
            for name, ino in (self.namespace.get(above).entries or {}).items():
                link = self.namespace.get(ino)
                if stat.S_ISLNK(link.mode):
                    for inode in self._led_to(link, above):
                        generation = self.generation_of(inode)
                        found.setdefault(generation, f"{os.fsdecode(name)} points to it")
        return found

    def _led_to(
        self, link: Inode, directory: int, ahead: Iterable[bytes] = (), budget: Budget | None = None
    ) -> list[Inode]:
        """Return what a symbolic link in a directory leads through and to, with more names `ahead`
        of it; [] when to nothing.

        How much of an absolute target is the way to the mount we do not know: the longest ending
        counts that leads somewhere from the root.
        """
        budget = iter(range(LINKS_MAX)) if budget is None else budget
        if next(budget, None) is None:
            return []
        own = list(filter(None, link.content.split(b"/")))
        parts = [*own, *ahead]
        if not link.content.startswith(b"/"):
            return self._walk(directory, parts, budget)
        endings = (self._walk(ROOT, parts[i:], budget) for i in range(len(own) + 1))
        return next(filter(None, endings), [])

    def _walk(self, directory: int, parts: list[bytes], budget: Budget) -> list[Inode]:
        found: list[Inode] = []
        at = self.namespace.get(directory)
        for index, name in enumerate(parts):
            if name == b".":
                continue
            ino = at.parent if name == b".." else (at.entries or {}).get(name)
            inode = self.namespace.inodes.get(ino) if ino is not None else None
            if inode is None:
                return []
            if stat.S_ISLNK(inode.mode):
                beyond = self._led_to(inode, at.ino, parts[index + 1 :], budget)
                return [*found, *beyond] if beyond else []
            found.append(inode)
            at = inode
        return found
