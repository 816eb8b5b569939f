"""Send the metrics of a run to a tracker: `reprise publish RUN --to TRACKER [--follow]`.

The exit status is 0 when the tracker has every line, 1 when it cannot be reached, 2 when the run cannot be published or
the tracker refuses it.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from reprise import json_file
from reprise.errors import DataError, LockError, TrainerError, count_of
from reprise.files import FILE_SYSTEM, exists, read_regular
from reprise.json_file import Json
from trainer.commands.arguments import amount, existing_folder
from trainer.config.compose import read_resolved
from trainer.config.logging import TRACKERS
from trainer.config.saved import is_secret
from trainer.metrics.jsonl_sink import METRICS
from trainer.publish.publisher import Publisher, flat
from trainer.publish.tracker import Tracker, load_tracker

FINE, UNREACHABLE, UNUSABLE = 0, 1, 2
_INTERVAL_S, _MOST_WAIT_S = 5.0, 60.0
_LEAST_PRIORITY = 19

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if options.until_input_ends:
        os.nice(_LEAST_PRIORITY)
    try:
        with ExitStack() as stack:
            return _publish(options, stack)
    except (TrainerError, OSError) as error:
        print(f"reprise publish: {error}", file=sys.stderr)
        return UNUSABLE


def _publish(options: argparse.Namespace, stack: ExitStack) -> int:
    """Publish what the command line names, and return the exit status."""
    if not options.follow and not exists(options.run / METRICS):
        raise DataError("The folder is not that of a run", where=options.run, expected=METRICS)
    tracker = load_tracker(options.to)
    name = options.name or options.run.resolve().name

    def publisher() -> Publisher:
        return Publisher(
            options.run,
            options.to,
            tracker,
            project=options.project,
            title=name,
            config=read_config,
            lineage=read_lineage,
            files=FILE_SYSTEM,
        )

    if not options.follow:
        return publish(stack.enter_context(closing(publisher())), tracker)
    pause = stack.enter_context(_Pause(options.interval, until_input_ends=options.until_input_ends))
    if options.until_input_ends:
        return follow(stack.enter_context(closing(_after_another(publisher, pause))), tracker, pause)
    return follow(stack.enter_context(closing(publisher())), tracker, pause)


def _after_another(publisher: Callable[[], Publisher], pause: Callable[[float], bool]) -> Publisher:
    """Return a publisher; that of a start before, whose run was killed, may still send its last lines."""
    while True:
        try:
            return publisher()
        except LockError:
            if not pause(1.0):
                raise


def publish(publisher: Publisher, tracker: Tracker) -> int:
    """Send what the tracker lacks, and return the exit status.

    Raises:
        DataError: if the tracker refuses the run.
    """
    try:
        publisher.collect()
        count = publisher.send()
        publisher.finish()
    except tracker.failures as error:
        if tracker.is_refusal(error):
            raise _refused(error) from error
        print(f"reprise publish: the tracker cannot be reached, try again later: {error!r}", file=sys.stderr)
        return UNREACHABLE
    name = ", ".join(publisher.remote_ids[-1:]) or "not begun"
    print(f"sent {count_of(count, 'line')}; the remote run is {name}{tracker.place and ' in '}{tracker.place}")
    return FINE


def _refused(error: Exception) -> DataError:
    return DataError("The tracker refuses the run", found=f"{type(error).__name__}: {error}")


def follow(publisher: Publisher, tracker: Tracker, pause: Callable[[float], bool]) -> int:
    """Send lines as a run writes them until `pause` returns False, then the last ones; return the exit status.

    Args:
        pause: waits for a multiple of the interval between looks at the log.

    Raises:
        DataError: if the tracker refuses the run from the start.
    """
    goes_on, failures, is_accepted = True, 0, False
    while goes_on:
        goes_on = pause(min(2.0**failures, 2.0**6))
        try:
            publisher.collect()
            publisher.send()
            if failures:
                _log.info("the tracker can be reached again")
            failures, is_accepted = 0, True
        except tracker.failures as error:
            is_refusal = tracker.is_refusal(error)
            if is_refusal and not is_accepted:
                raise _refused(error) from error
            if not failures:
                state = "refuses" if is_refusal else "cannot be reached"
                _log.warning("the tracker %s, its lines wait: %r", state, error)
            failures += 1
            publisher.reopen()
    return UNREACHABLE if failures else publish(publisher, tracker)


def read_config(run: Path) -> Json:
    """Return the configuration of a run by dotted keys, without secrets and values from environment variables."""
    sections, environment_keys = read_resolved(run / "config.yaml")
    return {k: value for k, value in flat(sections).items() if not is_secret(k) and k not in environment_keys}


def read_lineage(run: Path) -> list[str]:
    """Return the ids of a run's branches, none without a `run.json`; the first is that of the run."""
    path = run / "run.json"
    try:
        record = json_file.parse(read_regular(path, limit_bytes=json_file.MAX_BYTES), where=path)
        return [str(branch["id"]) for branch in record["branches"]]
    except (FileNotFoundError, LookupError, TypeError):
        return []


class _Pause:
    """Waits between looks at the log, until a signal or the end of the input ends the process in order."""

    def __init__(self, interval_s: float, *, until_input_ends: bool) -> None:
        self._interval_s = interval_s
        self._read, self._write = os.pipe()
        self._inputs = [self._read, *([sys.stdin.fileno()] if until_input_ends else [])]

    def __enter__(self) -> Callable[[float], bool]:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os.write(self._write, b"\n"))
        return self._wait

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def _wait(self, times: float) -> bool:
        ready, _, _ = select.select(self._inputs, [], [], min(self._interval_s * times, _MOST_WAIT_S))
        return not ready


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reprise publish",
        description="Send the metrics of a run to a tracker, each line once, whatever was killed or moved before.",
        epilog="Exit status: 0 the tracker has every line, 1 it cannot be reached, 2 it refuses the run.",
    )
    parser.add_argument("run", metavar="RUN", type=existing_folder, help="run folder")
    parser.add_argument("--to", metavar="TRACKER", required=True, choices=tuple(TRACKERS), help=", ".join(TRACKERS))
    parser.add_argument("--project", default="reprise", help="project or experiment of the tracker (%(default)s)")
    parser.add_argument("--name", default=None, help="name of the remote run; default: that of the folder")
    parser.add_argument("--follow", action="store_true", help="go on while the run trains, until SIGTERM or Ctrl-C")
    parser.add_argument(
        "--interval", type=amount, default=_INTERVAL_S, metavar="S", help="seconds between looks (%(default)g)"
    )
    parser.add_argument("--until-input-ends", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
