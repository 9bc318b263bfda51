"""Experiments that judge placement: the same saves, replayed under every policy.

`workload` makes the saves, from a seed; `simulator` carries them out on a table of zones;
docs/evaluation.md has the results.
"""
