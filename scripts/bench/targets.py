"""The figures with a target, and whether they meet it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.bench import ranks
from scripts.bench.rounds import ROUND, Figure, Rounds
from scripts.bench.training import BackToBack, Trained
from scripts.bench.ways import AT_ONCE, BACKGROUND, DIRECT, INLINE, LIBRARY, LIBRARY_FIRST, RAW

HEAD = ("", "figure", "measured", "target", "result")


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A figure and its upper bound; without a bound it is only shown."""

    letter: str
    name: str
    measured: float | None
    most: float | None = None
    unit: str = ""

    def row(self) -> list[str]:
        """Return the cells of a table."""
        figure = "-" if self.measured is None else f"{self.measured:.5g}{self.unit}"
        bound = "" if self.most is None else f"<= {self.most:g}{self.unit}"
        return [self.letter, self.name, figure, bound, self.result]

    @property
    def result(self) -> str:
        """Return whether the bound is met, in a word."""
        if self.most is None or self.measured is None:
            return ""
        return "met" if self.measured <= self.most else "MISSED"


def of_rounds(results: Rounds, *, total_bytes: int) -> list[BenchTarget]:
    """Return the figures of the rounds of all ways."""
    peak, disk = results.median(BACKGROUND, Figure.PEAK_BYTES), results.median(INLINE, Figure.DISK_BYTES)
    warm = results.ratio(INLINE, Figure.LOAD, ROUND, Figure.WARM_READ)
    blocked = Figure.REPORTED_BLOCKED
    return [
        BenchTarget("a", "inline save / raw write", results.ratio(INLINE, Figure.DURABLE, RAW, Figure.DURABLE), 0.85),
        BenchTarget("a", "inline save / direct write", results.ratio(INLINE, Figure.DURABLE, DIRECT, Figure.DURABLE)),
        BenchTarget(
            "b",
            "load with digests / raw read, fresh memory",
            results.ratio(INLINE, Figure.LOAD, RAW, Figure.LOAD),
            0.55,
        ),
        BenchTarget("b", "load with digests / raw read, used memory", warm),
        BenchTarget(
            "c",
            "blocked, step after the write / one copy",
            results.ratio(BACKGROUND, blocked, ROUND, Figure.COPY),
            0.10,
        ),
        BenchTarget("d", "blocked, step at once / one copy", results.ratio(AT_ONCE, blocked, ROUND, Figure.COPY), 1.3),
        BenchTarget(
            "d", "AsyncSaver: call and step / one copy", results.ratio(LIBRARY, Figure.BLOCKED, ROUND, Figure.COPY)
        ),
        BenchTarget(
            "d", "the same, prepared first save", results.ratio(LIBRARY_FIRST, Figure.BLOCKED, ROUND, Figure.COPY)
        ),
        BenchTarget(
            "e", "cost to training / raw write", results.ratio(BACKGROUND, Figure.COST, RAW, Figure.DURABLE), 0.3
        ),
        BenchTarget("g", "peak memory / staging memory", None if peak is None else peak / total_bytes, 1.1),
        BenchTarget("h", "bytes on disk / bytes of tensors", None if disk is None else disk / total_bytes, 1.0005),
    ]


def of_training(trained: Trained) -> list[BenchTarget]:
    """Return the figures of training with a save in every iteration."""
    return [
        BenchTarget("f", "iteration with a save each / without", trained.ratio, 1.15),
        BenchTarget("f", "iteration without saves", trained.quiet_s, unit=" s"),
        BenchTarget("f", "iteration with a save each", trained.saving_s, unit=" s"),
    ]


def of_back_to_back(saves: BackToBack) -> list[BenchTarget]:
    """Return the figures of back-to-back saves."""
    return [
        BenchTarget("d", "saves back to back: blocked", saves.blocked_s, unit=" s"),
        BenchTarget("d", "saves back to back: wait for the previous one", saves.waited_s, unit=" s"),
        BenchTarget("d", "saves back to back: durable", saves.seconds, unit=" s"),
    ]


def of_growth(grown_bytes: int, *, saves: int) -> list[BenchTarget]:
    """Return the memory growth over many saves; a process's memory varies by some pages."""
    return [BenchTarget("g", f"memory grown from save 2 to {saves}", grown_bytes / 1e6, 1.0, " MB")]


def of_ranks(by_topology: Mapping[str, ranks.Rounds]) -> list[BenchTarget]:
    """Return the figures of two ranks, by topology."""
    most = {"zero3": 1.15, "tp2": 1.3}
    most_digesting = {"zero0": 0.06}
    targets = []
    for name, rounds in by_topology.items():
        where = f"{ranks.RANKS} ranks, {name}"
        targets += [
            BenchTarget(
                "i", f"{where}: inline save / raw write", _ratio(rounds, ranks.INLINE, ranks.RAW), most.get(name)
            ),
            BenchTarget("i", f"{where}: first inline save / raw write", _ratio(rounds, ranks.FIRST, ranks.RAW)),
            BenchTarget("i", f"{where}: background save / raw write", _ratio(rounds, ranks.BACKGROUND, ranks.RAW)),
            BenchTarget("i", f"{where}: blocked / raw write", _ratio(rounds, ranks.BLOCKED, ranks.RAW)),
            BenchTarget("i", f"{where}: load with digests / raw read", _ratio(rounds, ranks.LOAD, ranks.READ)),
            BenchTarget(
                "i", f"{where}: digests of replicas", _median(rounds, ranks.REPLICAS), most_digesting.get(name), " s"
            ),
            BenchTarget("i", f"{where}: raw write", _median(rounds, ranks.RAW), unit=" s"),
        ]
    return targets


def _median(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    return statistics.median(row[figure] for row in rounds)


def _ratio(rounds: Sequence[Mapping[str, float]], figure: str, base: str) -> float:
    return statistics.median(row[figure] / row[base] for row in rounds)
