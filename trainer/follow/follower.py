"""Runs a command on each checkpoint, in order and one at a time, and records each in `follow.jsonl`."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reprise.errors import TrainerError
from reprise.format import STATE, STILL_MIRRORED, saved_lineage
from reprise.loading import Checkpoint, LoadSource, no_folder, open_checkpoint, read_content
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
from trainer.follow.runner import CommandOutcome, Commands, number_at
from trainer.metrics.json_lines import METRICS, read_records

FINE, FAILED, IMPOSSIBLE = 0, 1, 2
PLACE = "{}"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """Selects iterations for the command: multiples of `every` from `first` on. `weights`: weights-only saves."""

    every: int = 1
    first: int = 0
    weights: bool = False

    def admits(self, iteration: int) -> bool:
        """Return whether an iteration is chosen."""
        return iteration >= self.first and iteration % self.every == 0


class FollowLog:
    """A follower's log: a line per checkpoint, durable before the next command starts.

    Args:
        check: Called before each line. Raises if another follower has taken over the log.

    Attributes:
        digests: The manifest digests for checkpoints with a line.

    Raises:
        DataError: A line is not a JSON object. A torn last line is truncated instead.
    """

    def __init__(self, path: Path, *, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.ftruncate(self._descriptor, read_regular(path).rfind(b"\n") + 1)
            os.fsync(self._descriptor)
            FILE_SYSTEM.sync_folder(path.parent)
            self.digests = {str(record.get("digest")) for record in read_records(path)}
        except (OSError, TrainerError):
            os.close(self._descriptor)
            raise

    def __enter__(self) -> FollowLog:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def append(self, record: Json) -> None:
        """Append a checkpoint's line, complete and durable.

        Raises:
            LockError: Another follower has taken over the log.
            OSError: The disk fails. The next start truncates a partial line.
        """
        self._check()
        data = f"{dumps(record)}\n".encode()
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)
        self.digests.add(record["digest"])


class Follower:
    """Runs a command on each of a run's checkpoints.

    A checkpoint is identified by its manifest digest: an iteration saved again after a rewind is a new checkpoint.
    Dropping its optimizer state does not change a checkpoint's identity.

    Args:
        run: The run's folder or URL.
        metric: The key in the command's result whose number is stored, keys joined by dots. None stores none.
    """

    def __init__(
        self,
        run: Path,
        command: Sequence[str],
        log: FollowLog,
        runner: Commands,
        *,
        choice: Choice = Choice(),
        metric: str | None = None,
    ) -> None:
        self._run, self._command, self._log, self._runner = run, command, log, runner
        self._choice, self._metric = choice, metric
        self._done: dict[str, ManifestVersion] = {}  # versions of checkpoints with a line, by name
        self._problems: dict[str, str] = {}  # by checkpoint name
        self._newest: tuple[Path, bool] | None = None  # in a store: newest checkpoint, whether its run continued

    def follow(self, *, once: bool = False, poll_s: float = 2.0) -> int:
        """Follow the run until its last iteration, or until the runner is stopped. Return the exit status.

        Args:
            once: Return once every existing checkpoint has its line.
            poll_s: Seconds between checks for new checkpoints.

        Raises:
            ConfigError: The command cannot be started.
            OSError: A hold or a line cannot be written. An unreachable store is retried instead, unless `once` is set.
        """
        while not self._runner.is_stopped:
            try:
                is_last_look = once or self._is_run_over()  # before `_next`, as the last save may commit in between
                path = self._next()
                if path is not None:
                    self._evaluate(path)
                elif is_last_look:
                    return FAILED if self._problems else FINE
                else:
                    self._runner.pause(poll_s)
            except OSError as error:
                if once or error.errno == errno.EACCES or not is_store_url(str(error.filename)):
                    raise
                _log.warning("%s: %s; the follower will retry", error.filename, error.strerror)
                self._runner.pause(poll_s)
        return FINE

    def _folder(self, *, weights: bool) -> CheckpointFolder:
        root = LoadSource.named(self._run).path
        return CheckpointFolder(root / WEIGHTS if weights else root, FILE_SYSTEM)

    def _next(self) -> Path | None:
        """Return the first checkpoint without a line, or None."""
        folder = self._folder(weights=self._choice.weights)
        for path in map(folder.iteration, filter(self._choice.admits, folder.committed())):
            version = manifest_version(path)
            if version is None or self._done.get(path.name) == version:
                continue
            checkpoint = self._open(path)
            if checkpoint is not None and checkpoint.digest not in self._log.digests:
                return path
            if checkpoint is not None:
                self._done[path.name] = version
        return None

    def _open(self, path: Path) -> Checkpoint | None:
        """Open a checkpoint. Log a failure and return None; the next check tries again."""
        try:
            return open_checkpoint(path, files_of(path))
        except TrainerError as error:
            if exists(path):  # otherwise retention has deleted it
                self._problem(path, f"cannot be opened: {error}")
            return None

    def _evaluate(self, path: Path) -> None:
        """Hold a checkpoint, run the command on it, and append its line."""
        hold = None if is_stored(path) else Hold.take(path)  # in a store, nothing protects a checkpoint
        try:
            version = manifest_version(path)
            if version is None:
                _log.info("%s was deleted before it could be held", shown_name(path))
                return
            checkpoint = self._open(path)
            if checkpoint is None or checkpoint.digest in self._log.digests or manifest_version(path) != version:
                return
            self._problems.pop(path.name, None)
            command = [word.replace(PLACE, str(path)) for word in self._command]
            _log.info("%s: %s", shown_name(path), shlex.join(command))
            outcome = self._runner.run(command)
            if self._runner.is_stopped:
                return
            if manifest_version(path) == version:
                self._log.append(self._record(checkpoint, command, outcome))
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
        continues = is_stored(path) and is_file(folder.root / STILL_MIRRORED)
        try:
            state, train = _json_at(path / STATE), _json_at(path / RUN_CONFIG)["config"]["train"]
            samples = train.get("train_samples")
            is_at_end: bool = (
                state["iteration"] >= train["train_iters"] if samples is None else state["consumed_samples"] >= samples
            )
        except (TrainerError, LookupError, TypeError, AttributeError):  # another program's, without a last iteration
            is_at_end = False
        if not is_stored(path):
            return is_at_end and not (self._choice.weights and is_locked(folder.root / WEIGHTS))
        if self._newest != (path, continues) and not is_at_end:
            event = (
                "waiting for the next checkpoint" if continues else "the run has stopped: waiting for it to start again"
            )
            _log.info("%s is the newest checkpoint; %s", shown_name(path), event)
        self._newest = path, continues
        return is_at_end and not continues

    def _problem(self, path: Path, problem: str) -> None:
        """Remember a checkpoint's problem, and log it if it is new."""
        if self._problems.get(path.name) != problem:
            self._problems[path.name] = problem
            _log.warning("%s %s", shown_name(path), problem)


def _json_at(path: Path) -> Json:
    """Return a checkpoint's JSON file, from a folder or a store. Empty if the file was deleted."""
    try:
        return json_file.parse(read_content(path, files_of(path)), where=path)
    except FileNotFoundError:  # deleted in the meantime
        return {}


def follow_run(
    run: Path,
    command: Sequence[str],
    runner: Commands,
    *,
    choice: Choice,
    metric: str | None,
    name: str | None,
    once: bool,
    poll_s: float,
) -> int:
    """Wait for a run, follow it, and return the exit status. See `Follower`.

    Args:
        name: A suffix for the log's name, to tell followers apart.

    Raises:
        TrainerError: The run cannot be followed.
        OSError: As in `Follower.follow`.
    """
    if not is_stored(run) and run.name == "checkpoints" and exists(run.parent / METRICS):
        run = run.parent
    if once and not is_dir(run):
        raise no_folder(run, kind="run")
    if not is_dir(run):
        _log.info("waiting for %s", run)
    while not is_dir(run):
        if runner.is_stopped:
            return FINE
        runner.pause(poll_s)
    folder = Path.cwd() if is_stored(run) else run
    stem = f"{FOLLOW}.{name}" if name else FOLLOW
    lock = FolderLock(folder, secrets.token_hex(4), kind=f"{stem}.jsonl", another="another --name", name=f"{stem}.lock")
    with lock, FollowLog(folder / f"{stem}.jsonl", check=lock.check) as log:
        return Follower(run, command, log, runner, choice=choice, metric=metric).follow(once=once, poll_s=poll_s)
