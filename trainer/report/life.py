"""A run's life as events: launches, kills, saves and evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import numpy

import reprise
from reprise.errors import TrainerError, count_of
from reprise.storage import is_locked
from trainer.compare.text_table import duration
from trainer.metrics.json_lines import time_of
from trainer.report.history import SAVES, TIME, History, events_of, sum_of


class LifeEvent(NamedTuple):
    """An event in a run's life.

    Args:
        time: Unix time.
        kind: `launch`, `end` or a key in `MARKS`.
    """

    time: float
    kind: str
    iteration: int
    text: str


def life_of(history: History) -> list[LifeEvent]:
    """Return a run's events in time order."""
    events = [*_launch_events(history), *_saves(history)]
    for event in events_of(history.logs, "spike", "evaluation"):
        is_spike = event["event"] == "spike"
        text = f"{event.get('figure')} {event.get('value')}" if is_spike else f"valid loss {event.get('valid_loss')}"
        events.append(LifeEvent(time_of(event) or 0.0, event["event"], event["iteration"], text))
    return sorted((event for event in events if event.time), key=lambda event: event.time)


def _saves(history: History) -> Iterator[LifeEvent]:
    """Yield the saves, and whether the run's folder still has them."""
    try:
        summaries = [summary for summary in reprise.list(history.folder, check=0) if not summary.is_superseded]
        iterations = {summary.iteration for summary in summaries if summary.path.parent == summary.folder}
    except (TrainerError, OSError):  # no saves, or saves in another folder
        iterations = set()
    for log in history.logs:
        for event in events_of([log], *SAVES):
            kind = event["event"].replace("_", " ")
            kind += " kept" if kind == "save" and log is history.log and event["iteration"] in iterations else ""
            blocked = sum_of(event, "blocked_seconds", "waited_seconds")
            size, seconds = sum_of(event, "written_bytes") / 1e6, sum_of(event, "seconds")
            text = f"{size:,.1f} MB by rank 0, {seconds:.2f} s, blocked {blocked:.3f} s"
            yield LifeEvent(time_of(event) or 0.0, kind, event["iteration"], text)


def _launch_events(history: History) -> Iterator[LifeEvent]:
    reached = 0
    for number, launch in enumerate(history.launches, start=1):
        after = launch.record["iteration"]
        back = f", {count_of(reached - after, 'iteration')} back" if after < reached else ""
        texts = [f"launch {number} on {launch.topology}", f"started in {launch.start_seconds:.1f} s"]
        begin = "from the beginning" if after == 0 else f"resumed from iteration {after}{back}"
        yield LifeEvent(launch.began, "launch", after, ", ".join([*texts, begin]))
        reached = max([after, *(log.columns.iterations[launch.places(log)].max(initial=0) for log in history.logs)])
        lasted = f"after {duration(launch.ended - launch.began)}"
        kind, text = "kill", f"killed {lasted}"
        if launch.end is not None:
            reason = launch.end.get("reason")
            kind, text = "end", f"{launch.end.get('outcome')} {lasted}" + (f": {reason}" if reason else "")
        elif number == len(history.launches) and any(map(is_locked, (history.folder, history.folder / "checkpoints"))):
            kind, text = "end", f"is running, or was killed, {lasted}"
        yield LifeEvent(launch.ended, kind, int(reached), text)


def life_rows(events: Sequence[LifeEvent], *, most: int) -> list[list[str]]:
    """Return the last events as table rows, starting with the header."""
    head = ["time (UTC)", "event", "iteration", "details"]
    rows = [(f"{datetime.fromtimestamp(event.time, UTC):%Y-%m-%d %H:%M:%S}", event) for event in events[-most:]]
    return [head, *([clock, event.kind, str(event.iteration), event.text] for clock, event in rows)]


def progress_lines(history: History, *, most: int) -> list[tuple[list[float], list[float], bool]]:
    """Return progress lines: for each launch its times and iterations, and whether they were abandoned.

    Args:
        most: The most points per line. Points are picked evenly.
    """
    lines = []
    for log in history.logs:
        for launch in history.launches:
            places = launch.places(log)
            if places.size:
                chosen = places[numpy.linspace(0, places.size - 1, min(most, places.size)).astype(int)]
                times, iterations = log.columns.column(TIME)[chosen], log.columns.iterations[chosen]
                lines.append((times.tolist(), iterations.tolist(), log is not history.log))
    return lines
