"""The frozen weights beneath adapters, loaded at every start of a run, and the sources of a load by their paths."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from models.adapters import base_of
from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.files import Files, Patience, failed_read
from reprise.folder import ADAPTERS, MANIFEST
from reprise.live_tensors import LiveTensor
from reprise.reading import Checkpoint, Chooser, LoadReport, LoadSource, check_tensors, fill, read_places
from reprise.savers import Restored
from trainer.config import terms
from trainer.config.schema import CheckpointSection, Verify
from trainer.interop.hf.folder import is_folder, open_folder, tensor_files
from trainer.interop.llmc.file import WEIGHTS, foreign
from trainer.interop.megatron.refuse import refuse_megatron
from trainer.interop.samples import digest_of_samples
from trainer.interop.source import refuse_adapters
from trainer.interop.start import WeightsKind, load_pretrained
from trainer.record import resume_rules, run_record
from trainer.record.compatibility import differences, settle
from trainer.run.build import Run
from trainer.run.fitting import Fit, Fitting
from trainer.run.state import checkpoint_specs

_log = logging.getLogger(__name__)

# Prefixes of the path in rank 0's message: a checkpoint, this run's own checkpoints, one iteration of a base, or other
# programs' weights.
NAMED, OWN, EXACT = b"c", b"o", b"e"
WEIGHTS_KINDS = {b"p": WeightsKind.folder, b"f": WeightsKind.file}
# A base may be a save of weights alone, in another dtype.
_FIT = Fit(casts=True)
_OWNERS = {WeightsKind.folder: "transformers", WeightsKind.file: "llm.c"}


def load_base(run: Run, adapters: LoadSource | None, *, with_local: bool = False) -> None:
    """Load the weights beneath the adapters, and add their identity to the description of the run. Collective.

    They are those of `checkpoint.base`, or of `checkpoint.load` with `finetune`. Their identity is a digest and no
    path: that of the manifest of a checkpoint, or that of the files of another program.

    Args:
        adapters: the source of the adapters, which were trained on one base; None where they begin now.
        with_local: whether local checkpoints are among the candidates of that source.

    Raises:
        TrainerError: on every rank, before a tensor is read, if they are not there, not of the configured model, or not
            the base of the adapters.
    """
    section = run.config.checkpoint
    path = Path(section.load if section.base is None else section.base)
    kind, source = _agree_on_base(run, path, adapters, with_local=with_local)
    live, model = list(run.state.base_shards()), base_of(run.config.model)
    if kind is not None:
        found = load_pretrained(source.path, kind, live, model, run.cluster, CheckpointSection(finetune=True), seed=0)
        log_load(run, found.report, "the base", source.path)
        identity: Mapping[str, object] = {"format": _OWNERS[kind], "xxh3_64": found.digest}
    else:
        restored, fitting = _load_checkpoint(run, source, live)
        log_load(run, restored.report, "the base", restored.checkpoint.path)
        for line in fitting.notes((), where=restored.checkpoint.path) if run.cluster.rank == 0 else ():
            _log.warning(line)
        identity = _identity(restored.checkpoint)
    run.description = {**run.description, "base": identity}


def _load_checkpoint(run: Run, source: LoadSource, live: Sequence[LiveTensor]) -> tuple[Restored, Fitting]:
    """Load the base from a checkpoint of ours, whose weights may have been saved in another dtype. Collective."""
    section = run.config.checkpoint
    fitting: Fitting | None = None

    def requests(checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        nonlocal fitting
        fitting = Fitting(_FIT, live, read_places(checkpoint))
        return fitting.requests

    restored = run.restorer.restore(
        source,
        check=lambda checkpoint: _check(run, checkpoint),
        live=requests,
        verify=section.verify is not Verify.none,
        verify_all=section.verify is Verify.full,
    )
    assert fitting is not None
    places = read_places(restored.checkpoint)
    fitting.finish(lambda tensor: fill(restored.checkpoint, places, [tensor]))
    return restored, fitting


def _agree_on_base(
    run: Run, path: Path, adapters: LoadSource | None, *, with_local: bool
) -> tuple[WeightsKind | None, LoadSource]:
    """Return the kind of other weights, None for a checkpoint, and their source, as rank 0 sees them. Collective."""
    problem: TrainerError | None = None
    choice = b""
    if run.cluster.rank == 0:
        try:
            choice = Patience().retry(lambda: named_source(path))
            if adapters is not None:
                choice = Patience().retry(lambda: _same_base(run, choice, adapters, with_local=with_local))
        except TrainerError as error:
            problem = error
        except OSError as error:
            problem = failed_read("The base cannot be read", error, where=path, fix="Correct checkpoint.base.")
    run.cluster.channel.agree("base", problem)
    choice = run.cluster.channel.broadcast("base/source", choice)
    return WEIGHTS_KINDS.get(choice[:1]), _base_source(run, choice)


def _base_source(run: Run, choice: bytes) -> LoadSource:
    section, path = run.config.checkpoint, Path(choice[1:].decode())
    if section.base is not None:
        return LoadSource(path, terms=terms.BASE)
    return LoadSource(path, section.ckpt_step if choice[:1] == NAMED else None, terms.LOAD)


def _same_base(run: Run, choice: bytes, adapters: LoadSource, *, with_local: bool) -> bytes:
    """Return the base that is chosen if adapters were trained on it: of a run, the iteration of that identity.

    Rank 0 only. Where nothing can be compared yet, the loads of both compare and refuse.

    Raises:
        MismatchError: if it is another one, with both digests.
    """
    saved = _saved_base(run, adapters, with_local=with_local)
    if saved is None:
        return choice
    where, expected = saved
    kind, source = WEIGHTS_KINDS.get(choice[:1]), _base_source(run, choice)
    if kind is None:
        newest: Checkpoint | None = None
        for checkpoint in Chooser(source, Files(), lambda _: None).openable():
            if _identity(checkpoint) == dict(expected):
                return EXACT + str(checkpoint.path).encode()
            newest = newest or checkpoint
        if newest is None:
            return choice
        _check(run, newest)
        identity = _identity(newest)
    else:
        files = [source.path] if kind is WeightsKind.file else tensor_files(open_folder(source.path, Files()))
        identity = {"format": _OWNERS[kind], "xxh3_64": digest_of_samples(files).hex()}
    settle(differences({"base": expected}, {"base": identity}, resume_rules.RULES), flags=(), where=where)
    return choice


def _saved_base(run: Run, adapters: LoadSource, *, with_local: bool) -> tuple[Path, Mapping[str, object]] | None:
    """Return the newest checkpoint of adapters that can be opened, and the identity of its base; None without one."""
    local = run.saves.host_folders if with_local else None
    with contextlib.suppress(TrainerError, OSError):
        for checkpoint in Chooser(adapters, Files(), lambda _: None, local=local).openable():
            base = checkpoint.state.get("base")
            return (checkpoint.path, base) if isinstance(base, Mapping) else None
    return None


def _identity(checkpoint: Checkpoint) -> dict[str, object]:
    return {"format": "reprise", "xxh3_64": checkpoint.digest}


def _check(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse a base of another model, and log the allowed differences. Opens no tensor file."""
    refuse_adapters(checkpoint, fix="Set checkpoint.base to the weights that they were trained on, or to merged ones.")
    model = base_of(run.config.model)
    current = {**run.description, "model": run_record.model_record(model)}
    rules = [rule for rule in resume_rules.weight_rules() if rule.field.startswith("model")]
    found = differences(checkpoint.state, current, rules)
    fix = "Give the model the saved values, or name another base."
    for line in settle(found, flags=(), where=checkpoint.path, problem="The base is another model", fix=fix):
        _log.warning(line)
    places = read_places(checkpoint)
    wanted = [_FIT.stored(spec, places.get(spec.name)) for spec in checkpoint_specs(model, None)]
    check_tensors(wanted, places, where=checkpoint.path)


def named_source(path: Path, *, with_weights: bool = True) -> bytes:
    """Return the kind and the path of a source that the user named; a run may be named by its folder.

    Args:
        with_weights: whether it may be weights of another program.

    Raises:
        CheckpointError: if a run cannot start from the file.
        MismatchError: if it is a Megatron checkpoint, adapters of PEFT, or weights that it may not be.
    """
    refuse_megatron(path)
    if (path / ADAPTERS).is_file() and not (path / MANIFEST).exists():
        raise MismatchError(
            "Adapters in PEFT's form alone neither continue a run nor are a base",
            where=path,
            found=f"{ADAPTERS} without {MANIFEST}",
            fix="Name the checkpoint of the run that trained them, or the weights that they were trained on.",
        )
    if not with_weights and (path.is_file() or is_folder(path)):
        raise MismatchError(
            "Adapters continue from a checkpoint of adapters",
            where=path,
            found="weights of another program",
            fix="Set checkpoint.base to these weights, and checkpoint.load to a checkpoint or leave it out.",
        )
    if path.is_file():
        found = foreign(path)
        if found is not None:
            raise CheckpointError(
                "A run cannot start from a file of this format",
                where=path,
                expected=f"weights of llm.c, with {WEIGHTS}",
                found=found,
                fix="Set checkpoint.load to a run, a checkpoint, a transformers folder or such a file; "
                "`reprise convert import` reads other formats.",
            )
        return b"f" + str(path).encode()
    return b"p" + str(path).encode() if is_folder(path) else NAMED + str(LoadSource.named(path).path).encode()


def log_load(run: Run, report: LoadReport, what: str, path: Path) -> None:
    """Log the sizes and the rate of a load over all ranks. A call of all ranks."""
    filled_bytes = sum(row[0] for row in run.cluster.gather([float(report.filled_bytes)]))
    if run.cluster.rank == 0:
        rate = filled_bytes / max(report.seconds, 1e-9) / 1e9
        _log.info(
            f"loaded {report.tensors} of {report.expected} tensors, {filled_bytes:.0f} bytes, {report.seconds:.2f} s, "
            f"{rate:.2f} GB/s: {what} from {path}"
        )
