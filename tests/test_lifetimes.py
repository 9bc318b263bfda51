"""Hints: units, the attributes and how they add up, retirement epochs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.errors import BadAttribute, NotYet
from retainzfs.lifetimes import (
    ATTRIBUTES,
    NOTHING,
    NUMBER_MAX,
    PREFIX,
    Access,
    Act,
    FileClass,
    Learned,
    Policy,
    check_retire,
    format_size,
    learned_cadence,
    parse,
    parse_durability,
    parse_duration,
    parse_size,
    resolve,
    retirement,
    settable,
)
from retainzfs.lifetimes.units import SIZE_MAX

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("0", 0),
        ("512B", 512),
        ("8G", 8 << 30),
        ("4MiB", 4 << 20),
        ("10MB", 10_000_000),
        ("1KB", 1000),
        ("1k", 1024),
        ("2 TiB", 2 << 40),
        ("1.5T", 3 << 39),
        (" 64M\n", 64 << 20),
        ("0.3K", 307),
    ],
)
def test_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "1X", "1 000", "1e3", "0x10", "1.5", "1_0", "9" * 19 + "G", "٣", "1P"]
)
def test_bad_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a|is more than"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (8 << 30, "8 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_size_is_shown(size: int, text: str) -> None:
    assert format_size(size) == text


def test_negative_size_is_not_shown() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_size(-1)


@given(st.integers(0, SIZE_MAX - (1 << 40)))
def test_shown_size_reads_back(size: int) -> None:
    back = parse_size(format_size(size))
    unit = max(unit for unit in (1, 1 << 10, 1 << 20, 1 << 30, 1 << 40) if unit <= max(size, 1))
    assert abs(back - size) <= unit / 20 + 1
    if size % unit == 0:
        assert back == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400), ("45", 45), ("1.5h", 5400)],
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-1s", "1w", "inf", "nan", "1h30m", "1KB"])
def test_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.text())
def test_units_raise_nothing_else(text: str) -> None:
    for parser in (parse_size, parse_duration, parse_durability):
        try:
            value = parser(text)
        except ValueError:
            continue
        assert isinstance(value, str) or value >= 0


@pytest.mark.parametrize(
    ("name", "value", "parsed"),
    [
        ("keep_last", b"3", 3),
        ("keep_every", b"%d" % NUMBER_MAX, NUMBER_MAX),
        ("cadence", b"30m", 1800.0),
        ("anchor", b"1", True),
        ("reap", b"0", False),
        ("birth", b"-12.5", -12.5),
        ("retire", b"inf", math.inf),
        ("retire", b"1e3", 1000.0),
        ("size", b"4GiB", 4 << 30),
        ("class", b"scratch", FileClass.SCRATCH),
        ("commit", b"1", Act.COMPLETE),
        ("commit", b"1s", 1.0),
        ("commit", b"close", "close"),
        ("commit", b"fsync\n", "fsync"),
        ("commit", b"5", 5.0),
        ("gc", b"1", Act.COLLECT),
    ],
)
def test_attribute_is_read(name: str, value: bytes, parsed: object) -> None:
    assert parse(PREFIX + name, value) == parsed
    assert parse(name.encode(), value) == parsed
    assert settable(name).name == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep_last", b"0"),
        ("keep_last", b"-1"),
        ("keep_last", b"3.0"),
        ("keep_last", b"%d" % (NUMBER_MAX + 1)),
        ("keep_last", b""),
        ("keep_every", "٣".encode()),
        ("cadence", b"0"),
        ("cadence", b"soon"),
        ("anchor", b"yes"),
        ("birth", b"inf"),
        ("birth", b"1e999"),
        ("retire", b"nan"),
        ("retire", b"-inf"),
        ("size", b"big"),
        ("class", b"Checkpoint"),
        ("commit", b"0"),
        ("commit", b"never"),
        ("gc", b"0"),
        ("gc", b"1" * 65),
    ],
)
def test_bad_value_names_attribute_and_accepted_values(name: str, value: bytes) -> None:
    with pytest.raises(BadAttribute) as caught:
        parse(PREFIX + name, value)
    assert str(caught.value).startswith(f"user.retainz.{name}: ")
    assert ATTRIBUTES[name].accepted in str(caught.value)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadAttribute, match=r"keep_latest: there is no.*keep_last, cadence"):
        parse("user.retainz.keep_latest", b"3")


def test_mount_option_one_is_a_second() -> None:
    assert parse_durability("1") == 1.0


@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_access_decides(name: str) -> None:
    access = ATTRIBUTES[name].access
    if access is Access.COMPUTED:
        with pytest.raises(BadAttribute, match="cannot be set"):
            parse(name, b"1")
    elif access is Access.LATER:
        with pytest.raises(NotYet, match=f"user.retainz.{name}: not supported"):
            parse(name, b"1")
    else:
        assert settable(name).access in (Access.OWNER, Access.ADMIN)


def test_the_contract_lists_these_names() -> None:
    by_access = {
        access: {a.name for a in ATTRIBUTES.values() if a.access is access} for access in Access
    }
    assert by_access[Access.ADMIN] == {"gc", "scrub"}
    assert {"publish", "quota", "reserve", "stream_name", "sha256"} <= by_access[Access.LATER]
    assert {"state", "hint", "explain", "generations", "published"} <= by_access[Access.COMPUTED]
    policy = set(Policy.__dataclass_fields__) - {"origins"}
    assert {a.field for a in ATTRIBUTES.values() if a.field} == policy


@given(
    st.one_of(st.sampled_from(sorted(ATTRIBUTES)).map(str.encode), st.binary()),
    st.binary(max_size=80),
)
def test_parse_raises_nothing_else(name: bytes, value: bytes) -> None:
    try:
        parsed = parse(PREFIX.encode() + name, value)
    except (BadAttribute, NotYet):
        return
    assert isinstance(parsed, int | float | str | FileClass | Act)


def attributes(**values: str) -> dict[bytes, bytes]:
    return {f"{PREFIX}{name}".encode(): value.encode() for name, value in values.items()}


def test_nearest_attribute_wins_and_is_named() -> None:
    policy = resolve(
        [
            {b"user.other": b"7", b"security.selinux": b"x"},
            attributes(keep_last="2"),
            attributes(keep_last="5", cadence="1m", reap="1", **{"class": "output"}),
        ]
    )
    assert (policy.keep_last, policy.cadence_s, policy.reap) == (2, 60.0, True)
    assert policy.file_class is FileClass.OUTPUT
    assert policy.origins == {"keep_last": 1, "cadence_s": 2, "reap": 2, "file_class": 2}
    assert policy.retire is None
    assert policy.anchor is None


def test_nothing_stated_is_the_default() -> None:
    assert resolve([]) == Policy()
    assert resolve([{}, {}]).file_class is FileClass.CHECKPOINT


def test_acts_are_no_policy_and_newer_versions_attributes_are_passed_over() -> None:
    stored = attributes(commit="1", quota="5G", later="x", keep_last="many")
    assert resolve([stored, attributes(commit="5s")]) == Policy(commit=5.0, origins={"commit": 1})


@given(
    st.lists(st.dictionaries(st.sampled_from(["keep_last", "keep_every"]), st.integers(1, 99))),
)
def test_resolve_is_the_first_mention(levels: list[dict[str, int]]) -> None:
    chain = [attributes(**{name: str(k) for name, k in level.items()}) for level in levels]
    policy = resolve(chain)
    for name, got in (("keep_last", policy.keep_last), ("keep_every", policy.keep_every)):
        mentions = [(i, level[name]) for i, level in enumerate(levels) if name in level]
        assert got == (mentions[0][1] if mentions else None)
        assert policy.origins.get(name) == (mentions[0][0] if mentions else None)


def test_retirement_at_a_training_step_is_refused() -> None:
    check_retire(6000, 0, 60)
    check_retire(math.inf, 0, 60)
    check_retire(1e9, 0, None)
    check_retire(0, 5000, 60)
    with pytest.raises(BadAttribute, match="no training step"):
        check_retire(6001, 0, 60)


def test_latest_k_is_birth_plus_k_cadences() -> None:
    hint = retirement(100.0, Learned(10.0), Policy(keep_last=3), 7)
    assert hint == (130.0, "keep_last=3, learned cadence 10 s")
    declared = Policy(keep_last=3, cadence_s=20.0, birth=0.0)
    assert retirement(100.0, Learned(10.0), declared, 7).retire == 60.0


@pytest.mark.parametrize(
    ("chain", "number", "retire"),
    [
        ([attributes(anchor="1", keep_last="3")], 5, math.inf),
        ([attributes(keep_every="500", keep_last="3")], 1000, math.inf),
        ([attributes(keep_every="500", keep_last="3")], 1001, 30.0),
        ([attributes(keep_every="500", keep_last="3")], None, 30.0),
        ([attributes(anchor="0"), attributes(keep_every="500", keep_last="3")], 1000, 30.0),
        ([attributes(anchor="0", keep_every="500", keep_last="3")], 1000, math.inf),
        ([attributes(retire="7"), attributes(anchor="1", keep_last="3")], 5, 7.0),
        ([attributes(retire="7", anchor="1")], 5, 7.0),
        ([attributes(anchor="1"), attributes(retire="7")], 5, math.inf),
        ([attributes(cadence="9s")], 5, None),
        ([], None, None),
    ],
)
def test_what_goes_first(
    chain: list[dict[bytes, bytes]], number: int | None, retire: float | None
) -> None:
    assert retirement(0.0, Learned(10.0), resolve(chain), number).retire == retire


def test_without_cadence_nothing_is_known_yet() -> None:
    hint = retirement(0.0, NOTHING, Policy(keep_last=3), 1)
    assert hint.retire is None
    assert "not known yet" in hint.origin


@given(
    st.floats(-1e15, 1e15),
    st.floats(1e-3, 1e12),
    st.integers(1, NUMBER_MAX),
    st.integers(0, NUMBER_MAX),
)
def test_finite_hints_stay_finite(birth: float, cadence: float, keep: int, number: int) -> None:
    retire, _ = retirement(birth, Learned(cadence), Policy(keep_last=keep), number)
    assert retire is not None
    assert math.isfinite(retire)
    assert retire >= birth


def test_cadence_outvotes_pauses() -> None:
    assert learned_cadence([]) is None
    assert learned_cadence([0.0, -5.0, math.inf, math.nan]) is None
    assert learned_cadence([60.0]) == 60.0
    assert learned_cadence([60.0, 36000.0]) == 60.0
    assert learned_cadence([60, 9e4, 61, 9e4, 62, 9e4, 63, 9e4]) == 63
    assert learned_cadence([1000.0] * 20 + [10.0] * 8) == 10.0
