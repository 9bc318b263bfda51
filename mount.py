#!/usr/bin/env python3
"""mount(8) helper: `mount.py SPEC DIR [-sfnv] [-o OPTS]`, linked as /sbin/mount.retainzfs."""

import sys

from retainzfs.mounting import helper

if __name__ == "__main__":
    sys.exit(helper(sys.argv[1:]))
