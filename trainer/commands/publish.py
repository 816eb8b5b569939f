"""Send a run's metrics to a tracker: `reprise publish RUN --to TRACKER [--follow]`.

The exit status is 0 when the tracker has every line, 1 when it cannot be reached or refuses the run, 2 when the run
cannot be published.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from reprise.errors import DataError, LockError
from reprise.storage import exists
from trainer.commands.arguments import existing_folder
from trainer.commands.frame import BAD, FINE, framed
from trainer.config.logging import TRACKERS
from trainer.metrics.json_lines import METRICS
from trainer.publish.publisher import Publisher, publish
from trainer.publish.tracker import load_tracker

_INTERVAL_S, _MOST_WAIT_S = 5.0, 60.0
_LEAST_PRIORITY = 19
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def send(options: argparse.Namespace) -> int:
    """Publish the run, and return the exit status."""
    logging.getLogger("trainer.publish").setLevel(logging.INFO)
    if options.until_input_ends:
        os.nice(_LEAST_PRIORITY)
    if options.follow:
        with _pausing(until_input_ends=options.until_input_ends) as pause:
            return _publish(options, pause)
    return _publish(options, lambda _: False)


def _publish(options: argparse.Namespace, pause: Callable[[float], bool]) -> int:
    if not options.follow and not exists(options.run / METRICS):
        raise DataError("The folder is not a run folder", where=options.run, expected=METRICS)
    tracker = load_tracker(options.to)
    title = options.name or options.run.resolve().name
    while True:
        try:
            sender = Publisher(options.run, options.to, tracker, project=options.project, title=title)
            break
        except LockError:  # a killed launch's publisher may still be sending its last lines
            if not options.until_input_ends or not pause(1.0):
                raise
    with closing(sender):
        error = publish(sender, tracker, pause)
    if error is not None:
        print(f"reprise publish: the tracker does not take the run: {error!r}", file=sys.stderr)
        return BAD
    place = f" in {tracker.place}" if tracker.place else ""
    print(f"the remote run is {sender.remote_id or 'not started'}{place}")
    return FINE


@contextmanager
def _pausing(*, until_input_ends: bool) -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits between checks of the log, until a signal arrives or the input ends."""
    read, write = os.pipe()
    inputs = [read, *([sys.stdin.fileno()] if until_input_ends else [])]

    def wait(times: float) -> bool:
        ready, _, _ = select.select(inputs, [], [], min(_INTERVAL_S * times, _MOST_WAIT_S))
        return not ready

    for number in _SIGNALS:
        signal.signal(number, lambda *_: os.write(write, b"\n"))
    try:
        yield wait
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=existing_folder, help="run folder")
    parser.add_argument("--to", metavar="TRACKER", required=True, choices=tuple(TRACKERS), help=", ".join(TRACKERS))
    parser.add_argument("--project", default="reprise", help="the tracker's project or experiment (%(default)s)")
    parser.add_argument("--name", help="the remote run's name; default: the folder's name")
    parser.add_argument(
        "--follow", action="store_true", help="keep sending while the run trains, until SIGTERM or Ctrl-C"
    )
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)


main = framed(send, _add_arguments, form="%(asctime)s %(message)s")
