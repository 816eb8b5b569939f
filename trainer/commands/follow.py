"""Run a command on every checkpoint of a run: `reprise follow RUN [options] -- COMMAND {}`.

`{}` in the command is the folder or the URL of a checkpoint, which is held meanwhile: no retention deletes it. Each
checkpoint gets one line in `follow.jsonl` in the folder of the run, when its command has ended; where RUN is the URL of
a mirrored run, in the current folder. The exit status is 0, also after
SIGINT or SIGTERM; 1 where a command failed or a checkpoint could not be opened; 2 where the run cannot be followed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import json
import logging
import os
import re
import secrets
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from reprise import json_file
from reprise.errors import ConfigError, TrainerError
from reprise.files import FILE_SYSTEM, exists, files_of, is_dir, is_file, is_store_url, is_stored, read_regular
from reprise.folder import (
    OPTIMIZER_DROPPED,
    STATE,
    STILL_MIRRORED,
    WEIGHTS,
    CheckpointFolder,
    FolderLock,
    ManifestVersion,
    is_locked,
    manifest_version,
    shown_name,
    take_hold,
)
from reprise.json_file import Json, dumps, finite_number
from reprise.reading import Checkpoint, LoadSource, no_folder, open_checkpoint, read_content, saved_lineage
from trainer.commands.arguments import amount, any_path, natural, positive
from trainer.compare.evaluations import FOLLOW
from trainer.compare.read import METRICS_FILE
from trainer.config.saved import RUN_CONFIG
from trainer.metrics.log_file import JsonLines

FINE, FAILED, IMPOSSIBLE = 0, 1, 2
PLACE = "{}"
_MOST_LINE_BYTES = 1 << 20  # of a JSON object in a command's output
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG, prctl(2)
_FOLDER_S, _STORE_S = 2.0, 30.0  # between two looks
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_libc = ctypes.CDLL(None)

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Follow a run and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    border = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options, command = parser.parse_args(words[:border]), words[border + 1 :]
    if not any(PLACE in word for word in command):
        parser.error(f"expected a command with {PLACE} for the folder of a checkpoint: -- COMMAND {PLACE}")
    logging.basicConfig(format="reprise follow: %(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with Commands() as commands:
            return _follow(options, command, commands)
    except TrainerError as error:
        print(f"reprise follow: {error}", file=sys.stderr)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"reprise follow: {error.filename or options.run}: {error.strerror}", file=sys.stderr)
    return IMPOSSIBLE


def _follow(options: argparse.Namespace, command: Sequence[str], runner: Commands) -> int:
    run: Path = options.run
    poll_s = options.poll_seconds if options.poll_seconds is not None else _STORE_S if is_stored(run) else _FOLDER_S
    if not is_stored(run) and run.name == "checkpoints" and exists(run.parent / METRICS_FILE):
        run = run.parent
    if options.once and not is_dir(run):
        raise no_folder(run, kind="run")
    if not is_dir(run):
        _log.info("waiting for %s", run)
    while not is_dir(run):
        if runner.is_stopped:
            return FINE
        runner.pause(poll_s)
    folder = Path.cwd() if is_stored(run) else run
    stem = f"{FOLLOW}.{options.name}" if options.name else FOLLOW
    lock = FolderLock(folder, secrets.token_hex(4), kind=f"{stem}.jsonl", another="another --name", name=f"{stem}.lock")
    with lock, lock, FollowLog.open(folder / f"{stem}.jsonl", check=lock.check) as log:
        choice = Choice(options.every, options.first, weights=options.weights)
        follower = Follower(run, command, log, runner, choice=choice, metric=options.json_metric)
        return follower.follow(once=options.once, poll_s=poll_s)


@dataclass(frozen=True, slots=True)
class Choice:
    """The iterations to run the command on: multiples of `every` from `first` on, of the light saves if `weights`."""

    every: int = 1
    first: int = 0
    weights: bool = False

    def admits(self, iteration: int) -> bool:
        """Return whether an iteration is among them."""
        return iteration >= self.first and iteration % self.every == 0


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The end of a command.

    Args:
        status: its exit status; for a command ended by a signal, the negative number of the signal.
        result: the last line of its output to be a JSON object; None without.
    """

    status: int
    seconds: float
    result: Json | None = None


class FollowLog:
    """The record of a follower: a line for each checkpoint, durable before the next command begins.

    Attributes:
        digests: of the manifests of the checkpoints with a line.
    """

    def __init__(self, descriptor: int, digests: set[str], check: Callable[[], None]) -> None:
        self._descriptor, self.digests, self._check = descriptor, digests, check

    @staticmethod
    @contextlib.contextmanager
    def open(path: Path, *, check: Callable[[], None] = lambda: None) -> Iterator[FollowLog]:
        """Open the record, and cut a last line left without its end by a killed follower.

        Args:
            check: called before each line; raises where another follower has taken the record over.

        Raises:
            DataError: if a line is no JSON object.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            data = read_regular(path)
            end = data.rfind(b"\n") + 1
            if end < len(data):
                os.ftruncate(descriptor, end)
            os.fsync(descriptor)
            FILE_SYSTEM.sync_folder(path.parent)
            records = JsonLines(io.BytesIO(data[:end]), path).records()
            yield FollowLog(descriptor, {str(record.get("digest")) for _, record in records}, check)
        finally:
            os.close(descriptor)

    def append(self, record: Json) -> None:
        """Append the line of a checkpoint, whole and durable.

        Raises:
            LockError: if another follower has taken the record over.
            OSError: if the disk fails; no part of the line stays.
        """
        self._check()
        data, size = f"{dumps(record)}\n".encode(), os.fstat(self._descriptor).st_size
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # the next start cuts it
                os.ftruncate(self._descriptor, size)
            raise
        self.digests.add(record["digest"])


class Follower:
    """Runs a command on each checkpoint of a run, in order, one at a time.

    A checkpoint is known by the digest of its manifest: an iteration saved again after a rewind is another. One whose
    optimizer's state was dropped is the same.

    Args:
        run: the folder or the URL of the run.
        metric: the number of the command's result to store, a key or keys joined by dots; None for none.
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
        self._digests: dict[str, tuple[ManifestVersion, str]] = {}  # by checkpoint
        self._problems: dict[str, str] = {}  # by checkpoint
        self._newest: tuple[Path, bool] | None = None  # in a store, and whether its run goes on, as the log says

    def follow(self, *, once: bool = False, poll_s: float = 2.0) -> int:
        """Follow the run to its last iteration, or until the runner is stopped, and return the exit status.

        Args:
            once: end when every present checkpoint has its line.
            poll_s: seconds between two looks at the folder.

        Raises:
            ConfigError: if the command cannot be started.
            OSError: if a hold or a line cannot be written; a store that is away is waited for.
        """
        while not self._runner.is_stopped:
            try:
                is_last_look = once or self._is_run_over()  # before the look: the last save may come in between
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
                _log.warning("%s: %s; the follower tries again", error.filename, error.strerror)
                self._runner.pause(poll_s)
        return FINE

    def _folder(self, *, weights: bool) -> CheckpointFolder:
        root = LoadSource.named(self._run).path
        return CheckpointFolder(root / WEIGHTS if weights else root, FILE_SYSTEM)

    def _next(self) -> Path | None:
        """Return the first checkpoint without a line."""
        folder = self._folder(weights=self._choice.weights)
        for path in map(folder.iteration, filter(self._choice.admits, folder.committed())):
            digest = self._digest(path)
            if digest is not None and digest not in self._log.digests:
                return path
        return None

    def _digest(self, path: Path) -> str | None:
        """Return the digest of a checkpoint's manifest; None if the checkpoint fails to open."""
        key, cached = manifest_version(path), self._digests.get(path.name)
        if key is None:
            return None
        if cached is not None and cached[0] == key:
            return cached[1]
        checkpoint = self._open(path)
        if checkpoint is None:
            return None
        self._digests[path.name] = key, _digest_of(checkpoint)
        return self._digests[path.name][1]

    def _open(self, path: Path) -> Checkpoint | None:
        """Open a checkpoint; None after a failure, which is logged. The next look tries again."""
        try:
            checkpoint = open_checkpoint(path, files_of(path))
        except TrainerError as error:
            self._digests.pop(path.name, None)
            if exists(path):  # else retention was faster
                self._problem(path, f"cannot be opened: {error}")
            return None
        self._problems.pop(path.name, None)
        return checkpoint

    def _evaluate(self, path: Path) -> None:
        """Hold a checkpoint, run the command on it, and write its line."""
        hold = take_hold(path)
        if hold is None:
            _log.info("%s was deleted before it could be held", shown_name(path))
            return
        try:
            checkpoint = self._open(path)
            if checkpoint is None or _digest_of(checkpoint) in self._log.digests or not hold.is_in_place():
                return
            command = [word.replace(PLACE, str(path)) for word in self._command]
            _log.info("%s: %s", shown_name(path), shlex.join(command))
            outcome = self._runner.run(command)
            if self._runner.is_stopped:
                return
            if hold.is_in_place():
                self._log.append(self._record(checkpoint, command, outcome))
            else:
                _log.warning("%s was renamed while the command read it: its result is dropped", shown_name(path))
        finally:
            hold.release()

    def _record(self, checkpoint: Checkpoint, command: list[str], outcome: CommandOutcome) -> Json:
        branches = saved_lineage(checkpoint.state, where=checkpoint.path).branches
        record: Json = {
            "iteration": checkpoint.iteration,
            "checkpoint": shown_name(checkpoint.path),
            "branch": branches[-1].id if branches else None,
            "branches": [asdict(branch) for branch in branches],
            "digest": _digest_of(checkpoint),
            "command": command,
            "status": outcome.status,
            "seconds": round(outcome.seconds, 3),
            "result": outcome.result,
        }
        if outcome.status != 0:
            self._problem(checkpoint.path, f"is done: its command ended with status {outcome.status}")
        if self._metric is not None:
            record |= {"metric": self._metric, "value": number_at(outcome.result, self._metric)}
            if record["value"] is None:
                _log.warning("%s: the command's last JSON line has no number %s", record["checkpoint"], self._metric)
        return record

    def _is_run_over(self) -> bool:
        """Return whether the newest checkpoint has the run's last iteration, and no light save is under way."""
        folder = self._folder(weights=False)
        committed = folder.committed()
        if not committed:
            return False
        path = folder.iteration(committed[-1])
        goes_on = is_file(folder.root / STILL_MIRRORED) if is_stored(folder.root) else False
        try:
            state, train = _json_at(path / STATE), _json_at(path / RUN_CONFIG)["config"]["train"]
            samples = train.get("train_samples")
            is_at_end: bool = (
                state["iteration"] >= train["train_iters"] if samples is None else state["consumed_samples"] >= samples
            )
        except (TrainerError, LookupError, TypeError, AttributeError):  # of a program that has no last iteration
            is_at_end = False
        if is_stored(folder.root):
            if self._newest != (path, goes_on) and not is_at_end:
                event = "waiting for the next" if goes_on else "its run has stopped: waiting for its next start"
                _log.info("%s is the newest checkpoint; %s", shown_name(path), event)
            self._newest = path, goes_on
            return is_at_end and not goes_on
        return is_at_end and not (self._choice.weights and is_locked(folder.root / WEIGHTS))

    def _problem(self, path: Path, problem: str) -> None:
        """Note the problem of a checkpoint, and log a new one."""
        if self._problems.get(path.name) != problem:
            self._problems[path.name] = problem
            _log.warning("%s %s", shown_name(path), problem)


def _digest_of(checkpoint: Checkpoint) -> str:
    """Return the digest of a checkpoint's manifest, of a lighter checkpoint that of the one before it."""
    dropped = checkpoint.state.get(OPTIMIZER_DROPPED)
    return checkpoint.digest if dropped is None else str(dropped["manifest_xxh3_64"])


def _json_at(path: Path) -> Json:
    """Return a JSON file of a checkpoint in a folder or a store."""
    if not is_stored(path):
        return json_file.read(path)
    try:
        return json_file.parse(read_content(path, files_of(path)), where=path)
    except FileNotFoundError:  # deleted meanwhile
        return {}


def number_at(result: object, name: str) -> float | None:
    """Return the number under a key of nested objects, keys joined by dots; None without a finite number there.

    A key with dots of its own is tried unchanged.
    """
    if not isinstance(result, dict):
        return None
    if name in result:
        try:
            return finite_number(result[name])
        except ValueError:
            return None
    for dot in (match.start() for match in re.finditer(r"\.", name)):
        number = number_at(result.get(name[:dot]), name[dot + 1 :])
        if number is not None:
            return number
    return None


class Commands:
    """Runs commands and waits between them, until SIGINT or SIGTERM. Main thread.

    The signal is passed on as SIGTERM to the running command; a second signal kills the command. A command dies with a
    killed follower.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[int, object] = {}
        self.is_stopped = False

    def __enter__(self) -> Commands:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def pause(self, seconds: float) -> None:
        """Wait, or until a signal."""
        select.select([self._reader], [], [], seconds)

    def run(self, command: Sequence[str]) -> CommandOutcome:
        """Run a command to its end, in a session of its own; its output goes on to the output of this process.

        Raises:
            ConfigError: if the command cannot be started.
        """
        start, result = self._clock(), None
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            raise ConfigError("A command cannot be started", where=command[0], found=error.strerror) from error
        with process:
            try:
                self._process = process
                if self.is_stopped:  # the signal came before there was a process to end
                    self._end(signal.SIGTERM)
                assert process.stdout is not None
                for line in iter(partial(process.stdout.readline, _MOST_LINE_BYTES), b""):
                    print(line.decode(errors="backslashreplace"), end="", flush=True)
                    result = _json_object(line) or result
                status = process.wait()
            finally:
                self._end(signal.SIGKILL)  # of a command that has not ended, because of an error here
                self._process = None
        return CommandOutcome(status, self._clock() - start, result)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        number = signal.SIGKILL if self.is_stopped else signal.SIGTERM
        self.is_stopped = True
        self._end(number)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def _die_with_parent() -> None:
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _json_object(line: bytes) -> Json | None:
    if not line.lstrip().startswith(b"{"):
        return None
    try:
        value = json.loads(line)
        json_file.require_depth(value)  # else no line of the record could hold it
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", text):
        raise argparse.ArgumentTypeError("must be letters, digits, - and _")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reprise follow",
        usage=f"reprise follow RUN [options] -- COMMAND {PLACE}",
        description="Run a command on every checkpoint of a run, from the first to the last that there will be.",
    )
    parser.add_argument(
        "run", type=any_path, metavar="RUN", help="the folder or the URL of the run, which may not exist yet"
    )
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="only multiples of N (%(default)s)")
    parser.add_argument(
        "--from", type=natural, default=0, dest="first", metavar="N", help="only from iteration N on (%(default)s)"
    )
    parser.add_argument("--weights", action="store_true", help="the light saves in place of the checkpoints")
    parser.add_argument(
        "--json-metric", metavar="NAME", help="store this number of the last JSON line of the output, for compare-loss"
    )
    parser.add_argument(
        "--name", type=_name, help="keep a record of its own, follow.NAME.jsonl, beside other followers"
    )
    parser.add_argument("--once", action="store_true", help="end after the checkpoints that are there")
    parser.add_argument(
        "--poll-seconds",
        type=amount,
        metavar="S",
        help=f"between two looks at the folder ({_FOLDER_S:g}), or at the store ({_STORE_S:g})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
