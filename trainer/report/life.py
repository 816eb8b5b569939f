"""A run's life as events: launches, kills, saves, evaluations and followers' measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy

import reprise
from reprise import CheckpointStatus
from reprise.errors import TrainerError, count_of
from reprise.storage import Json, is_locked
from trainer.compare.evaluations import read_evaluations
from trainer.compare.text_table import duration
from trainer.metrics.json_lines import LATEST
from trainer.report.history import SAVES, TIME, History, LaunchSpan, events_of, sum_of


class LifeEvent(NamedTuple):
    """An event in a run's life.

    Args:
        time: Unix time.
        kind: `launch`, `end`, `kill`, `save`, `evaluation`, `spike` or `measurement`.
        state: A save's state, such as `kept` or `pruned`. Empty for other events.
    """

    time: float
    kind: str
    iteration: int
    text: str
    state: str = ""


_STATES = {
    CheckpointStatus.WHOLE: "kept",
    CheckpointStatus.PART: "kept in part",
    CheckpointStatus.DAMAGED: "damaged",
    CheckpointStatus.UNREADABLE: "unreadable",
    CheckpointStatus.UNCHECKED: "kept, not checked",
}


def _checkpoints(folder: Path) -> dict[int, tuple[str, int]]:
    """Return the state and size of each checkpoint in a run's folder, without reading tensors."""
    try:
        summaries = [summary for summary in reprise.list(folder) if not summary.is_superseded]
    except (TrainerError, OSError):  # no saves, or saves in another folder
        return {}
    return {
        summary.iteration: (
            "kept, held" if summary.is_pinned and summary.status is CheckpointStatus.WHOLE else _STATES[summary.status],
            summary.total_bytes,
        )
        for summary in summaries
        if summary.iteration is not None
    }


def life_of(history: History) -> list[LifeEvent]:
    """Return a run's events in time order."""
    checkpoints = _checkpoints(history.folder)
    absence = "pruned" if checkpoints else "elsewhere"
    saves = [_save_event(event, checkpoints, absence) for event in events_of([history.log], *SAVES)]
    events = [*_launch_events(history), *saves]
    events += [_save_event(event, {}, "given up") for event in events_of(history.abandoned, *SAVES)]
    for event in events_of(history.logs, "spike", "evaluation"):
        is_spike = event["event"] == "spike"
        text = f"{event.get('figure')} {event.get('value')}" if is_spike else f"valid loss {event.get('valid_loss')}"
        events.append(LifeEvent(sum_of(event, "time"), event["event"], _iteration(event), text))
    events += _measurements(history.folder, {save.iteration: save.time for save in saves})
    return sorted((event for event in events if 0 < event.time <= LATEST), key=lambda event: event.time)


def _save_event(event: Json, checkpoints: dict[int, tuple[str, int]], absence: str) -> LifeEvent:
    iteration, kind = _iteration(event), event["event"]
    blocked = sum_of(event, "blocked_seconds", "waited_seconds")
    state, size = checkpoints.get(iteration, (absence, 0))
    state, size = state if kind == "save" else kind.removesuffix("_save"), size or int(sum_of(event, "written_bytes"))
    text = f"{state}, {megabytes(size)}, {sum_of(event, 'seconds'):.2f} s, blocked {blocked:.3f} s"
    return LifeEvent(sum_of(event, "time"), "save", iteration, text, state)


def megabytes(size: int) -> str:
    """Format a size in bytes with a decimal unit."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"


def _iteration(event: Json) -> int:
    value = event.get("iteration")
    return value if isinstance(value, int) else 0


def _launch_events(history: History) -> Iterator[LifeEvent]:
    reached = 0
    for number, launch in enumerate(history.launches, start=1):
        after = first_iteration(launch)
        back = f", {count_of(reached - after, 'iteration')} back" if after < reached else ""
        texts = [f"launch {number} on {topology_text(launch)}", f"started in {launch.start_seconds:.1f} s"]
        begin = "from the beginning" if after == 0 else f"resumed from iteration {after}{back}"
        yield LifeEvent(launch.began, "launch", after, ", ".join([*texts, begin]))
        reached = last_iteration(history, launch)
        is_last = number == len(history.launches)
        yield LifeEvent(launch.ended, *_end_of(launch, reached, is_running=is_last and is_in_use(history.folder)))


def _end_of(launch: LaunchSpan, reached: int, *, is_running: bool) -> tuple[str, int, str]:
    lasted = f"after {duration(launch.ended - launch.began)}"
    if launch.end is not None:
        reason = launch.end.get("reason")
        return "end", reached, f"{launch.end.get('outcome')} {lasted}" + (f": {reason}" if reason else "")
    if is_running:
        return "end", reached, f"is running, or was killed, {lasted}"
    if not launch.record:  # an older version, which recorded no ends
        return "end", reached, f"last line {lasted}"
    return "kill", reached, f"killed {lasted}"


def is_in_use(folder: Path) -> bool:
    """Return whether a run may write to a folder: its lock is held, or was left by a kill."""
    return any(map(is_locked, (folder, folder / "checkpoints")))


def first_iteration(launch: LaunchSpan) -> int:
    """Return the last iteration before a launch."""
    if launch.record:
        return _iteration(launch.record)
    return _iteration(launch.first) - 1 if launch.first else 0


def last_iteration(history: History, launch: LaunchSpan) -> int:
    """Return the last iteration in a launch, or the last before it."""
    last = first_iteration(launch)
    for log in history.logs:
        times = log.columns.column(TIME)
        inside = log.columns.iterations[(times >= launch.began) & (times <= launch.ended + 0.002)]
        last = max([last, *map(int, inside[-1:].tolist())])
    return last


def topology_text(launch: LaunchSpan) -> str:
    """Describe a launch's rank count and parallel axes."""
    topology = launch.record.get("topology")
    if not isinstance(topology, dict):
        return "ranks not recorded"
    ranks = topology.get("world_size", 1)
    names = ("dp", "replicate", "tp", "pp", "vpp")
    axes = [f"{name}={topology[name]}" for name in names if topology.get(name, 1) != 1]
    zero = [f"zero_stage={topology['zero_stage']}"] if topology.get("dp", 1) != 1 and "zero_stage" in topology else []
    return " ".join([f"{ranks} rank{'s' * (ranks != 1)}", *axes, *zero])


def _measurements(folder: Path, saved_at: dict[int, float]) -> Iterator[LifeEvent]:
    for name, series in read_evaluations(folder).items():
        for iteration, value in series.items():
            yield LifeEvent(saved_at.get(iteration, 0.0), "measurement", iteration, f"{name} {value:.6g}")


def life_rows(events: Sequence[LifeEvent], *, most: int) -> list[list[str]]:
    """Return the last events as table rows, starting with the header."""
    head = ["time (UTC)", "event", "iteration", "details"]
    return [head, *([clock(event.time), event.kind, str(event.iteration), event.text] for event in events[-most:])]


def clock(time: float) -> str:
    """Format a Unix time as a UTC date and time."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S}"


def progress_lines(history: History, *, most: int) -> list[tuple[list[float], list[float], bool]]:
    """Return progress lines: for each launch its times and iterations, and whether they were abandoned.

    Args:
        most: The most points per line. Points are picked evenly.
    """
    lines = []
    for number, log in enumerate(history.logs):
        iterations, times = log.columns.iterations, log.columns.column(TIME)
        for launch in history.launches:
            inside = numpy.flatnonzero((times >= launch.began) & (times <= launch.ended + 0.002))
            if inside.size:
                even = numpy.unique(numpy.linspace(0, inside.size - 1, min(most, inside.size)).astype(int))
                chosen = inside[even]
                lines.append((times[chosen].tolist(), iterations[chosen].tolist(), number > 0))
    return lines
