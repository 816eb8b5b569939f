"""A run's lineage: its branches, by which a start tells its own checkpoints from others. Pure.

The first branch starts with the run, and its random id is the run id. A start from an earlier iteration opens another
branch there: later saves on earlier branches are given up. Every checkpoint records its run's lineage at the save.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reprise.errors import CheckpointError
from reprise.storage import json_file
from reprise.storage.json_file import Json, integer

LINEAGE = "run"  # the member in trainer_state.json
FORMAT = "reprise-run/1"
FRESH = -1  # where a branch from initial values begins


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch within a run.

    Args:
        id: A random id, unique among all branches in all runs.
        began_at: The iteration from which it continues. For a run's first branch: the last iteration up to which
            checkpoints without a lineage, from an earlier version, belong to the run.
    """

    id: str
    began_at: int


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint from another run with which a run began.

    Args:
        run: Its run's id. None if it has no lineage.
    """

    run: str | None
    iteration: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run's branches, oldest first. Empty for an unknown run.

    Args:
        launch: The names for the newest launch whose command set the starting point. A restart of that launch resumes.
    """

    branches: tuple[Branch, ...] = ()
    parent: Parent | None = None
    launch: tuple[str, ...] = field(default=(), compare=False)

    @property
    def run(self) -> str | None:
        """Return the run id."""
        return self.branches[0].id if self.branches else None

    def extends(self, earlier: Lineage) -> bool:
        """Return whether this is `earlier`, possibly with further branches."""
        return self.branches[: len(earlier.branches)] == earlier.branches

    def admits(self, saved: Lineage, iteration: int) -> bool:
        """Return whether a start may continue from a checkpoint with the lineage `saved`.

        It may if the checkpoint belongs to this run, and no later branch has given up its iteration. A checkpoint whose
        lineage extends this one has branches unknown to the start.
        """
        later = self.branches[len(saved.branches) :]
        return saved.extends(self) or (self.extends(saved) and all(iteration <= branch.began_at for branch in later))

    def after_start(self, branch: Branch, *, newest_known: int) -> Lineage:
        """Return a run's lineage after a start from the first iteration in `branch`.

        Args:
            newest_known: The newest iteration the run has saved, even if its checkpoint is no longer complete.
        """
        if newest_known <= branch.began_at:
            return self
        return replace(self, branches=(*self.branches, branch))

    def record(self) -> Json:
        """Return the JSON form."""
        return {
            "branches": list(map(asdict, self.branches)),
            **({"parent": asdict(self.parent)} if self.parent else {}),
            **({"launch": list(self.launch)} if self.launch else {}),
        }

    @staticmethod
    def from_record(table: Mapping[str, Any]) -> Lineage:
        """Return the lineage from its JSON form.

        Raises:
            LookupError, TypeError, ValueError: It is malformed.
        """
        listed, origin, launch = table["branches"], table.get("parent"), table.get("launch", [])
        branches = tuple(Branch(_text(member["id"]), _iteration(member["began_at"])) for member in listed)
        if not branches or not isinstance(launch, list):
            raise TypeError(f"branches are {listed!r}, the launch is {launch!r}")
        run = None if origin is None or origin["run"] is None else _text(origin["run"])
        parent = None if origin is None else Parent(run, integer(origin["iteration"]))
        return Lineage(branches, parent, tuple(map(_text, launch)))


@dataclass(frozen=True, slots=True)
class Journal:
    """The content of a run's `run.json`, which each start writes, and each commit.

    Args:
        saved: the newest iteration saved for a resume; `FRESH` before the first save, None in a folder of local
            checkpoints and in a file of an earlier version.
    """

    lineage: Lineage = Lineage()
    saved: int | None = None

    def record(self) -> Json:
        """Return the JSON form."""
        return {**self.lineage.record(), **({} if self.saved is None else {"saved": self.saved})}

    @staticmethod
    def from_record(table: Json) -> Journal:
        """Return the journal in its JSON form.

        Raises:
            LookupError, TypeError, ValueError: if it is malformed.
        """
        saved = table.get("saved")
        return Journal(Lineage.from_record(table), None if saved is None else _iteration(saved))

    def to_bytes(self) -> bytes:
        """Return the `run.json` bytes."""
        return json_file.sealed({"format": FORMAT, **self.record()})

    @staticmethod
    def from_bytes(data: bytes, *, where: object) -> Journal:
        """Return the journal in a file.

        Raises:
            MismatchError: It has another format version.
            CheckpointError: It is damaged or malformed.
        """
        return json_file.unsealed(data, Journal.from_record, kind="record of a run", form=FORMAT, where=where)


def saved_lineage(state: Json, *, where: object) -> Lineage:
    """Return the lineage in a `trainer_state.json`; it has no branches if an earlier version wrote the file.

    Raises:
        CheckpointError: It is malformed.
    """
    if LINEAGE not in state:
        return Lineage()
    try:
        return Lineage.from_record(state[LINEAGE])
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            "The run lineage in the state file is missing or invalid", where=where, found=repr(error)
        ) from error


def newest_lineage(lineages: Iterable[Lineage]) -> Lineage:
    """Return the lineage with the most branches: the others were recorded before its last branches began."""
    return max(lineages, key=lambda lineage: len(lineage.branches), default=Lineage())


def _iteration(value: object) -> int:
    return FRESH if type(value) is int and value == FRESH else integer(value)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError(f"{value!r} is not an id")
    return value
