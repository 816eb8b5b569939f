"""Starts the mirror of a run as a process beside training, which never loads obstore: its threads survive no fork."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from reprise.format.mirror_record import MirrorRule
from reprise.storage.files import FILE_SYSTEM
from reprise.storage.folder import WEIGHTS, CheckpointFolder
from reprise.stores.extra import require_extra
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

_RESTART_S = 30.0  # least time between two starts, where the process dies
_END_S = 5.0
TOKIO_THREADS = "2"


def mirror_rule(url: str, *, interval: int, keep: int) -> MirrorRule:
    """Return the rule of a mirror, with its URL as `mirror.json` has it.

    Raises:
        ConfigError: if the URL is malformed.
    """
    return MirrorRule(str(StoreUrl.parse(url)), interval, keep)


def mirror_run(run: Path, url: str, *, keep: int, interval: int, once: bool) -> int:
    """Mirror a run in this process, which must not fork afterwards, and return the exit status; see `MirrorOptions`.

    Raises:
        ConfigError: if obstore is not installed.
    """
    require_extra(url)
    from reprise.stores import mirror

    return mirror.run(mirror.MirrorOptions(run, url, keep, interval, once=once))


class MirrorProcess:
    """The mirror of a run on this host. No method waits for the store, and none raises after the start.

    Args:
        folder: the run's checkpoint folder, which all hosts share.
        host: the number of this host among `hosts`.

    Raises:
        ConfigError: if obstore is not installed, or the URL lies in the folder.
    """

    def __init__(self, folder: Path, rule: MirrorRule, *, host: int = 0, hosts: int = 1) -> None:
        require_extra(rule.url)
        StoreUrl.parse(rule.url).require_outside(folder)
        self._folder, self._rule = folder, rule
        options = {"--interval": rule.interval, "--keep": rule.keep, "--host": host, "--hosts": hosts}
        words = [word for name, value in options.items() for word in (name, str(value))]
        self._command = [sys.executable, "-P", "-m", "reprise.stores.mirror", "--attached", *words, "--"]
        self._command += [str(folder.absolute()), rule.url]
        self._process = self._start()
        self._started = time.monotonic()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "TOKIO_WORKER_THREADS": TOKIO_THREADS,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            start_new_session=True,  # an interrupt of the terminal is for the program
            bufsize=0,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def wake(self) -> None:
        """Tell the mirror of a committed checkpoint; start it again where it has died."""
        if self._process.poll() is None:
            self._say(b"saved\n")
        elif time.monotonic() - self._started > _RESTART_S:
            self._start_again()

    def _start_again(self) -> None:
        _log.warning("the mirror ended with status %d and is started again", self._process.returncode)
        self._started = time.monotonic()
        self._close_input()
        self._process = self._start()

    def finish(self, wait_s: float) -> bool:
        """Let the mirror upload what the store lacks, and end; return whether it has.

        Args:
            wait_s: for how long at most.
        """
        if self._process.poll() is not None:
            self._start_again()
        self._say(b"finish\n")
        try:
            return self._process.wait(wait_s) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            self.end()

    def missing(self) -> list[str]:
        """Return the checkpoints required in the store and absent: iterations, those of weights after `weights/`."""
        names = []
        for prefix, root in (("", self._folder), (f"{WEIGHTS}/", self._folder / WEIGHTS)):
            committed = CheckpointFolder(root, FILE_SYSTEM).committed()
            rule = replace(self._rule, prefix=prefix)
            names += [f"{prefix}{number}" for number in rule.unmirrored(root, committed, committed, at_end=True)]
        return names

    def end(self) -> None:
        """End the mirror at once. What it has uploaded of a checkpoint serves the next start."""
        self._close_input()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # a full pipe wakes it too, and a dead process is started again
            self._process.stdin.write(line)

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
