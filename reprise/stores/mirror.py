"""The mirror of a run: a process to upload the committed checkpoints of the run's folder.

A training process starts it as `python -m reprise.stores.mirror --attached` and talks to it by its standard input:
`saved` wakes it, `finish` lets it end once the store has all; the end of the input, or of its parent, ends it at once.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import random
import secrets
import select
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, LockError, TrainerError
from reprise.format.mirror_record import MirrorRule
from reprise.paths import is_dir
from reprise.storage.lock import FolderLock
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import STALL_S, MirrorPass
from reprise.stores.upload import retried
from reprise.stores.url import StoreUrl

_log = logging.getLogger("reprise.stores.mirror")  # also where it is the program

LOCK_FOLDER = ".mirror"  # below the checkpoint folder; its lock is that of host 0
POLL_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NICENESS = 10
_FINE, _REFUSED, _IMPOSSIBLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """The work of a mirror.

    Args:
        run: folder of the run, or of its checkpoints.
        url: of the run in the store.
        keep: number of newest full checkpoints to keep in the store; 0 keeps all.
        interval: take full checkpoints at multiples of this iteration alone, and the last; 0 takes all.
        once: end once the store has what the folder has now.
        host: the number of this host among `hosts`, which upload together.
        stall_s: seconds after which host 0 uploads in the place of a host without uploads.
        attached: follow the orders of a training process, and end with it.
    """

    run: Path
    url: str
    keep: int = 0
    interval: int = 0
    once: bool = False
    host: int = 0
    hosts: int = 1
    stall_s: float = STALL_S
    attached: bool = False


@dataclass(slots=True)
class Orders:
    """What the parent has asked for. Its members are set by a thread of their own."""

    wake: threading.Event = field(default_factory=threading.Event)
    is_finishing: bool = False

    def follow(self, descriptor: int) -> None:
        """Read the orders of the parent; end this process with it, whatever it does."""
        parent, data = os.getppid(), b""
        while True:
            ready, _, _ = select.select([descriptor], [], [], 1.0)
            if os.getppid() != parent:
                os._exit(_FINE)
            if not ready:
                continue
            received = os.read(descriptor, 4096)
            if not received:
                os._exit(_FINE)
            *lines, data = (data + received).split(b"\n")
            self.is_finishing |= b"finish" in lines
            self.wake.set()


class _Announcer:
    """Logs a line when a state begins, and when all is well again; nothing while it lasts."""

    def __init__(self, url: StoreUrl) -> None:
        self._url, self._problem = url, ""

    def failed(self, error: Exception) -> None:
        problem = type(error).__name__ if not isinstance(error, OSError) else f"{error.errno}"
        if problem != self._problem:
            _log.warning("the mirror waits: %s; it tries again, and training goes on", _line(error))
            self._problem = problem

    def went_on(self) -> None:
        if self._problem:
            _log.info("the mirror goes on: %s", self._url)
            self._problem = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Mirror a run, and return the exit status."""
    options = MirrorOptions(**vars(_parser().parse_args(arguments)))
    if options.attached:
        os.nice(_NICENESS)
    return run(options)


def run(options: MirrorOptions) -> int:
    """Mirror a run, log to stderr, and return the exit status."""
    logging.basicConfig(format="reprise mirror: %(message)s", stream=sys.stderr)
    logging.getLogger("reprise").setLevel(logging.INFO)
    try:
        return mirror(options)
    except KeyboardInterrupt:
        return _FINE
    except TrainerError as error:
        print(f"reprise mirror: {error}", file=sys.stderr)
    except OSError as error:
        print(f"reprise mirror: {_line(error)}", file=sys.stderr)
    return _IMPOSSIBLE


def mirror(options: MirrorOptions) -> int:
    """Follow a run's folder until there is no more to do, or without end.

    Returns:
        The exit status: with `--once` 1 if a checkpoint of the folder is not mirrored, as a line of the log says.

    Raises:
        CheckpointError: if there is no such folder, or the store holds checkpoints of another run.
        ConfigError: if the URL lies in the folder.
        LockError: if another process mirrors the folder.
        OSError: with `--once`, if the store fails, and from a command, if it refuses what only a user can mend.
            Otherwise it is tried again without end.
    """
    url, folder = StoreUrl.parse(options.url), _checkpoints_of(options.run, is_awaited=options.attached)
    url.require_outside(folder)
    rule = MirrorRule(str(url), options.interval, options.keep)
    orders = Orders()
    if options.attached:
        threading.Thread(target=orders.follow, args=(sys.stdin.fileno(),), daemon=True).start()
    announcer, pause_s = _Announcer(url), _FIRST_PAUSE_S
    with contextlib.ExitStack() as stack:
        passes: MirrorPass | None = None
        while True:
            try:
                orders.wake.clear()
                is_last = options.once or orders.is_finishing
                if passes is None:
                    if options.host == 0:
                        stack.enter_context(_lock_of(folder))
                    passes = MirrorPass(
                        StoreClient(url.root), url, folder, rule,
                        host=options.host, hosts=options.hosts, stall_s=options.stall_s,
                    )  # fmt: skip
                is_done = retried(partial(passes.run, at_end=True)) if options.once else passes.run(at_end=is_last)
                announcer.went_on()
                pause_s = _FIRST_PAUSE_S
                if is_done and is_last:
                    return _REFUSED if options.once and passes.refused else _FINE
                if is_done or options.hosts > 1:
                    orders.wake.wait(POLL_S)
            except (OSError, LockError, CheckpointError) as error:
                is_refused = isinstance(error, OSError) and error.errno == errno.EACCES
                if options.once or (is_refused and not options.attached):
                    raise
                announcer.failed(error)
                orders.wake.wait(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _lock_of(folder: Path) -> FolderLock:
    return FolderLock(folder / LOCK_FOLDER, secrets.token_hex(4), kind="mirror of a run", another="another run")


def _checkpoints_of(run: Path, *, is_awaited: bool) -> Path:
    """Return the checkpoint folder of a run: `run` itself, or `checkpoints` in it."""
    folder = run / "checkpoints" if is_dir(run / "checkpoints") else run
    if not is_awaited and not is_dir(folder):
        raise CheckpointError("There is no such folder", where=run)
    return folder


def _line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    """Return the words by which a training process starts the mirror."""
    parser = argparse.ArgumentParser(prog="reprise mirror", description="The mirror of a run, started by the run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("url")
    for name, kind, default in (
        ("--keep", int, 0),
        ("--interval", int, 0),
        ("--host", int, 0),
        ("--hosts", int, 1),
        ("--stall-s", float, STALL_S),
    ):
        parser.add_argument(name, type=kind, default=default)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--attached", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
