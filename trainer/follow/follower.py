"""Runs a command on each checkpoint, in order and one at a time, and records each in `follow.jsonl`."""

from __future__ import annotations

import errno
import logging
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import sleep

from reprise.errors import TrainerError
from reprise.format import STATE, STILL_MIRRORED, saved_lineage
from reprise.loading import Checkpoint, LoadSource, no_folder, open_checkpoint
from reprise.storage import (
    FILE_SYSTEM,
    WEIGHTS,
    CheckpointFolder,
    FolderLock,
    Hold,
    Json,
    dumps,
    exists,
    is_dir,
    is_file,
    is_locked,
    json_file,
    read_regular,
    shown_name,
)
from reprise.stores import ManifestVersion, files_of, is_store_url, is_stored, manifest_version
from trainer.compare.evaluations import FOLLOW
from trainer.config.saved import RUN_CONFIG
from trainer.follow.runner import CommandOutcome, number_at, run_command
from trainer.metrics.json_lines import METRICS, read_records

PLACE = "{}"
_log = logging.getLogger(__name__)


class Follower:
    """Runs a command on each of a run's checkpoints.

    A checkpoint is identified by its manifest digest: an iteration saved again after a rewind is a new checkpoint.
    Dropping its optimizer state does not change a checkpoint's identity.

    Args:
        run: The run's folder or URL. For a checkpoint folder, its run is followed.
        every, first: Only multiples of `every` from iteration `first` on are chosen.
        weights: Whether to follow the weights-only saves.
        metric: The key in the command's result whose number is stored, keys joined by dots. None stores none.
    """

    def __init__(
        self,
        run: Path,
        command: Sequence[str],
        *,
        every: int = 1,
        first: int = 0,
        weights: bool = False,
        metric: str | None = None,
    ) -> None:
        is_of_checkpoints = not is_stored(run) and run.name == "checkpoints" and exists(run.parent / METRICS)
        self._run, self._command = run.parent if is_of_checkpoints else run, command
        self._every, self._first, self._weights, self._metric = every, first, weights, metric
        self._done: dict[str, ManifestVersion] = {}  # versions of checkpoints with a line, by name
        self._problems: dict[str, str] = {}  # by checkpoint name

    def follow(self, *, name: str | None = None, once: bool = False, poll_s: float = 2.0) -> bool:
        """Wait for the run, and follow it until its last iteration. Return whether all went well.

        Args:
            name: A suffix for the log's name, to tell followers apart.
            once: Return once every existing checkpoint has its line.
            poll_s: Seconds between checks for new checkpoints.

        Raises:
            TrainerError: The run cannot be followed, or the command cannot be started.
            OSError: A hold or a line cannot be written. An unreachable store is retried instead, unless `once` is set.
        """
        if once and not is_dir(self._run):
            raise no_folder(self._run, kind="run")
        if not (is_stored(self._run) or is_dir(self._run)):
            _log.info("waiting for %s", self._run)
        while not (is_stored(self._run) or is_dir(self._run)):
            sleep(poll_s)
        folder, stem = Path.cwd() if is_stored(self._run) else self._run, f"{FOLLOW}.{name}" if name else FOLLOW
        lines, nonce = f"{stem}.jsonl", secrets.token_hex(4)
        self._lock = FolderLock(folder, nonce, another="another --name", name=f"{stem}.lock")
        with self._lock:
            self._open_log(folder / lines)
            while True:
                try:
                    is_last_look = once or self._is_run_over()  # before `_next`: the last save may commit in between
                    chosen = self._next()
                    if chosen is not None:
                        self._evaluate(*chosen)
                    elif is_last_look:
                        return not self._problems
                    else:
                        sleep(poll_s)
                except OSError as error:
                    if once or error.errno == errno.EACCES or not is_store_url(str(error.filename)):
                        raise
                    _log.warning("%s: %s; the follower will retry", error.filename, error.strerror)
                    sleep(poll_s)

    def _open_log(self, path: Path) -> None:
        """Truncate a torn last line in the log, and read which checkpoints have a line."""
        with path.open("ab") as file:
            file.truncate(read_regular(path).rfind(b"\n") + 1)
        FILE_SYSTEM.sync_folder(path.parent)
        self._path, self._digests = path, {str(record.get("digest")) for record in read_records(path)}

    def _append(self, record: Json) -> None:
        """Append a checkpoint's line, complete and durable, unless another follower has taken over the log."""
        self._lock.check()
        with self._path.open("ab") as file:
            file.write(f"{dumps(record)}\n".encode())
            file.flush()
            FILE_SYSTEM.sync(file.fileno())
        self._digests.add(record["digest"])

    def _folder(self, *, weights: bool) -> CheckpointFolder:
        root = LoadSource.named(self._run).path
        return CheckpointFolder(root / WEIGHTS if weights else root, FILE_SYSTEM)

    def _next(self) -> tuple[Checkpoint, ManifestVersion] | None:
        """Return the first checkpoint without a line, and its version, or None.

        The problem of a checkpoint that cannot be opened is logged. The next call tries again.
        """
        folder = self._folder(weights=self._weights)
        for iteration in folder.committed():
            if iteration < self._first or iteration % self._every:
                continue
            path = folder.iteration(iteration)
            version = self._version(path)
            if version is None or self._done.get(path.name) == version:
                continue
            try:
                checkpoint = open_checkpoint(path, files_of(path))
            except TrainerError as error:
                if exists(path):  # otherwise retention has deleted it
                    self._problem(path, f"cannot be opened: {error}")
                continue
            if checkpoint.digest not in self._digests:
                return checkpoint, version
            self._done[path.name] = version
        return None

    def _evaluate(self, checkpoint: Checkpoint, version: ManifestVersion) -> None:
        """Hold a checkpoint, run the command on it, and append its line."""
        path = checkpoint.path
        hold = None if is_stored(path) else Hold.take(path)  # in a store, nothing protects a checkpoint
        try:
            if self._version(path) != version:
                _log.info("%s was deleted or replaced before it could be held", shown_name(path))
                return
            self._problems.pop(path.name, None)
            command = [word.replace(PLACE, str(path)) for word in self._command]
            _log.info("%s: %s", shown_name(path), shlex.join(command))
            outcome = run_command(command)
            if self._version(path) == version:
                self._append(self._record(checkpoint, command, outcome))
            else:
                _log.warning("%s was renamed while the command read it: the result is discarded", shown_name(path))
        finally:
            if hold is not None:
                hold.release()

    def _record(self, checkpoint: Checkpoint, command: list[str], outcome: CommandOutcome) -> Json:
        branches = saved_lineage(checkpoint.state, where=checkpoint.path).branches
        record: Json = {
            "iteration": checkpoint.iteration,
            "checkpoint": shown_name(checkpoint.path),
            "branch": branches[-1].id if branches else None,
            "branches": [asdict(branch) for branch in branches],
            "digest": checkpoint.digest,
            "command": command,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "result": outcome.result,
        }
        if outcome.status != 0:
            self._problem(checkpoint.path, f"will not be tried again: its command exited with status {outcome.status}")
        if self._metric is not None:
            record |= {"metric": self._metric, "value": number_at(outcome.result, self._metric)}
            if record["value"] is None:
                _log.warning(
                    "%s: the last JSON line of the command's output has no number %s",
                    record["checkpoint"],
                    self._metric,
                )
        return record

    def _is_run_over(self) -> bool:
        """Return whether the newest checkpoint is the run's last, and no weights-only save is in progress."""
        folder = self._folder(weights=False)
        committed = folder.committed()
        if not committed:
            return False
        path = folder.iteration(committed[-1])
        try:
            state, train = _json_at(path / STATE), _json_at(path / RUN_CONFIG)["config"]["train"]
            samples = train.get("train_samples")
            is_at_end: bool = (
                state["iteration"] >= train["train_iters"] if samples is None else state["consumed_samples"] >= samples
            )
        except (TrainerError, LookupError, TypeError, AttributeError):  # another program's, without a last iteration
            return False
        if is_stored(path):
            return is_at_end and not is_file(folder.root / STILL_MIRRORED)
        return is_at_end and not (self._weights and is_locked(folder.root / WEIGHTS))

    def _version(self, path: Path) -> ManifestVersion | None:
        """Return a checkpoint's version, or None without one. A folder's failed read is logged, and tried again."""
        try:
            return manifest_version(path)
        except OSError as error:
            if is_stored(path):
                raise
            if path.name not in self._done:
                self._problem(path, f"cannot be read: {error.strerror}")
            return None

    def _problem(self, path: Path, problem: str) -> None:
        """Remember a checkpoint's problem, and log it if it is new."""
        if self._problems.get(path.name) != problem:
            self._problems[path.name] = problem
            _log.warning("%s %s", shown_name(path), problem)


def _json_at(path: Path) -> Json:
    """Return a checkpoint's JSON file, from a folder or a store. Empty if the file was deleted."""
    try:
        return json_file.parse(files_of(path).read_whole(path), where=path)
    except FileNotFoundError:  # deleted in the meantime
        return {}
