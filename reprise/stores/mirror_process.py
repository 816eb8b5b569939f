"""Starts a run's mirror in a child process beside training, which never imports obstore."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from reprise.format.mirror_record import MirrorRule
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.storage.json_file import Json
from reprise.stores.extra import require_extra
from reprise.stores.store import start
from reprise.stores.url import StoreUrl

_RESTART_S = 30.0  # minimum time between restarts after the process dies
_END_S = 5.0
FINISH = b"finish\n"  # tells a mirror to end once the store has all; any other word wakes it


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
    """
    options = {"url": str(StoreUrl.parse(url)), "run": str(run.absolute())}
    with _started({**options, "keep": keep, "interval": interval, "once": once}) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            return 0


def _started(options: Json) -> subprocess.Popen[bytes]:
    """Start a mirror with `MirrorOptions`.

    Raises:
        ConfigError: obstore is not installed.
    """
    require_extra(options["url"])
    return start("mirror", json.dumps(options), stdin=subprocess.PIPE, bufsize=0)


class MirrorProcess:
    """A run's mirror on this host. No method waits for the store, and none raises after the start.

    Args:
        folder: The run's checkpoint folder, which all hosts share.
        host: This host's number among `hosts`.

    Raises:
        ConfigError: obstore is not installed, or the URL lies in the folder.
    """

    def __init__(self, folder: Path, rule: MirrorRule, *, host: int = 0, hosts: int = 1) -> None:
        StoreUrl.parse(rule.url).require_outside(folder)
        self._folder, self._rule = folder, rule
        self._options = {
            "url": rule.url, "run": str(folder.absolute()), "keep": rule.keep, "interval": rule.interval,
            "host": host, "hosts": hosts, "attached": True,
        }  # fmt: skip
        self._start()

    def _start(self) -> None:
        self._start_time, self._process = time.monotonic(), _started(self._options)
        os.set_blocking(self._orders, False)

    @property
    def _orders(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def wake(self, word: bytes = b"saved\n", *, pause_s: float = _RESTART_S) -> None:
        """Notify the mirror about a committed checkpoint. Restart it if it has died.

        Args:
            word: The order.
            pause_s: Minimum time since the last start, in seconds.
        """
        with contextlib.suppress(OSError):  # a full pipe wakes it too, and the next save restarts a dead one
            if self._process.poll() is not None and time.monotonic() - self._start_time > pause_s:
                self._start()
            os.write(self._orders, word)

    def finish(self, wait_s: float) -> bool:
        """Wait until the mirror has uploaded all missing checkpoints and ended. Return whether it has.

        Args:
            wait_s: The longest wait, in seconds.
        """
        self.wake(FINISH, pause_s=0)
        try:
            return self._process.wait(wait_s) == 0
        except subprocess.TimeoutExpired:
            return False
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
        try:
            self._process.communicate(timeout=_END_S)  # the end of its orders
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
