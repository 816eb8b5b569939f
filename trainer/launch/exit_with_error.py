"""Ends a process on an error: one message per host, torchrun's error file, and the exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from reprise.errors import TrainerError
from trainer.launch.environment import Environment

# torchrun checks ten times per second for a rank that has ended, then ends the others with SIGTERM.
_TURN_S = 1.0


def exit_with_error(error: BaseException, environment: Environment | None) -> NoReturn:
    """Print why this process ends, and end it.

    Under torchrun, ranks failing with the same error on a host take turns. The failed rank, or else the first, prints
    the error and ends, and torchrun ends the others. A rank still alive at its turn prints it too.

    Args:
        environment: The launch environment. None if torchrun's variables cannot be read.
    """
    status = 130 if isinstance(error, KeyboardInterrupt) else 1
    text = describe(error)
    if environment is not None and environment.is_torchrun:
        _await_turn(error, environment, status)
        _write_error_file(text)
    prefix = "" if environment is None or environment.rank == 0 else f"rank {environment.rank}: "
    print(f"{prefix}{text}", file=sys.stderr, flush=True)
    # Not sys.exit: a peer may wait in a collective that this rank will never join, and torch would wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def describe(error: BaseException) -> str:
    """Return the message for a TrainerError or a failing file system, and the traceback for any other error."""
    if isinstance(error, TrainerError) or (isinstance(error, OSError) and error.filename is not None):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted before the first iteration. Nothing was saved."
    return "".join(traceback.format_exception(error)).rstrip()


def _await_turn(error: BaseException, environment: Environment, status: int) -> None:
    """Wait while another rank on this host may end first. End silently if torchrun sends SIGTERM meanwhile."""

    def end(_number: int, _frame: FrameType | None) -> None:
        os._exit(status)

    turns = 2 if isinstance(error, TrainerError) and error.is_echo else int(environment.local_rank > 0)
    if turns:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, end)
        time.sleep(turns * _TURN_S)


def _write_error_file(text: str) -> None:
    """Write the message to torchrun's error file, for its report (torch/distributed/elastic/multiprocessing/errors)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        times = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the message is printed too
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": times}}))
