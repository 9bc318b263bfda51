"""Sizes and durations as people write them.

K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000. Output uses
the IEC names, so that it is never ambiguous.
"""

import re
from fractions import Fraction

SIZE_MAX = 2**63 - 1
"""Sizes are signed 64-bit on the medium and in the kernel."""

_IEC = ("KiB", "MiB", "GiB", "TiB")

_SIZE_UNITS = {"": 1, "b": 1} | {
    letter + suffix: base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_DURATION_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

# The digits are bounded: no unit needs more, and int() of a long text is slow. Not \d, which takes
# digits of every script.
_QUANTITY = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})")

SIZE_ACCEPTED = "bytes, or a number with K, M, G, T, KiB.. (powers of 1024) or KB, MB.. (of 1000)"
DURATION_ACCEPTED = "seconds, or a number with s, m, h or d (90s, 30m, 2h, 1d)"


def _shown(text: str) -> str:
    """`text` for a message: quoted, printable, not too long."""
    return repr(text if len(text) <= 40 else text[:40] + "...")


def parse_size(text: str) -> int:
    """Bytes for `8G`, `4MiB`, `10MB`, `1.5T` or `123`; a fraction of a byte is cut off.

    ValueError when it is no size, or more than SIZE_MAX.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in _SIZE_UNITS:
        raise ValueError(f"{_shown(text)} is not a size; give {SIZE_ACCEPTED}")
    unit = _SIZE_UNITS[match[2].lower()]
    if unit == 1 and "." in match[1]:
        raise ValueError(f"{_shown(text)} is not a whole number of bytes")
    size = int(Fraction(match[1]) * unit)
    if size > SIZE_MAX:
        raise ValueError(f"{_shown(text)} is more than {SIZE_MAX} bytes")
    return size


def format_size(size: int) -> str:
    """`size` in bytes as IEC text: `512 B`, `8 GiB`, `1.5 GiB`; `parse_size` reads it back.

    ValueError when `size` is negative.
    """
    if size < 0:
        raise ValueError(f"a size of {size} bytes is negative")
    if size < 1024:
        return f"{size} B"
    for power, name in enumerate(_IEC, start=1):
        unit = 1024**power
        whole, rest = divmod(size, unit)
        tenths = (size * 20 + unit) // (2 * unit)  # rounded half up, in integers
        if tenths < 10240 or name == _IEC[-1]:
            break
    return f"{whole} {name}" if rest == 0 else f"{tenths // 10}.{tenths % 10} {name}"


def parse_duration(text: str) -> float:
    """Seconds for `90s`, `30m`, `2h`, `1d`, `1.5h` or a bare number of seconds.

    ValueError when it is no duration.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in _DURATION_UNITS:
        raise ValueError(f"{_shown(text)} is not a duration; give {DURATION_ACCEPTED}")
    return float(Fraction(match[1]) * _DURATION_UNITS[match[2].lower()])
