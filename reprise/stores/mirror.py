"""A run's mirror, a process that uploads the committed checkpoints in the run's folder.

    python -m reprise.stores.mirror OPTIONS

The standard input has the starting process's orders: `FINISH` tells the mirror to end once the store has all
checkpoints, any other word wakes it, and the end of the input ends it at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import secrets
import sys
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from reprise.errors import CheckpointError, TrainerError
from reprise.format.mirror_record import MirrorRule
from reprise.storage.lease import leases
from reprise.storage.lock import FolderLock
from reprise.storage.paths import is_dir
from reprise.stores.client import StoreClient
from reprise.stores.mirror_pass import MirrorPass
from reprise.stores.mirror_process import FINISH
from reprise.stores.upload import retried
from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)

LOCK_FOLDER = ".mirror"  # below the checkpoint folder; holds host 0's lock
POLL_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_NICENESS, _OBSTORE_THREADS = 10, "2"
FINE, _REFUSED, IMPOSSIBLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """A mirror's settings.

    Args:
        url: The run's URL in the store.
        run: The run's folder, or its checkpoint folder.
        keep: How many of the newest full checkpoints to keep in the store. 0 keeps all.
        interval: Upload full checkpoints only at multiples of this iteration, and the last. 0 uploads all.
        once: End once the store has everything now in the folder.
        host: This host's number among `hosts`, which upload together.
        attached: Serve a training process, with low priority, and retry requests that a store refuses.
    """

    url: str
    run: str
    keep: int = 0
    interval: int = 0
    once: bool = False
    host: int = 0
    hosts: int = 1
    attached: bool = False


@dataclass(slots=True)
class Orders:
    """Orders from the process that started the mirror."""

    wake: threading.Event = field(default_factory=threading.Event)
    is_finishing: bool = False

    def listen(self) -> None:
        """Take orders until their end, which ends this process."""
        while words := os.read(sys.stdin.fileno(), 1024):
            self.is_finishing |= FINISH in words
            self.wake.set()
        for lease in tuple(leases):  # else the next mirror on another host waits for this one's heartbeat
            lease.release()
        os._exit(FINE)


def main(words: str) -> int:
    """Mirror a run, log to stderr, and return the exit status; see `mirror`.

    Args:
        words: `MirrorOptions` as JSON.
    """
    logging.basicConfig(format="reprise mirror: %(message)s", stream=sys.stderr)
    logging.getLogger("reprise").setLevel(logging.INFO)
    options, orders = MirrorOptions(**json.loads(words)), Orders()
    if options.attached:
        os.nice(_NICENESS)
        os.environ["TOKIO_WORKER_THREADS"] = _OBSTORE_THREADS
    threading.Thread(target=orders.listen, daemon=True).start()
    try:
        return mirror(options, orders)
    except (TrainerError, OSError) as error:
        print(f"reprise mirror: {_line(error)}", file=sys.stderr)
    return IMPOSSIBLE


def mirror(options: MirrorOptions, orders: Orders) -> int:
    """Follow a run's folder until nothing is left to do, or forever.

    Returns:
        The exit status. With `once`, 1 if a checkpoint in the folder is not mirrored, which the log explains.

    Raises:
        CheckpointError: The folder does not exist, or the URL belongs to another run.
        ConfigError: The URL lies in the folder.
        LockError: Another process mirrors the folder.
        OSError: With `once`, the store fails; from a command, it refuses a request until a user fixes the cause.
            Otherwise the mirror retries forever.
    """
    url, root = StoreUrl.parse(options.url), Path(options.run)
    folder = root / "checkpoints" if is_dir(root / "checkpoints") else root
    if not options.attached and not is_dir(folder):
        raise CheckpointError("The folder does not exist", where=root)
    url.require_outside(folder)
    rule = MirrorRule(str(url), options.interval, options.keep)
    passes = MirrorPass(StoreClient(), url, folder, rule, host=options.host, hosts=options.hosts)
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
                    _log.warning("the mirror is waiting: %s; it will retry, and training continues", _line(error))
                problem = kind
                orders.wake.wait(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                continue
            if problem:
                _log.info("the mirror continues: %s", url)
            problem, pause_s = "", _FIRST_PAUSE_S
            if is_done and is_last:
                return _REFUSED if options.once and passes.refused else FINE
            if is_done or options.hosts > 1:
                orders.wake.wait(POLL_S)


def _line(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
