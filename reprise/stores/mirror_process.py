"""Starts a run's mirror in a child process beside training, which never imports obstore."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from reprise.format.mirror_record import MirrorRule
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.stores.extra import require_extra
from reprise.stores.store import FINISH, Child
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

_RESTART_S = 30.0  # minimum time between restarts after the process dies
TOKIO_THREADS = "2"


def mirror_rule(url: str, *, interval: int, keep: int) -> MirrorRule:
    """Return a mirror's rule, with its URL as in `mirror.json`.

    Raises:
        ConfigError: The URL is malformed.
    """
    return MirrorRule(str(StoreUrl.parse(url)), interval, keep)


def mirror_run(run: Path, url: str, *, keep: int, interval: int, once: bool) -> int:
    """Mirror a run, and return the exit status; see `MirrorOptions`.

    Raises:
        ConfigError: The URL is malformed, or obstore is not installed.
        OSError: The mirroring process has died several times.
    """
    place, child = StoreUrl.parse(url), Child()
    require_extra(place)
    options = {"run": str(run.absolute()), "keep": keep, "interval": interval, "once": once}
    try:
        return int(child.ask("mirror", place, options, wait_s=None))
    except KeyboardInterrupt:
        return 0
    finally:
        child.end()


class MirrorProcess:
    """A run's mirror on this host. No method waits for the store, and none raises after the start.

    Args:
        folder: The run's checkpoint folder, which all hosts share.
        host: This host's number among `hosts`.

    Raises:
        ConfigError: obstore is not installed, or the URL lies in the folder.
    """

    def __init__(self, folder: Path, rule: MirrorRule, *, host: int = 0, hosts: int = 1) -> None:
        require_extra(rule.url)
        self._url, self._folder, self._rule = StoreUrl.parse(rule.url), folder, rule
        self._url.require_outside(folder)
        self._options = {
            "run": str(folder.absolute()), "keep": rule.keep, "interval": rule.interval,
            "host": host, "hosts": hosts, "attached": True,
        }  # fmt: skip
        self._child = Child(TOKIO_WORKER_THREADS=TOKIO_THREADS)
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._link = self._child.link()
        self._link.send("mirror", self._url.root, self._url.key, self._options)
        os.set_blocking(self._link.connection.fileno(), False)

    def wake(self) -> None:
        """Notify the mirror about a committed checkpoint. Restart it if it has died."""
        if not self._has_ended():
            self._say("saved")
        elif time.monotonic() - self._started > _RESTART_S:
            self._start_again()

    def _has_ended(self) -> bool:
        return self._child.process is None or self._child.process.poll() is not None

    def _start_again(self) -> None:
        self._link.connection.close()
        with contextlib.suppress(OSError):  # the next save retries
            self._start()

    def finish(self, wait_s: float) -> bool:
        """Wait until the mirror has uploaded all missing checkpoints and ended. Return whether it has.

        Args:
            wait_s: The longest wait, in seconds.
        """
        try:
            if self._has_ended():
                self._start_again()
            self._say(FINISH)
            return bool(self._link.answer(wait_s) == [0])
        finally:
            self.end()

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
        self._link.connection.close()
        self._child.end()

    def _say(self, word: str) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes it too, and a dead process is restarted
            self._link.send(word)
