"""Mirrors a run: a process uploads the committed checkpoints in its folder.

A training run starts it as a child process: `python -m reprise.stores.mirror FOLDER URL INTERVAL KEEP LEVEL`. It
ends with its standard input; a byte there says that no later checkpoint follows.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, ConfigError, LockError, TrainerError, UnreadableError
from reprise.format.mirror_record import MirrorRule
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.storage.lease import leases
from reprise.storage.lock import FolderLock
from reprise.storage.paths import is_dir
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.path import store_path
from reprise.stores.store import require_obstore, start_process
from reprise.stores.url import FILE_STORE, place_of

_log = logging.getLogger(__name__)

LOCK_FOLDER = ".mirror"  # below the checkpoint folder; holds the mirror's lock
POLL_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NICENESS = 10
_NICE_THREADS = "2"  # of obstore
_END_S = 5.0


def mirror_rule(url: str, *, interval: int, keep: int) -> MirrorRule:
    """Return a mirror's rule, with its URL as in `mirror.json`.

    Raises:
        ConfigError: The URL is malformed.
    """
    return MirrorRule(str(store_path(url)), interval, keep)


def mirror_run(run: Path, url: str, *, keep: int, interval: int, once: bool) -> int:
    """Mirror a run until an interrupt, in a process that logs each step.

    Args:
        run: The run's folder, or its checkpoint folder.
        keep: How many of the newest full checkpoints to keep in the store. 0 keeps all.
        interval: Upload full checkpoints only at multiples of this iteration, and the last. 0 uploads all.
        once: End once the store has everything now in the folder.

    Returns:
        The exit status: 1 if the mirror failed, or the store lacks a checkpoint. The log says why.

    Raises:
        CheckpointError: The folder does not exist.
        ConfigError: The URL is malformed or lies in the folder, or obstore is not installed.
    """
    if not is_dir(run):
        raise CheckpointError("The folder does not exist", where=run)
    logging.getLogger(__package__).setLevel(logging.INFO)
    folder = run / "checkpoints" if is_dir(run / "checkpoints") else run
    mirror = Mirror(folder, mirror_rule(url, interval=interval, keep=keep))
    try:
        return bool(mirror.finish(None) if once else mirror.process.wait())
    except KeyboardInterrupt:
        return 0
    finally:
        mirror.end()


def follow(passes: MirrorPass, folder: Path, finishing: threading.Event) -> None:
    """Upload checkpoints until nothing is left to do after `finishing` is set.

    Tries again while the store is away, or another process has the lock.

    Raises:
        OSError: The store refuses a request until a user fixes the cause, or is still away at the end.
        LockError: Another process still mirrors the folder at the end.
        CheckpointError: The URL belongs to another run.
    """
    new_lock = partial(FolderLock, folder / LOCK_FOLDER, another="another run")
    lock: FolderLock | None = None
    pause_s = 0.0
    with contextlib.ExitStack() as stack:
        while True:
            is_last, wait_s = finishing.is_set(), 0.0
            try:
                lock = lock or stack.enter_context(new_lock(secrets.token_hex(4)))
                if passes.run(at_end=is_last):
                    if is_last:
                        return
                    wait_s = POLL_S
                pause_s = 0.0
            except (OSError, LockError, UnreadableError) as error:
                if getattr(error, "errno", 0) == errno.EACCES or (is_last and pause_s == _LONGEST_PAUSE_S):
                    raise
                if not pause_s:
                    _log.warning("the mirror is waiting: %s; it will retry, and training continues", error)
                wait_s = pause_s = min(2 * pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            if is_last:
                time.sleep(wait_s)
            elif finishing.wait(wait_s):  # the end has as many tries, however long the store was away
                pause_s = min(pause_s, _FIRST_PAUSE_S)


class Mirror:
    """A run's mirror: a child process. No method waits for the store, except `finish`.

    Args:
        folder: The run's checkpoint folder.

    Raises:
        ConfigError: obstore is not installed, or the URL lies in the folder.
    """

    def __init__(self, folder: Path, rule: MirrorRule) -> None:
        require_obstore()
        store, key = place_of(store_path(rule.url))
        if store == FILE_STORE and Path("/", key).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(  # its retention would delete the folder's own checkpoints
                "The mirror is inside the folder that it mirrors",
                where=folder,
                expected="a location outside it",
                found=rule.url,
                fix="Choose a URL outside the folder.",
            )
        self._folder, self._rule = folder.absolute(), rule
        self._start()

    def _start(self) -> None:
        rule, level = self._rule, _log.getEffectiveLevel()
        self.process = start_process(__name__, self._folder, rule.url, rule.interval, rule.keep, level)
        assert self.process.stdin is not None
        self._orders = self.process.stdin

    def wake(self) -> None:
        """Restart the process if it has ended, or log why not."""
        if (status := self.process.poll()) is not None:
            _log.warning("the process of the mirror ended with status %d, and is restarted", status)
            try:
                self._start()
            except OSError as error:
                _log.warning("the mirror cannot be restarted: %s; the next save tries again", error)

    def finish(self, wait_s: float | None) -> list[str]:
        """Wait until the mirror has uploaded all missing checkpoints, and return those still missing.

        Args:
            wait_s: The longest wait, in seconds. None waits until the mirror ends.
        """
        self.wake()
        with contextlib.suppress(BrokenPipeError):  # it has ended again
            self._orders.write(b"\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait_s)
        self.end()
        return self.missing()

    def missing(self) -> list[str]:
        """Return the checkpoints missing in the store: iterations, with `weights/` before weights-only saves."""
        names = []
        for prefix, root in (("", self._folder), (f"{WEIGHTS}/", self._folder / WEIGHTS)):
            committed = CheckpointFolder(root, FILE_SYSTEM).committed()
            rule = replace(self._rule, prefix=prefix)
            names += [f"{prefix}{number}" for number in rule.unmirrored(root, committed, committed, at_end=True)]
        return names

    def end(self) -> None:
        """End the mirror, whatever request is under way. The next start reuses its partial uploads."""
        self._orders.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)  # it releases its lock
        self.process.kill()
        self.process.wait()


def _obey(finishing: threading.Event) -> None:
    standard_input = 0
    if os.read(standard_input, 1):
        finishing.set()
        os.read(standard_input, 1)
    for lease in tuple(leases):  # another host would watch a dead one for a while
        lease.release()
    os._exit(1)  # whatever request is under way


def main(folder: str, url: str, *numbers: str) -> None:
    """Mirror a folder for the process that has started this one."""
    from reprise.stores.client import StoreClient

    interval, keep, level = map(int, numbers)
    os.nice(_NICENESS)
    os.environ["TOKIO_WORKER_THREADS"] = _NICE_THREADS
    logging.basicConfig(level=level, format="%(message)s")
    finishing = threading.Event()
    threading.Thread(target=_obey, args=(finishing,), daemon=True).start()
    passes = MirrorPass(StoreClient(), Path(folder), MirrorRule(url, interval, keep))
    try:
        follow(passes, Path(folder), finishing)
    except (OSError, TrainerError) as error:
        sys.exit(f"the mirror has failed: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
