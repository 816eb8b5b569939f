"""The lineage of a run: its branches, by which a start tells its own checkpoints from others. Pure.

The first branch begins with the run, and its random id is the id of the run. A start from an earlier iteration begins
another branch there: later saves of earlier branches are given up. Every checkpoint records the lineage of its run at
the save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from reprise.errors import CheckpointError
from reprise.storage import json_file
from reprise.storage.json_file import Json, integer

LINEAGE = "run"  # the member of trainer_state.json
FORMAT = "reprise-run/1"
FRESH = -1  # where a branch begins that starts from initial values


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a run.

    Args:
        id: random, unique among all branches of all runs.
        began_at: the iteration from which it goes on. For the first branch of a run, up to which checkpoints without a
            lineage, of an earlier version of this program, belong to the run.
    """

    id: str
    began_at: int


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint of another run at the begin of a run.

    Args:
        run: its run; None without a lineage.
    """

    run: str | None
    iteration: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """The branches of a run, oldest first; none for an unknown run.

    Args:
        launch: the names of the newest launch whose command set where the run begins; a restart of it resumes.
    """

    branches: tuple[Branch, ...] = ()
    parent: Parent | None = None
    launch: tuple[str, ...] = field(default=(), compare=False)

    @property
    def run(self) -> str | None:
        """Return the id of the run."""
        return self.branches[0].id if self.branches else None

    def extends(self, earlier: Lineage) -> bool:
        """Return whether this is `earlier`, perhaps with further branches."""
        return self.branches[: len(earlier.branches)] == earlier.branches

    def admits(self, saved: Lineage, iteration: int) -> bool:
        """Return whether a start may go on from a checkpoint with the lineage `saved`.

        It may if the checkpoint is of this run, and no later branch has given up its iteration. An extension of this
        lineage has branches unknown to the start.
        """
        later = self.branches[len(saved.branches) :]
        return saved.extends(self) or (self.extends(saved) and all(iteration <= branch.began_at for branch in later))

    def after_start(self, branch: Branch, *, newest_known: int) -> Lineage:
        """Return the lineage of a run after a start from the first iteration of `branch`.

        Args:
            newest_known: the newest iteration saved by the run, though perhaps not all of it is left.
        """
        if newest_known <= branch.began_at:
            return self
        return replace(self, branches=(*self.branches, branch))

    def record(self) -> Json:
        """Return the JSON form."""
        branches = [{"id": branch.id, "began_at": branch.began_at} for branch in self.branches]
        parent = self.parent
        return {
            "branches": branches,
            **({"parent": {"run": parent.run, "iteration": parent.iteration}} if parent else {}),
            **({"launch": list(self.launch)} if self.launch else {}),
        }

    @staticmethod
    def from_record(table: Mapping[str, object]) -> Lineage:
        """Return the lineage in its JSON form.

        Raises:
            LookupError, TypeError, ValueError: if it is malformed.
        """
        listed, origin, launch = table["branches"], table.get("parent"), table.get("launch", [])
        if not isinstance(listed, list) or not listed:
            raise TypeError(f"branches are {listed!r}")
        branches = tuple(Branch(_text(member["id"]), _iteration(member["began_at"])) for member in listed)
        if not isinstance(launch, list) or not (origin is None or isinstance(origin, Mapping)):
            raise TypeError(f"the parent is {origin!r}, the launch {launch!r}")
        run = None if origin is None or origin["run"] is None else _text(origin["run"])
        parent = None if origin is None else Parent(run, integer(origin["iteration"]))
        return Lineage(branches, parent, tuple(map(_text, launch)))

    def to_bytes(self) -> bytes:
        """Return the content of a `run.json`."""
        return json_file.sealed({"format": FORMAT, **self.record()})

    @staticmethod
    def from_bytes(data: bytes, *, where: object) -> Lineage:
        """Return the lineage in a `run.json`.

        Raises:
            MismatchError: if it has another format version.
            CheckpointError: if it is damaged or malformed.
        """
        return json_file.unsealed(data, Lineage.from_record, kind="record of a run", form=FORMAT, where=where)


def saved_lineage(state: Json, *, where: object) -> Lineage:
    """Return the lineage in a `trainer_state.json`; without branches if an earlier version has written it.

    Raises:
        CheckpointError: if it is malformed.
    """
    if LINEAGE not in state:
        return Lineage()
    try:
        return Lineage.from_record(state[LINEAGE])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError("A state file has no lineage of its run", where=where, found=repr(error)) from error


def newest_lineage(lineages: Iterable[Lineage]) -> Lineage:
    """Return the lineage with the most branches: the others were recorded before its last ones began."""
    return max(lineages, key=lambda lineage: len(lineage.branches), default=Lineage())


def _iteration(value: object) -> int:
    return FRESH if type(value) is int and value == FRESH else integer(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is no id")
    return value
