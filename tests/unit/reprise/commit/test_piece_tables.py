"""Tables of pieces travel once; the digests of later saves fall into the same order, also over a faulty store."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.commit import channel as channel_module
from reprise.commit import messages
from reprise.commit.attempt import Attempt, Hosts, SharedCommitState
from reprise.commit.channel import StoreChannel
from reprise.commit.commit_state import Outcome
from reprise.commit.inventory import Inventory
from reprise.commit.piece_tables import PieceTables, Tiling
from reprise.commit.protocol import TwoPhaseCommit
from reprise.errors import CheckpointError, TrainerError
from reprise.format import manifest
from reprise.format.box import Box
from reprise.format.dtype import StoredDtype
from reprise.format.layout import Layout, TensorKind, TensorSpec, build_layout
from reprise.format.manifest import TensorEntry, Written, WrittenPiece
from reprise.format.report import RankReport, decode, encode
from reprise.storage.files import Files
from reprise.storage.folder import CheckpointFolder
from tests.profiles import examples
from tests.turns import Fault, FaultyStore, Turns

EMPTY, MATRIX = (
    TensorSpec(TensorKind.MODEL, name, shape, StoredDtype.F32, shape) for name, shape in (("e", (0,)), ("w", (4, 2)))
)
LAYOUT = build_layout([EMPTY, MATRIX])
HALVES = (
    [WrittenPiece("w", Box((0, 0), (2, 2)), 8, 16, b"upper-hi")],
    [
        WrittenPiece("w", Box((2, 0), (2, 2)), 0, 16, b"lower---"),
        WrittenPiece("w", Box((0, 0), (2, 2)), 0, 8, b"upper-lo"),
    ],
)
ROWS = tuple([WrittenPiece("w", Box((2 * half, 0), (2, 2)), 0, 16, b"%-8d" % half)] for half in range(2))
Divided = tuple[list[WrittenPiece], list[WrittenPiece]]


class Ranks:
    """Two ranks that save through the messages of a commit."""

    def __init__(self) -> None:
        self.tables = (PieceTables(), PieceTables())

    def reports(self, divided: Divided, layout: Layout = LAYOUT) -> dict[int, RankReport]:
        """Return the reports of the ranks, as they arrive."""
        reports = {}
        for rank, pieces in enumerate(divided):
            report = RankReport(7, digests=b"".join(piece.digests for piece in pieces))
            message = self.tables[rank].pack(report, encode(pieces, layout)).to_bytes()
            reports[rank] = RankReport.from_bytes(message)
        return reports

    def save(self, divided: Divided, layout: Layout = LAYOUT) -> dict[str, manifest.TensorEntry]:
        """Return the tensors of the manifest of a committed attempt."""
        reports = self.reports(divided, layout)
        tensors = self.tables[0].tiling(layout, reports).tensors([report.digests for report in reports.values()])
        self.end(is_committed=True)
        return tensors

    def end(self, *, is_committed: bool) -> None:
        """End an attempt on all ranks."""
        for tables in self.tables:
            tables.ended(is_committed=is_committed)


def redigested(divided: Divided, mark: bytes) -> Divided:
    """Return the same pieces with other digests."""
    first, second = ([replace(piece, digests=mark + piece.digests[1:]) for piece in pieces] for pieces in divided)
    return first, second


@pytest.mark.parametrize("divided", [HALVES, ROWS])
def test_every_save_has_the_entries_of_its_own_digests(divided: Divided) -> None:
    ranks = Ranks()
    for mark in (b"1", b"2", b"3"):
        pieces = redigested(divided, mark)
        assert ranks.save(pieces) == manifest.tile(LAYOUT, [piece for part in pieces for piece in part])


def test_a_table_travels_again_only_when_it_has_changed() -> None:
    ranks = Ranks()
    ranks.save(HALVES)
    assert not any(report.table for report in ranks.reports(HALVES).values())
    ranks.end(is_committed=True)
    assert all(report.table for report in ranks.reports(ROWS).values())


def test_a_later_report_is_small_beside_its_digests() -> None:
    ranks = Ranks()
    ranks.save(HALVES)
    for report in ranks.reports(HALVES).values():
        assert len(report.to_bytes()) - len(report.digests) <= 100


def test_an_attempt_that_is_not_committed_delivers_no_table() -> None:
    ranks = Ranks()
    ranks.save(HALVES)
    ranks.reports(HALVES)
    ranks.end(is_committed=False)
    assert all(report.table for report in ranks.reports(HALVES).values())


def test_an_attempt_without_an_end_delivers_no_table() -> None:
    ranks = Ranks()
    ranks.save(HALVES)
    ranks.reports(HALVES)
    assert all(report.table for report in ranks.reports(HALVES).values())


def test_a_table_that_rank_0_lacks_commits_nothing() -> None:
    ranks = Ranks()
    ranks.save(HALVES)
    ranks.save(ROWS)
    reports = {rank: replace(report, table=b"") for rank, report in Ranks().reports(HALVES).items()}
    with pytest.raises(CheckpointError, match="has not arrived at rank 0"):
        ranks.tables[0].tiling(LAYOUT, reports)
    assert ranks.save(HALVES) == manifest.tile(LAYOUT, [piece for part in HALVES for piece in part])


def test_other_tensors_under_the_same_table_are_checked_again() -> None:
    ranks = Ranks()
    ranks.save(ROWS)
    taller = build_layout([EMPTY, replace(MATRIX, shape=(6, 2), view=(6, 2))])
    with pytest.raises(CheckpointError, match="do not cover a tensor"):
        ranks.save(ROWS, taller)


@pytest.mark.parametrize("digests", [b"", bytes(16)])
def test_a_rank_has_one_digest_for_each_of_its_blocks(digests: bytes) -> None:
    ranks = Ranks()
    reports = ranks.reports(ROWS)
    with pytest.raises(CheckpointError, match="not one digest for each"):
        ranks.tables[0].tiling(LAYOUT, reports).tensors([reports[0].digests, digests])


def test_each_piece_belongs_to_the_rank_that_wrote_it() -> None:
    tiling = Tiling.of(LAYOUT, [encode(pieces, LAYOUT) for pieces in HALVES])
    assert tiling.writers({"e": 4, "w": 4}) == {"e": (), "w": (1, 0, 1)}


def test_a_table_without_digests_decodes_to_bare_pieces() -> None:
    assert [piece.digests for piece in decode(encode(HALVES[1], LAYOUT), b"lower---", LAYOUT)] == [b"lower---", b""]


SERIES_RANKS = 3
PATIENCE_S = 0.3
# An attempt has ended on all ranks by then: two waits for a message on rank 0, two on another rank after its report.
PERIOD_S = 2.0
# Faults after which a process goes on: those that end one also end the run, and its tables with it.
FAULTS = [Fault.DROPS, Fault.REPEATS, Fault.FAILS, Fault.LATE]
LINE = build_layout([TensorSpec(TensorKind.MODEL, "w", (6,), StoredDtype.F32, (6,))])
# Ways to divide a tensor of six elements among the ranks, by where each begins.
DIVISIONS = [(0, 2, 4), (0, 1, 5), (0, 3, 3)]


@dataclass(frozen=True)
class Series:
    """What happens in a series of attempts.

    Args:
        divisions: how the tensor is divided in each attempt, by number in `DIVISIONS`.
        broken: the attempts and ranks whose writing fails.
        faults: what a rank's call of the store, by number, meets. The last attempt meets none.
    """

    seed: int
    divisions: Sequence[int]
    broken: frozenset[tuple[int, int]]
    faults: Mapping[tuple[int, int], Fault]


SERIES = st.builds(
    Series,
    st.integers(0, 2**32),
    st.lists(st.integers(0, len(DIVISIONS) - 1), min_size=2, max_size=4),
    st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, SERIES_RANKS - 1)), max_size=1),
    st.dictionaries(
        st.tuples(st.integers(0, SERIES_RANKS - 1), st.integers(1, 40)), st.sampled_from(FAULTS), max_size=3
    ),
)


def pieces_of(rank: int, number: int, division: int) -> list[WrittenPiece]:
    """Return the pieces of a rank in an attempt; their digests name both."""
    starts = (*DIVISIONS[division], 6)
    lo, hi = starts[rank], starts[rank + 1]
    digest = f"{number:4d}{rank:4d}".encode()
    return [WrittenPiece("w", Box((lo,), (hi - lo,)), 0, 4 * (hi - lo), digest)] if hi > lo else []


@dataclass
class Steps:
    """What a rank does in an attempt; nothing of it is on a disk."""

    history: History
    rank: int
    number: int

    def write(self) -> Written:
        if (self.number, self.rank) in self.history.told.broken and self.number < self.history.last:
            raise CheckpointError("There is no room")
        pieces = pieces_of(self.rank, self.number, self.history.told.divisions[self.number])
        return Written(pieces, sum(piece.hi - piece.lo for piece in pieces))

    def inventory(self) -> Inventory:
        return Inventory(LINE, [], {})

    def json_files(self, tensors: Mapping[str, TensorEntry]) -> dict[str, bytes]:
        self.history.tensors[self.number] = dict(tensors)
        return {}

    def prepare(self, files: Mapping[str, bytes]) -> None:
        return

    def rename(self) -> None:
        self.history.committed.append(self.number)


@dataclass
class History:
    """What came of a series of attempts: the tensors of each manifest, the committed ones, and the outcomes."""

    told: Series
    folder: Path
    tensors: dict[int, dict[str, TensorEntry]] = field(default_factory=dict)
    committed: list[int] = field(default_factory=list)
    outcomes: dict[tuple[int, int], Outcome | None] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """Return the number of the last attempt."""
        return len(self.told.divisions) - 1

    def run(self) -> None:
        """Let all ranks make their attempts."""
        turns = Turns(self.told.seed, limit_s=PERIOD_S * (self.last + 2))
        faults = dict(self.told.faults)
        store = FaultyStore(turns, faults, stops_at=None, dies_at=None)

        def save(rank: int) -> None:
            channel = StoreChannel(store.of(rank), rank, world_size=SERIES_RANKS, timeout_s=PATIENCE_S)
            tables = PieceTables()
            for number in range(self.last + 1):
                turns.sleep(max(0.0, number * PERIOD_S - turns.monotonic()))
                if number == self.last:
                    faults.clear()
                self._attempt(channel, number, tables)

        tasks = [turns.add(f"rank {rank}", rank, lambda rank=rank: save(rank)) for rank in range(SERIES_RANKS)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channel_module, "time", turns)
            turns.run()
        assert [task.error for task in tasks] == [None] * SERIES_RANKS
        assert all(task.is_over for task in tasks)

    def _attempt(self, channel: StoreChannel, number: int, tables: PieceTables) -> None:
        attempt = Attempt(7, f"n-{number}", CheckpointFolder(self.folder, Files()), LINE, Hosts.shared(SERIES_RANKS))
        shared = SharedCommitState(channel.rank, range(SERIES_RANKS))
        try:
            TwoPhaseCommit(channel, attempt, shared, Steps(self, channel.rank, number), tables).run()
            messages.delete_reports(channel, attempt)
        except TrainerError:
            pass
        self.outcomes[channel.rank, number] = shared.current.outcome


def history_of(told: Series) -> History:
    """Let a series happen, and hold each manifest to what the ranks wrote in its own attempt."""
    with tempfile.TemporaryDirectory() as folder:
        history = History(told, Path(folder))
        history.run()
    for number, tensors in history.tensors.items():
        pieces = [piece for rank in range(SERIES_RANKS) for piece in pieces_of(rank, number, told.divisions[number])]
        assert tensors == manifest.tile(LINE, pieces)
    assert history.committed == sorted(set(history.committed))
    assert set(history.committed) <= set(history.tensors)
    assert history.committed[-1:] == [history.last]
    assert [history.outcomes[rank, history.last] for rank in range(SERIES_RANKS)] == [Outcome.COMMITTED] * SERIES_RANKS
    return history


@given(SERIES)
@examples(60)
def test_each_manifest_has_the_pieces_of_its_own_save(told: Series) -> None:
    history_of(told)


@pytest.mark.slow
@pytest.mark.nightly
@given(SERIES)
@examples(3000)
def test_each_manifest_is_its_own_in_thousands_of_series(told: Series) -> None:
    history_of(told)


def test_without_faults_every_attempt_is_committed() -> None:
    assert history_of(Series(1, [0, 0, 1, 0], frozenset(), {})).committed == [0, 1, 2, 3]


@pytest.mark.parametrize("rank", range(SERIES_RANKS))
def test_a_table_sent_with_a_failed_attempt_is_sent_again(rank: int) -> None:
    assert history_of(Series(1, [0, 1, 1], frozenset({(1, rank)}), {})).committed == [0, 2]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_single_fault_of_a_rank_spoils_a_later_save(fault: Fault) -> None:
    for rank in range(SERIES_RANKS):
        for call in range(1, 12):
            history_of(Series(call, [0, 1, 1], frozenset(), {(rank, call): fault}))
