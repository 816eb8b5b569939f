"""The frozen weights beneath adapters, loaded at every start of a run, and the sources of a load by their paths."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from models.adapters import base_of
from trainer import run_record
from trainer.build import Run
from trainer.checkpoint.loading.choose import LoadSource
from trainer.checkpoint.loading.loader import LoadReport, check_tensors, fill
from trainer.checkpoint.loading.reader import Checkpoint, read_places
from trainer.checkpoint.loading.restorer import Restored
from trainer.checkpoint.storage.patience import Patience, failed_read
from trainer.checkpoint.tensors.live import LiveTensor
from trainer.compatibility import differences, settle
from trainer.config.schema import CheckpointSection, Verify
from trainer.errors import CheckpointError, MismatchError, TrainerError
from trainer.fitting import Fit, Fitting
from trainer.interop.hf.folder import is_folder
from trainer.interop.llmc.file import WEIGHTS, foreign
from trainer.interop.megatron.refuse import refuse_megatron
from trainer.interop.source import refuse_adapters
from trainer.interop.start import WeightsKind, load_pretrained
from trainer.state import checkpoint_specs

_log = logging.getLogger(__name__)

# Prefixes of the path in rank 0's message: a checkpoint, this run's own checkpoints, or other programs' weights.
NAMED, OWN = b"c", b"o"
WEIGHTS_KINDS = {b"p": WeightsKind.folder, b"f": WeightsKind.file}
# A base may be a save of weights alone, in another dtype.
_FIT = Fit(casts=True)
_OWNERS = {WeightsKind.folder: "transformers", WeightsKind.file: "llm.c"}


def load_base(run: Run) -> None:
    """Load the weights beneath the adapters, and add their identity to the description of the run. Collective.

    They are those of `checkpoint.base`, or of `checkpoint.load` with `finetune`. Their identity is a digest and no
    path: that of the manifest of a checkpoint, or that of the files of another program.

    Raises:
        TrainerError: on every rank, if they are not there, or not of the configured model.
    """
    section = run.config.checkpoint
    path = Path(section.load if section.base is None else section.base)
    kind, source = _agree_on_base(run, path)
    live, model = list(run.state.base_shards()), base_of(run.config.model)
    if kind is not None:
        found = load_pretrained(source, kind, live, model, run.cluster, CheckpointSection(finetune=True), seed=0)
        log_load(run, found.report, "the base", source)
        identity = {"format": _OWNERS[kind], "xxh3_64": found.digest}
    else:
        restored, fitting = _load_checkpoint(run, source, live)
        log_load(run, restored.report, "the base", restored.checkpoint.path)
        for line in fitting.notes((), where=restored.checkpoint.path) if run.cluster.rank == 0 else ():
            _log.warning(line)
        identity = {"format": "reprise", "xxh3_64": restored.checkpoint.digest}
    run.description = {**run.description, "base": identity}


def _load_checkpoint(run: Run, source: Path, live: Sequence[LiveTensor]) -> tuple[Restored, Fitting]:
    """Load the base from a checkpoint of ours, whose weights may have been saved in another dtype. Collective."""
    section = run.config.checkpoint
    fitting: Fitting | None = None

    def requests(checkpoint: Checkpoint) -> Sequence[LiveTensor]:
        nonlocal fitting
        fitting = Fitting(_FIT, live, read_places(checkpoint))
        return fitting.requests

    restored = run.restorer.restore(
        LoadSource(source, section.ckpt_step if section.base is None else None),
        check=lambda checkpoint: _check(run, checkpoint),
        live=requests,
        verify=section.verify is not Verify.none,
        verify_all=section.verify is Verify.full,
    )
    assert fitting is not None
    places = read_places(restored.checkpoint)
    fitting.finish(lambda tensor: fill(restored.checkpoint, places, [tensor]))
    return restored, fitting


def _agree_on_base(run: Run, path: Path) -> tuple[WeightsKind | None, Path]:
    """Return the kind of other weights, None for a checkpoint, and their path, as rank 0 sees them. Collective."""
    problem: TrainerError | None = None
    choice = b""
    if run.cluster.rank == 0:
        try:
            choice = Patience().retry(lambda: named_source(path))
        except TrainerError as error:
            problem = error
        except OSError as error:
            problem = failed_read("The base cannot be read", error, where=path, fix="Correct checkpoint.base.")
    run.cluster.channel.agree("base", problem)
    choice = run.cluster.channel.broadcast("base/source", choice)
    return WEIGHTS_KINDS.get(choice[:1]), Path(choice[1:].decode())


def _check(run: Run, checkpoint: Checkpoint) -> None:
    """Refuse a base of another model, and log the allowed differences. Opens no tensor file."""
    refuse_adapters(checkpoint, fix="Set checkpoint.base to the weights that they were trained on, or to merged ones.")
    model = base_of(run.config.model)
    current = {**run.description, "model": run_record.model_record(model)}
    rules = [rule for rule in run_record.RULES if rule.field.startswith("model")]
    for line in settle(differences(checkpoint.state, current, rules), flags=(), where=checkpoint.path):
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
        MismatchError: if it is a Megatron checkpoint, or weights that it may not be.
    """
    refuse_megatron(path)
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
