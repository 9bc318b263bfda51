"""The configuration file: what is read and refused, globs, and which table wins."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st

from retainzfs import config, mounting, mounts
from retainzfs.config import Config, Configured, Glob, MountTable
from retainzfs.errors import BadConfig
from retainzfs.lifetimes import resolve
from retainzfs.volume import ROOT, Volume
from tests.conftest import Live, retainzfs
from tests.helpers import DIRECTORY, Clock, formatted, mounted, options, put, small_device

pure = pytest.mark.pure
volume_test = pytest.mark.volume


def streams(text: str) -> Configured:
    return Configured(config.parse(text, "file").streams)


# Reading


@pure
def test_everything_is_read() -> None:
    read = config.parse(
        """
        [mount]
        commit = 2
        policy = "retainz"
        pool = "32M"
        allow_other = true

        [[stream]]
        path = "/run*/checkpoints"
        keep_last = 3
        cadence = "30m"
        keep_every = 1000
        anchor = false
        size = "8G"
        class = "checkpoint"
        reap = true
        commit = 1

        [[stream]]
        path = "logs"
        """,
        "file",
    )
    assert read.mount == MountTable(2.0, "retainz", 32 << 20, True)
    first, second = read.streams
    policy = resolve([first.attributes])
    assert (policy.keep_last, policy.keep_every, policy.anchor) == (3, 1000, False)
    assert (policy.cadence_s, policy.size, policy.reap) == (1800, 8 << 30, True)
    assert policy.commit == 1.0, "one second, not the act"
    assert second.attributes == {}


@pure
def test_an_empty_file_says_nothing() -> None:
    assert config.parse("", "file") == Config()


@pure
@pytest.mark.parametrize("value", ["0.5", '"500ms"', "0", "inf", "nan", "-1", "1e-12", '""', "[]"])
def test_a_cadence_is_checked(value: str) -> None:
    text = f"[[stream]]\npath = 'a'\ncadence = {value}\n"
    if value == "0.5":
        assert resolve([config.parse(text, "file").streams[0].attributes]).cadence_s == 0.5
    else:
        with pytest.raises(BadConfig, match=r"cadence.*accepted: seconds"):
            config.parse(text, "file")


@pure
@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("a = 1\nx =\n", "ckpt.toml: not TOML", "line 2"),
        pytest.param("x = " + "[" * 100_000, "ckpt.toml: not TOML", "", id="deep"),
        pytest.param("x = " + "9" * 5000, "ckpt.toml: not TOML", "", id="long"),
        ("[mounts]", "ckpt.toml: unknown key 'mounts'", "[mount] and [[stream]]"),
        ("mount = 1", "ckpt.toml: mount is an integer", "write [mount]"),
        ("[stream]\npath = 'a'", "ckpt.toml: stream is a table", "write [[stream]]"),
        ("stream = [1]", "ckpt.toml: stream is an array", "write [[stream]]"),
        ("[mount]\npol = 1", "[mount]: unknown key 'pol'", "commit, policy, pool, allow_other"),
        ("[mount]\npool = '1M'", "[mount]: pool: '1M'", "at least 16 MiB"),
        ("[mount]\npolicy = 'best'", "[mount]: policy: 'best'", "retainz"),
        ("[mount]\ncommit = 'never'", "[mount]: commit: 'never'", "close, fsync, or seconds"),
        ("[mount]\nallow_other = 1", "[mount]: allow_other is an integer", "true or false"),
        ("[[stream]]\nkeep_last = 1", "[[stream]] 1: path is missing", "a glob"),
        ("[[stream]]\npath = 1", "[[stream]] 1: path is an integer", "a glob"),
        (
            "[[stream]]\npath = 'a'\n[[stream]]\npath = 'b'\nkeep_lst = 1",
            "[[stream]] 2 ('b'): unknown key 'keep_lst'",
            "path, keep_last, cadence",
        ),
        ("[[stream]]\npath = 'a'\nretire = 1", "unknown key 'retire'", "keep_last"),
        ("[[stream]]\npath = 'a'\nkeep_last = 0", "keep_last: '0'", "a whole number >= 1"),
        ("[[stream]]\npath = 'a'\nkeep_last = '3'", "keep_last is a string", "a whole number"),
        ("[[stream]]\npath = 'a'\nkeep_last = true", "keep_last is a boolean", "a whole number"),
        ("[[stream]]\npath = 'a'\nkeep_last = 1979-05-27", "is a date or time", "a whole number"),
        (f"[[stream]]\npath = 'a'\nkeep_last = {2**63}", f"keep_last: '{2**63}'", "a whole number"),
        ("[[stream]]\npath = 'a'\nreap = 1", "reap is an integer", "true or false"),
        ("[[stream]]\npath = 'a'\nclass = 'best'", "class: 'best'", "cache, scratch or output"),
        ("[[stream]]\npath = 'a'\ncommit = '1 x'", "commit: '1 x'", "close, fsync, or seconds"),
    ],
)
def test_what_is_wrong_is_named(text: str, where: str, what: str) -> None:
    with pytest.raises(BadConfig) as caught:
        config.parse(text, "ckpt.toml")
    assert str(caught.value).startswith("ckpt.toml: ")
    assert where in str(caught.value)
    assert what in str(caught.value)
    assert caught.value.exit_code == 2


SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.integers(-1, 9) | st.integers(),
    st.floats(),
    st.sampled_from(["", "1", " 3 ", "30m", "8G", "close", "scratch", "retainz", "x" * 99, "٣"]),
    st.just([]),
)
KEYS_OF = {
    "[mount]": ("commit", "policy", "pool", "allow_other"),
    "[[stream]]": (
        *("keep_last", "cadence", "keep_every", "anchor", "size", "class", "reap", "commit"),
    ),
}


@pure
@given(st.sampled_from(sorted(KEYS_OF)), st.data())
def test_a_table_is_read_whole_or_refused(head: str, data: st.DataObject) -> None:
    """What is accepted is understood by `resolve`, every key of it."""
    keys = st.sampled_from(KEYS_OF[head])
    values = data.draw(st.dictionaries(keys, SCALARS, max_size=2))
    if head == "[[stream]]":
        values["path"] = "run"
    text = table_text(values, head)
    try:
        read = config.parse(text, "file")
    except BadConfig:
        return
    for stream in read.streams:
        assert len(resolve([stream.attributes]).origins) == len(values) - 1
    assert config.parse(config.dump(read), "file") == read


def table_text(values: dict[str, Any], head: str = "[[stream]]") -> str:
    return "\n".join([head, *(f"{key} = {_toml(value)}" for key, value in values.items()), ""])


def _toml(value: object) -> str:
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Writing


DURATIONS = st.decimals(min_value="0.000000001", max_value=10**6, places=9).map(float)
NAMES = st.text(
    st.characters(exclude_characters="/*[", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda name: name not in (".", ".."))
MOUNTS = st.builds(
    MountTable,
    st.none() | st.sampled_from(["close", "fsync"]) | DURATIONS,
    st.none() | st.just("retainz"),
    st.none() | st.integers(config.POOL_MIN, 2**40),
    st.none() | st.booleans(),
)
TABLES = st.fixed_dictionaries(
    {"path": st.lists(NAMES, max_size=3).map(lambda names: "/" + "/".join(names))},
    optional={
        "keep_last": st.integers(1, 2**63 - 1),
        "cadence": st.integers(1, 10**6) | st.just("30m") | DURATIONS,
        "reap": st.booleans(),
        "commit": st.sampled_from(["close", "fsync", 1, 2.5, "1", "1m "]),
    },
)


@pure
@given(MOUNTS, st.lists(TABLES, max_size=3))
@example(MountTable(), [{"path": 'a"b\\c\x7f\n\x00ü\U0001f600'}])
def test_what_is_written_is_read_again(mount: MountTable, tables: list[dict[str, Any]]) -> None:
    given_ = Config(mount, config.parse("".join(map(table_text, tables)), "file").streams)
    text = config.dump(given_)
    assert config.parse(text, "file") == given_
    assert tomllib.loads(text).get("stream", []) == tables
    assert all(len(resolve([s.attributes]).origins) == len(s.values) for s in given_.streams)


# Globs


@pure
@pytest.mark.parametrize(
    ("glob", "matching", "others"),
    [
        ("run", ["run"], ["", "run1", "a/run", "run/a"]),
        ("/run/", ["run"], ["", "run/a"]),
        ("/", [""], ["a"]),
        ("run*/checkpoints", ["run/checkpoints", "run-1/checkpoints"], ["run/a/checkpoints"]),
        ("?", ["a", "ü", ".", "\udcff"], ["", "ab"]),
        ("[ab]x", ["ax", "bx"], ["cx", "x"]),
        ("[!a]x", ["bx", "üx"], ["ax", "/x"]),
        ("[[]a]", ["[a]"], ["a"]),
        ("**", ["", "a", "a/b"], []),
        ("**/tmp", ["tmp", "a/tmp", "a/b/tmp"], ["tmp/a", "atmp"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a", "b", "a/b/c"]),
        ("a/**", ["a", "a/b", "a/b/c"], ["", "ab"]),
        ("**/**", ["", "a", "a/b"], []),
        ("*", ["a", ".hidden", "a b=ü\n"], ["", "a/b"]),
    ],
)
def test_globs(glob: str, matching: list[str], others: list[str]) -> None:
    table = streams(f"[[stream]]\npath = {_toml(glob)}")

    def declared(path: str) -> bool:
        encoded = path.encode(errors="surrogateescape")
        return table.declares(encoded.split(b"/") if encoded else [])

    assert [path for path in matching if not declared(path)] == []
    assert [path for path in others if declared(path)] == []


@pure
@pytest.mark.parametrize(
    "glob", ["", "a//b", "//a", "a/../b", ".", "./a", "a**", "**b/c", "[a", "a/[]", "[!]", "[a/b]"]
)
def test_what_is_no_glob(glob: str) -> None:
    with pytest.raises(BadConfig, match=r"\[\[stream\]\] 1: path: ") as caught:
        streams(f"[[stream]]\npath = '{glob}'")
    assert repr(glob) in str(caught.value)


PARTS = st.sampled_from(["**", "*", "a", "b", "?", "[ab]", "a*", "[!a]*"])
PATHS = st.lists(st.sampled_from(["a", "b", "ab", "c"]), max_size=5)


def matches(parts: list[str], names: list[str]) -> bool:
    """The definition of a glob, word for word."""
    if not parts:
        return not names
    if parts[0] == "**":
        return any(matches(parts[1:], names[skip:]) for skip in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], parts[0]) and matches(parts[1:], names[1:])


@pure
@given(st.lists(PARTS, max_size=5), PATHS)
def test_globs_match_as_they_are_defined(parts: list[str], names: list[str]) -> None:
    depths = [n for n in range(len(names) + 1) if matches(parts, names[:n])]
    assert list(Glob("/" + "/".join(parts)).depths(names)) == depths


# Precedence


KEYS = st.dictionaries(st.sampled_from(["keep_last", "keep_every"]), st.integers(1, 9))


@pure
@given(
    st.lists(st.tuples(st.lists(PARTS, max_size=3), KEYS), max_size=5),
    st.lists(KEYS, min_size=6, max_size=6),
    PATHS,
)
@example([(["**"], {"keep_last": 1}), (["a"], {"keep_last": 2})], [{}] * 6, ["a", "b"])
@example([(["a"], {"keep_last": 1}), (["*"], {"keep_last": 2})], [{}] * 6, ["a", "b"])
def test_which_value_wins(
    tables: list[tuple[list[str], dict[str, int]]],
    stored: list[dict[str, int]],
    names: list[str],
) -> None:
    """Attributes from the directory to the root; then the configuration from the directory to the
    root, of one directory the last table."""
    text = "".join(table_text({"path": "/" + "/".join(p), **keys}) for p, keys in tables)
    expected: dict[str, int] = {}
    for depth in range(len(names) + 1):
        for parts, keys in tables:
            if matches(parts, names[:depth]):
                expected.update(keys)
    for depth in range(len(names) + 1):
        expected.update(stored[depth])
    components = [name.encode() for name in names]
    chain = [
        {f"user.retainz.{k}".encode(): str(v).encode() for k, v in stored[depth].items()}
        for depth in range(len(names), -1, -1)
    ]
    policy = resolve([*chain, *(table.attributes for table in streams(text).of(components))])
    found = {"keep_last": policy.keep_last, "keep_every": policy.keep_every}
    assert {key: value for key, value in found.items() if value is not None} == expected


# Volumes


async def made(volume: Volume, *names: bytes) -> int:
    """Make directories, each in the one before; return the last one's inode."""
    ino = ROOT
    for name in names:
        ino = (await volume.make(ino, name, DIRECTORY, 0, 0)).ino
    return ino


def explained(volume: Volume, ino: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(volume.getxattr(ino, b"user.retainz.explain"))
    return loaded


SAVES = """
[[stream]]
path = "run*/saves"
keep_last = 2
cadence = 100
reap = true
"""


@volume_test
async def test_a_stream_has_the_policy_of_its_glob() -> None:
    clock = Clock()
    given_ = options(clock, streams=config.parse(SAVES, "file").streams)
    async with mounted(await formatted(small_device()), given_) as volume:
        saves = await made(volume, b"run1", b"saves")
        other = await made(volume, b"other", b"saves")
        for number in range(1, 5):
            await put(volume, saves, b"step-%d.ckpt" % number, b"x" * 5000)
            await put(volume, other, b"step-%d.ckpt" % number, b"x" * 5000)
            await trio.testing.wait_all_tasks_blocked()
        assert [row["number"] for row in volume.generations(other)] == [1, 2, 3, 4]
        assert [row["number"] for row in volume.generations(saves)] == [3, 4]
        [_, row] = volume.generations(saves)
        assert row["retire_epoch"] == pytest.approx(row["birth_epoch"] + 200)


@volume_test
async def test_where_a_value_is_from() -> None:
    given_ = options(streams=config.parse(SAVES, "file").streams)
    async with mounted(await formatted(small_device()), given_) as volume:
        saves = await made(volume, b"run1", b"saves")
        ino = await put(volume, saves, b"step-1.ckpt", b"x" * 5000)
        told = {"value": 2, "from": "config stream 'run*/saves'", "glob": "run*/saves"}
        assert explained(volume, saves)["attributes"]["keep_last"] == told
        assert explained(volume, ino)["attributes"]["keep_last"] == told
        await volume.setxattr(ino, b"user.retainz.cadence", b"5")
        assert explained(volume, ino)["attributes"]["keep_last"] == told
        assert (
            explained(volume, ino)["attributes"]["cadence_s"]["from"] == "/run1/saves/step-1.ckpt"
        )
        await volume.setxattr(ROOT, b"user.retainz.keep_last", b"7")
        told = {"value": 7, "from": "/"}
        assert explained(volume, ino)["attributes"]["keep_last"] == told, "attributes win"


@volume_test
async def test_a_directory_that_is_renamed_has_another_policy() -> None:
    given_ = options(streams=config.parse(SAVES, "file").streams)
    async with mounted(await formatted(small_device()), given_) as volume:
        saves = await made(volume, b"old", b"saves")
        assert not explained(volume, saves)["attributes"]
        await volume.rename(ROOT, b"old", ROOT, b"run1")
        assert explained(volume, saves)["attributes"]["keep_last"]["value"] == 2


@volume_test
async def test_another_configuration_holds_for_what_is_there() -> None:
    device = await formatted(small_device())
    clock = Clock()
    retires = []
    for keep in (1, 5):
        text = f"[[stream]]\npath = 'run'\nkeep_last = {keep}\ncadence = 100"
        async with mounted(
            device, clock=clock, streams=config.parse(text, "file").streams
        ) as volume:
            if keep == 1:
                await put(volume, await made(volume, b"run"), b"step-1.ckpt", b"x" * 5000)
            [row] = volume.generations(ROOT)
            retires.append(row["retire_epoch"] - row["birth_epoch"])
    assert retires == pytest.approx([100, 500])


# Mounts


@pure
def test_an_option_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ckpt.toml"
    file.write_text("[mount]\ncommit = 'close'\npool = '32M'\n" + "[[stream]]\npath = 'run'\n")
    for read in (
        mounting.parse_options(["commit=2"], config_file=str(file)),
        mounting.parse_options([f"commit=2,config={file}"]),
        mounting.parse_options([f"config=/nonexistent,config={file},commit=2"]),
    ):
        assert (read.commit, read.pool, read.policy) == (2.0, 32 << 20, "plan")
        assert [table.path for table in read.streams] == ["run"]


@pure
def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"# \xff")
    for path, message in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (binary, "not UTF-8 text, from byte 2 on"),
    ):
        with pytest.raises(BadConfig, match=message) as caught:
            mounting.read_config(str(path))
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.fuse
def test_a_mount_with_a_configuration(fresh: Live) -> None:
    file = fresh.base / "ckpt.toml"
    file.write_text("[mount]\ncommit = 'close'\npool = '32M'\n" + SAVES)
    done = retainzfs(
        *("mount", fresh.image, fresh.path, "--log", fresh.log),
        *("-o", "pool=48M", "--config", file),
    )
    assert (done.returncode, done.stderr) == (0, "")
    fresh.check()
    saves = fresh.path / "run-7" / "saves"
    saves.mkdir(parents=True)
    for number in range(1, 5):
        (saves / f"step-{number}.ckpt").write_bytes(b"x" * 100_000)
    rows = json.loads(retainzfs("generations", saves, "--json").stdout)
    assert sorted(path.name for path in saves.iterdir()) == ["step-3.ckpt", "step-4.ckpt"]
    assert {row["number"]: row["state"] for row in rows} == {3: "complete", 4: "complete"}
    said = retainzfs("hint", saves / "step-4.ckpt").stdout
    assert "  keep_last = 2, from the configuration (run*/saves)\n" in said
    said = retainzfs("hint", saves, "--keep-last", "9").stdout
    assert "  keep_last = 9, set on /run-7/saves\n" in said
    assert "  cadence = 100 s, from the configuration (run*/saves)\n" in said
    shown = config.parse((fresh.path / ".retainz/config.toml").read_text(), "config.toml")
    assert shown.mount == MountTable("close", "plan", 48 << 20, False)
    assert shown.streams == config.parse(SAVES, "file").streams


@pytest.mark.fuse
@pytest.mark.parametrize("way", ["--config", "-o"])
def test_a_bad_file_mounts_nothing(fresh: Live, way: str) -> None:
    file = fresh.base / "ckpt.toml"
    file.write_text("[[stream]]\npath = 'run'\nkeep_last = 'three'\n")
    image = fresh.base / "new"
    given_ = ("--config", file) if way == "--config" else ("-o", f"config={file}")
    done = retainzfs("mount", image, fresh.path, "--create", "--size", "64M", *given_)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"retainzfs: {file}: [[stream]] 1 ('run'): keep_last is a string;"
        " accepted: a whole number >= 1\n"
    )
    assert mounts.find_mount(str(fresh.path)) is None
    assert not image.exists()


@pytest.mark.fuse
def test_the_helper_takes_a_configuration(fresh: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """What fstab names; and a glob that holds for nothing because it is of another root."""
    file = fresh.base / "ckpt.toml"
    check = ["-f", str(fresh.image), str(fresh.path), "-o", f"rw,config={file}"]
    file.write_text("[[stream]]\npath = 'run'\n")
    assert mounting.helper(check) == 0
    file.write_text("[[stream]]\npath = 'run'\nreap = 'yes'\n")
    assert mounting.helper(check) == mounting.HELPER_USAGE
    assert "reap is a string; accepted: true or false" in capsys.readouterr().err
    for path, rest in ((fresh.path / "run*", "run*"), (fresh.path, "/")):
        file.write_text(f"[[stream]]\npath = '{path}'\n")
        assert mounting.helper(check) == mounting.HELPER_USAGE
        assert f"write '{rest}'" in capsys.readouterr().err
