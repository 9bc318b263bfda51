"""The upstream retention routines of real frameworks, run on a real mount.

`catalogue` names them, `worker` runs one in a process of its own, `measure` compares what the mount
predicted with what happened. `python -m tests.frameworks` prints the comparison.
"""
