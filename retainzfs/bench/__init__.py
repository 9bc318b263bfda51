"""Speed, beside what else could be used on the same disk: `retainzfs bench DIR`.

Absolute figures of one machine say little, so what counts are ratios within one run: every
repetition measures all targets one after another, and their medians are compared.

figures: samples, ratios, goals, what is printed. targets: what is measured, mounted and unmounted.
peers: two small pyfuse3 filesystems to compare with. The other modules are the measures.
"""
