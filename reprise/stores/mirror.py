"""The mirror of a run: uploads the committed checkpoints of the run's folder, in the child process of a host.

A training process wakes it by `saved`, and by `finish` lets it end once the store has all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import secrets
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.mirror_record import MirrorRule
from reprise.storage.lock import FolderLock
from reprise.storage.paths import is_dir
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.store import Orders
from reprise.stores.upload import retried
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

LOCK_FOLDER = ".mirror"  # below the checkpoint folder; its lock is that of host 0
POLL_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NICENESS = 10
FINE, _REFUSED, IMPOSSIBLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """The work of a mirror.

    Args:
        url: of the run in the store.
        run: folder of the run, or of its checkpoints.
        keep: number of newest full checkpoints to keep in the store; 0 keeps all.
        interval: take full checkpoints at multiples of this iteration alone, and the last; 0 takes all.
        once: end once the store has what the folder has now.
        host: the number of this host among `hosts`, which upload together.
        attached: work for a training process, with low priority, and try again what a store refuses.
    """

    url: str
    run: str
    keep: int = 0
    interval: int = 0
    once: bool = False
    host: int = 0
    hosts: int = 1
    attached: bool = False


def run(options: MirrorOptions, orders: Orders) -> int:
    """Mirror a run, log to stderr, and return the exit status; see `mirror`."""
    logging.basicConfig(format="reprise mirror: %(message)s", stream=sys.stderr)
    logging.getLogger("reprise").setLevel(logging.INFO)
    if options.attached:
        os.nice(_NICENESS)
    try:
        return mirror(options, orders)
    except (TrainerError, OSError) as error:
        print(f"reprise mirror: {_line(error)}", file=sys.stderr)
    return IMPOSSIBLE


def mirror(options: MirrorOptions, orders: Orders) -> int:
    """Follow a run's folder until there is no more to do, or without end.

    Returns:
        The exit status: with `once` 1 if a checkpoint of the folder is not mirrored, as a line of the log says.

    Raises:
        CheckpointError: if there is no such folder, or the URL is another run's.
        ConfigError: if the URL lies in the folder.
        LockError: if another process mirrors the folder.
        OSError: with `once`, if the store fails, and from a command, if it refuses what only a user can mend.
            Otherwise it is tried again without end.
    """
    url, root = StoreUrl.parse(options.url), Path(options.run)
    folder = root / "checkpoints" if is_dir(root / "checkpoints") else root
    if not options.attached and not is_dir(folder):
        raise CheckpointError("There is no such folder", where=root)
    url.require_outside(folder)
    rule = MirrorRule(str(url), options.interval, options.keep)
    passes = MirrorPass(StoreClient(url.root), url, folder, rule, host=options.host, hosts=options.hosts)
    problem, pause_s, is_locked = "", _FIRST_PAUSE_S, options.host > 0
    with contextlib.ExitStack() as stack:
        while True:
            orders.wake.clear()
            is_last = options.once or orders.is_finishing
            try:
                if not is_locked:
                    nonce = secrets.token_hex(4)
                    lock = FolderLock(folder / LOCK_FOLDER, nonce, kind="mirror of a run", another="another run")
                    stack.enter_context(lock)
                    is_locked = True
                is_done = retried(partial(passes.run, at_end=True)) if options.once else passes.run(at_end=is_last)
            except (OSError, CheckpointError) as error:
                is_refused = isinstance(error, OSError) and error.errno == errno.EACCES
                if options.once or (is_refused and not options.attached):
                    raise
                kind = str(error.errno) if isinstance(error, OSError) else type(error).__name__
                if kind != problem:
                    _log.warning("the mirror waits: %s; it tries again, and training goes on", _line(error))
                problem = kind
                orders.wake.wait(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if problem:
                _log.info("the mirror goes on: %s", url)
            problem, pause_s = "", _FIRST_PAUSE_S
            if is_done and is_last:
                return _REFUSED if options.once and passes.refused else FINE
            if is_done or options.hosts > 1:
                orders.wake.wait(POLL_S)


def _line(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
