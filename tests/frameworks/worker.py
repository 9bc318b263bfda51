"""One framework in a process of its own, which prints how each run ended.

`python -m tests.frameworks.worker NAME train|resume CLOCK DIRECTORY...`; a directory that ends in
`+` is of a program that tells the mount what is complete.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from tests.frameworks.catalogue import FRAMEWORKS, KEEP
from tests.frameworks.job import Job, Timeline


def main(name: str, act: str, clock: str, *directories: str) -> None:
    framework = FRAMEWORKS[name]
    told = sys.stdout
    sys.stdout = sys.stderr  # frameworks print
    program = importlib.import_module(f"tests.frameworks.{framework.module}")
    timeline = Timeline(Path(clock))
    for directory in directories:
        path = Path(directory.removesuffix("+"))
        job = Job(
            path, len(framework.numbers), KEEP, timeline, framework.variant, directory.endswith("+")
        )
        print(json.dumps(asdict(getattr(program, act)(job))), file=told, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
