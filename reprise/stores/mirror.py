"""Mirrors a run: a thread uploads the committed checkpoints in its folder, by requests of a child process."""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import secrets
import threading
from dataclasses import replace
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.mirror_record import MirrorRule
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.storage.lock import FolderLock
from reprise.storage.paths import is_dir
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.store import Child, client_of
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

LOCK_FOLDER = ".mirror"  # below the checkpoint folder; holds host 0's lock
POLL_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LAST_PAUSE_S = 4.0  # with `once`, a failure after a longer pause is final
_END_S = 5.0
_NICENESS = 10
FINE, _REFUSED = 0, 1


def mirror_rule(url: str, *, interval: int, keep: int) -> MirrorRule:
    """Return a mirror's rule, with its URL as in `mirror.json`.

    Raises:
        ConfigError: The URL is malformed.
    """
    return MirrorRule(str(StoreUrl.parse(url)), interval, keep)


def mirror_run(run: Path, url: str, *, keep: int, interval: int, once: bool) -> int:
    """Mirror a run until nothing is left to do, or forever, and log each step.

    Args:
        run: The run's folder, or its checkpoint folder.
        keep: How many of the newest full checkpoints to keep in the store. 0 keeps all.
        interval: Upload full checkpoints only at multiples of this iteration, and the last. 0 uploads all.
        once: End once the store has everything now in the folder.

    Returns:
        The exit status: 1 if a checkpoint in the folder is not mirrored, which the log explains.

    Raises:
        CheckpointError: The folder does not exist, or the URL belongs to another run.
        ConfigError: The URL is malformed or lies in the folder, or obstore is not installed.
        LockError: Another process mirrors the folder.
        OSError: With `once`, the store fails; without, it refuses a request until a user fixes the cause.
    """
    if not is_dir(run):
        raise CheckpointError("The folder does not exist", where=run)
    logging.getLogger(__package__).setLevel(logging.INFO)
    folder = run / "checkpoints" if is_dir(run / "checkpoints") else run
    mirror = Mirror(folder, mirror_rule(url, interval=interval, keep=keep), attached=False)
    try:
        mirror.follow(once=once)
        return _REFUSED if mirror.refused else FINE
    except KeyboardInterrupt:
        return FINE
    finally:
        mirror.end()


class Mirror:
    """A run's mirror on this host. No method waits for the store, except `follow`, and none raises after the start.

    Args:
        folder: The run's checkpoint folder, which all hosts share.
        host: This host's number among `hosts`, which upload together.
        attached: Whether it serves a training process: a thread follows the folder, with low-priority requests, and
            retries those that a store refuses.

    Raises:
        ConfigError: obstore is not installed, or the URL lies in the folder.
    """

    def __init__(self, folder: Path, rule: MirrorRule, *, host: int = 0, hosts: int = 1, attached: bool = True) -> None:
        url, self._folder, self._rule, self._host, self._hosts = StoreUrl.parse(rule.url), folder, rule, host, hosts
        url.require_outside(folder)
        self._child = Child(niceness=_NICENESS if attached else 0)
        self._passes = MirrorPass(client_of(lambda: self._child), url, folder.absolute(), rule, host=host, hosts=hosts)
        self._attached, self._wake = attached, threading.Event()
        self._is_finishing = self._is_complete = self._is_over = False
        if attached:
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self.follow, name="mirror", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> frozenset[str]:
        """Return the checkpoints, by name, that the log has reported as not mirrored."""
        return self._passes.refused

    def follow(self, *, once: bool = False) -> None:
        """Upload checkpoints until the end, or until nothing is left to do.

        Args:
            once: End once the store has everything now in the folder.

        Raises:
            TrainerError, OSError: See `mirror_run`. With `attached`, the mirror retries forever.
        """
        problem, pause_s, is_locked = "", _FIRST_PAUSE_S, self._host > 0
        with contextlib.ExitStack() as stack:
            while True:
                self._wake.clear()
                if self._is_over:  # looked at after the clearing, so no end is slept over
                    return
                is_last = once or self._is_finishing
                try:
                    if not is_locked:
                        stack.enter_context(self._lock())
                        is_locked = True
                    is_done = self._passes.run(at_end=is_last)
                except (OSError, TrainerError) as error:
                    number = error.errno if isinstance(error, OSError) else None
                    is_final = once and (number != errno.EIO or pause_s > _LAST_PAUSE_S)
                    if not self._attached and (is_final or number == errno.EACCES):
                        raise
                    kind = f"{type(error).__name__} {number}"
                    if kind != problem and not self._is_over:
                        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
                        _log.warning("the mirror is waiting: %s; it will retry, and training continues", text)
                    problem = kind
                    self._wake.wait(pause_s * random.uniform(0.5, 1.5))
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    continue
                if problem:
                    _log.info("the mirror continues: %s", self._rule.url)
                problem, pause_s = "", _FIRST_PAUSE_S
                if is_done and is_last:
                    self._is_complete = True
                    return
                if is_done or self._hosts > 1:
                    self._wake.wait(POLL_S)

    def _lock(self) -> FolderLock:
        nonce = secrets.token_hex(4)
        return FolderLock(self._folder / LOCK_FOLDER, nonce, kind="mirror of a run", another="another run")

    def wake(self) -> None:
        """Notify the mirror about a committed checkpoint. Restart its thread if a defect has ended it."""
        self._wake.set()
        if not self._thread.is_alive():
            self._start()

    def finish(self, wait_s: float) -> bool:
        """Wait until the mirror has uploaded all missing checkpoints. Return whether it has.

        Args:
            wait_s: The longest wait, in seconds.
        """
        self._is_finishing = True
        self.wake()
        self._thread.join(wait_s)
        self.end()
        return self._is_complete

    def missing(self) -> list[str]:
        """Return the checkpoints missing in the store: iterations, with `weights/` before weights-only saves."""
        names = []
        for prefix, root in (("", self._folder), (f"{WEIGHTS}/", self._folder / WEIGHTS)):
            committed = CheckpointFolder(root, FILE_SYSTEM).committed()
            rule = replace(self._rule, prefix=prefix)
            names += [f"{prefix}{number}" for number in rule.unmirrored(root, committed, committed, at_end=True)]
        return names

    def end(self) -> None:
        """End the mirror at once. The next start reuses its partial uploads."""
        self._is_over = True
        self._wake.set()
        self._child.end()
        if self._attached:
            self._thread.join(_END_S)  # which releases the lock
