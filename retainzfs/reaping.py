"""Which generations may be deleted: what policy keeps no longer, and nothing points at."""

from __future__ import annotations

import math
import os
import stat
from typing import Any

from retainzfs import layout
from retainzfs.completion import Completion
from retainzfs.namespace import ROOT, Inode
from retainzfs.streams import Stream

LINKS_MAX = 40  # symbolic links that are followed in one path, as by Linux


class Reaping(Completion):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.best: dict[int, bytes] = {}  # directory → name of the best, as a trainer says

    def reapable(self, generation: int) -> list[int]:
        """Return the generations that the stream of a just completed one keeps no longer.

        The newest K in commit order, anchors, and what is `kept` are never among them, nor what
        holds another stream: that is an experiment with a number, and no checkpoint.
        """
        newest = self.namespace.generations.get(generation)
        inode = self.namespace.inodes.get(newest.stream) if newest is not None else None
        if newest is None or inode is None:
            return []
        policy = self.policy_of(inode)
        if not policy.reap or policy.keep_last is None:
            return []
        stream = self._of[generation]
        beyond = self.counted(stream)[policy.keep_last :]
        kept = self.kept(stream) if beyond else {}
        due = [r for r in beyond if not math.isinf(r.retire) and not self._holds_streams(r)]
        return [record.generation for record in due if record.generation not in kept]

    def _holds_streams(self, record: layout.GenerationRecord) -> bool:
        tops = {top.ino for top in self.tops(record)}
        for ino in self.streams.keys() - {record.stream, *self.members[record.generation]}:
            inode = self.namespace.inodes.get(ino)
            while inode is not None and inode.ino != ROOT:
                if inode.ino in tops:
                    return True
                inode = self.namespace.inodes.get(inode.parent)
        return False

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

    def _led_to(self, link: Inode, directory: int) -> list[Inode]:
        """Return what a symbolic link in a directory leads through and to; [] when to nothing.

        How much of an absolute target is the way to the mount we do not know: the longest ending
        counts that leads somewhere from the root.
        """
        parts = link.content.split(b"/")
        if not link.content.startswith(b"/"):
            return self._walk(directory, parts)
        endings = (self._walk(ROOT, parts[i:]) for i in range(1, len(parts)))
        return next(filter(None, endings), [])

    def _walk(self, directory: int, parts: list[bytes]) -> list[Inode]:
        found: list[Inode] = []
        links = 0
        ahead = parts[::-1]
        at = self.namespace.get(directory)
        while ahead:
            name = ahead.pop()
            if name in (b"", b"."):
                continue
            ino = at.parent if name == b".." else (at.entries or {}).get(name)
            inode = self.namespace.inodes.get(ino) if ino is not None else None
            if inode is None or links > LINKS_MAX:
                return []
            if stat.S_ISLNK(inode.mode):
                links += 1
                ahead += inode.content.split(b"/")[::-1]
                continue
            found.append(inode)
            at = inode
        return found
