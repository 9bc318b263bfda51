"""Mounting: options, checks, the daemon and its log, and the helper that mount(8) calls.

The process forks before it has threads; the parent waits until the mount answers, or prints what
went wrong. `session` is what runs behind the mount, `unmounting` the way out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, TextIO

import trio

from retainzfs import config, failpoints, lifetimes, mkfs, session
from retainzfs.config import Config, MountTable, StreamTable
from retainzfs.device import is_memory
from retainzfs.errors import BadConfig, MountError, NotYet, RetainzError, UsageError
from retainzfs.mounts import find_mount
from retainzfs.volume import Options

log = logging.getLogger(__name__)

LOG_NAME_MAX = 120  # characters; at two bytes each the name still fits into 255

# What the kernel or libfuse does for us.
_PASSED = frozenset({"suid", "nosuid", "dev", "nodev", "exec", "noexec", "noatime", "nodiratime"})
# What fstab(5), mount(8) and systemd.mount(5) put there for themselves, or what is so anyway.
_ACCEPTED = frozenset(
    {
        *("defaults", "rw", "async", "auto", "noauto", "user", "nouser", "users", "owner", "group"),
        *("_netdev", "nofail", "relatime", "atime", "default_permissions"),
    }
)
OWN_OPTIONS = (
    "allow_other",
    "commit=close|fsync|SECONDS",
    "config=FILE",
    "policy=NAME",
    "pool=SIZE",
)

# Exit codes of a mount helper (mount(8), section EXIT STATUS).
HELPER_USAGE = 1
HELPER_FAILED = 32


@dataclass(frozen=True)
class MountOptions:
    """What `-o` and the configuration say. `pool` in bytes; `kernel` goes to libfuse as it is."""

    commit: lifetimes.Durability = "fsync"
    policy: str = "plan"
    pool: int | None = None
    allow_other: bool = False
    streams: tuple[StreamTable, ...] = ()
    kernel: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mount:
    """A mount to be made."""

    target: str
    directory: str
    options: MountOptions = field(default_factory=MountOptions)
    create_size: int | None = None  # bytes: format an image that is not there
    log_file: str | None = None  # None: the usual place
    verbose: bool = False


def parse_options(
    texts: Iterable[str], *, config_file: str | None = None, sloppy: bool = False
) -> MountOptions:
    """Read comma-separated mount options and the configuration file; an option wins over the file,
    and a later option over an earlier one. `sloppy` passes over unknown options.

    Raises UsageError for an unknown option, a bad value or a bad file, NotYet for `ro`.
    """
    values: dict[str, object] = {}
    kernel: list[str] = []
    named: str | None = None
    for option in (o for text in texts for o in text.split(",") if o):
        name, has_value, value = option.partition("=")
        if option == "ro":
            raise NotYet("mount option ro")
        if option == "allow_other":
            values[name] = True
        elif name == "config" and value:
            named = value
        elif name in ("commit", "policy", "pool") and has_value:
            values[name] = _value(name, value)
        elif option in _PASSED:
            kernel.append(option)
        elif not (option in _ACCEPTED or name.startswith("x-") or name == "comment" or sloppy):
            known = ", ".join((*OWN_OPTIONS, *sorted(_PASSED | _ACCEPTED), "x-*"))
            raise UsageError(f"unknown mount option {option!r}; known: {known}")
    config_file = named if config_file is None else config_file
    if config_file is not None:
        read = read_config(config_file)
        values = {"streams": read.streams, **read.mount.stated(), **values}
    return MountOptions(kernel=frozenset(kernel), **values)  # type: ignore[arg-type]


def _value(name: str, text: str) -> object:
    try:
        return config.mount_value(name, text)
    except (ValueError, UsageError) as error:
        raise UsageError(f"mount option {name}={text}: {error}") from error


def read_config(path: str) -> Config:
    """Read a configuration file. Raises BadConfig."""
    try:
        return config.parse(Path(path).read_bytes().decode(), path)
    except OSError as error:
        raise BadConfig(path, f"cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(path, f"not UTF-8 text, from byte {error.start} on") from error


def check_directory(directory: str) -> None:
    """Raise MountError if nothing can be mounted there."""
    if (mounted := find_mount(os.path.realpath(directory))) is not None:
        raise MountError(
            directory,
            f"{mounted.source} is mounted there; 'retainzfs umount {directory}' takes it away",
        )
    path = Path(directory)
    try:
        if any(path.iterdir()):
            raise MountError(directory, "not empty; a mount would hide what is in it")
    except FileNotFoundError as error:
        what = f"no such directory; make it with 'mkdir {directory}'"
        raise MountError(directory, what) from error
    except OSError as error:
        raise MountError(directory, str(error.strerror)) from error


def _check(mount: Mount) -> None:
    """Raise MountError if nothing can be mounted there, UsageError for globs of another root."""
    check_directory(mount.directory)
    top = os.path.realpath(mount.directory) + "/"
    for path in (table.path for table in mount.options.streams):
        if (path + "/").startswith(top):
            rest = path[len(top) :] or "/"
            what = f"[[stream]] path {path!r}: paths begin at the mount's root; write {rest!r}"
            raise UsageError(what)


def log_path(target: str) -> Path:
    """Return where the daemon of a target logs: one file a target, in the state directory."""
    path = target if is_memory(target) else os.path.realpath(target)
    name = path.strip("/").replace("/", "-")[-LOG_NAME_MAX:] + ".log"
    if os.geteuid() == 0:
        return Path("/var/log/retainzfs", name)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state, "retainzfs", name)


def mount_foreground(mount: Mount) -> int:
    """Mount, serve until the end, and return the exit code: 1 when writing had to stop."""
    _check(mount)
    _log_to(sys.stderr, "retainzfs: %(message)s", mount)
    return _serve(mount, lambda: None)


def mount_daemon(mount: Mount) -> None:
    """Mount with a daemon behind; return when the mount answers.

    Raises what went wrong in the daemon, with its message and exit code.
    """
    _check(mount)
    log_file = _open_log(mount)
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(reader)
        _daemon(mount, log_file, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
    if not told:
        raise MountError(mount.target, f"the daemon ended without a word; see {log_file.name}")
    answer = json.loads(told)
    if "error" in answer:
        raise _DaemonError(answer["error"], answer["exit_code"])
    os.stat(mount.directory)  # the kernel waits for the daemon's answer


class _DaemonError(RetainzError):
    """{}"""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def _daemon(mount: Mount, log_file: TextIO, writer: int) -> NoReturn:
    """The child. The pipe carries one answer: mounted, or the error."""
    code = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        _log_to(log_file, "%(asctime)s %(levelname)s %(message)s", mount)

        def answer(told: dict[str, object]) -> bool:
            """Return whether the parent was still there to hear it."""
            nonlocal writer
            if writer < 0:
                return False
            os.write(writer, json.dumps(told).encode())
            os.close(writer)
            writer = -1
            return True

        def ready() -> None:
            os.chdir("/")  # keeps no other filesystem busy
            os.dup2(log_file.fileno(), 2)
            answer({})

        try:
            code = _serve(mount, ready)
        except RetainzError as error:
            code = error.exit_code
            if not answer({"error": str(error), "exit_code": code}):
                log.error("%s", error)
    finally:
        # Nothing of the parent's is ours to flush or to clean up.
        logging.shutdown()
        os._exit(code)


def _serve(mount: Mount, ready: Callable[[], None]) -> int:
    """Raises RetainzError; a mistake of this program is logged with its traceback."""
    options, directory = mount.options, os.path.realpath(mount.directory)
    volume_options = Options(
        commit=options.commit,
        policy=options.policy,
        streams=options.streams,
        wall_ns=session.kernel_time_ns,
    )
    if options.pool is not None:
        volume_options = replace(volume_options, pool=options.pool)
    in_effect = MountTable(options.commit, options.policy, volume_options.pool, options.allow_other)
    setup = session.Setup(
        mount.target,
        directory,
        volume_options,
        _fuse_options(mount),
        f"# {json.dumps(mount.target)} on {json.dumps(directory)}\n\n"
        + config.dump(Config(in_effect, options.streams)),
    )
    try:
        if mount.create_size is not None and not os.path.lexists(mount.target):
            mkfs.make(mount.target, size=mount.create_size)
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
        whole = trio.run(session.serve, setup, ready)
    except BaseException as error:
        ours = _only(error)
        if isinstance(ours, RetainzError | KeyboardInterrupt):
            raise ours from None
        log.critical("%s: stopped by a mistake in retainzfs", mount.directory, exc_info=error)
        raise MountError(
            mount.directory, f"stopped by a mistake in retainzfs: {ours!r}; its log has more"
        ) from error
    return 0 if whole else 1


def _only(error: BaseException) -> BaseException:
    """Return what a group of exceptions consists of, if that is one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _fuse_options(mount: Mount) -> frozenset[str]:
    """Return what libfuse is to be told. The kernel checks permissions, always."""
    options = {"default_permissions", "subtype=retainzfs", *mount.options.kernel}
    options.add("fsname=" + _escaped(mount.target))
    if mount.options.allow_other:
        options.add("allow_other")
    return frozenset(options)


def _escaped(text: str) -> str:
    r"""Commas end an option, and pyfuse3 takes ASCII only; libfuse reads \, and \ooo."""
    return "".join(
        chr(byte) if 32 < byte < 127 and byte not in b",\\" else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )


def _log_to(stream: TextIO, style: str, mount: Mount) -> None:
    level = logging.DEBUG if mount.verbose else logging.INFO
    logging.basicConfig(stream=stream, format=style, level=level, force=True)


def _open_log(mount: Mount) -> TextIO:
    path = Path(mount.log_file) if mount.log_file is not None else log_path(mount.target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as error:
        raise MountError(str(path), f"cannot log there: {error.strerror}") from error


class _HelperParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def helper(arguments: list[str]) -> int:
    """The helper: `SPEC DIR [-sfnv] [-t TYPE] [-o OPTS]`; returns the codes of mount(8)."""
    parser = _HelperParser(prog="mount.retainzfs", add_help=False)
    parser.add_argument("spec")
    parser.add_argument("directory")
    parser.add_argument("-s", action="store_true", help="pass over unknown options")
    parser.add_argument("-f", action="store_true", help="check only, do not mount")
    parser.add_argument("-n", action="store_true", help="nothing to us: we write no mtab")
    parser.add_argument("-v", action="store_true", help="log more")
    parser.add_argument("-t", metavar="TYPE")
    parser.add_argument("-o", action="append", default=[], metavar="OPTIONS")
    try:
        given = parser.parse_args(arguments)
        mount = Mount(
            absolute(given.spec),
            given.directory,
            parse_options(given.o, sloppy=given.s),
            verbose=given.v,
        )
        _check(mount)
        if not given.f:
            mount_daemon(mount)
    except RetainzError as error:
        print(f"mount.retainzfs: {error}", file=sys.stderr)
        return HELPER_USAGE if isinstance(error, UsageError) else HELPER_FAILED
    return 0


def absolute(target: str) -> str:
    """Return a target that means the same from every directory."""
    return target if is_memory(target) else os.path.abspath(target)
