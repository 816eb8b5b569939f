"""Sources for a run's tensors: Reprise checkpoints, another program's weights, or initial values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from models import families
from models.adapters import adapter_initial_values
from models.config import ModelConfig
from reprise.errors import MismatchError
from reprise.format import ADAPTERS, MANIFEST, TensorSpec
from reprise.loading import Checkpoint, LoadSource, Restored, check_tensors, read_places
from reprise.storage import Json, exists, failed_read, is_file, retry
from reprise.stores import is_stored
from reprise.tensors import LiveTensor, torch_dtype
from trainer.config.checkpoint import CheckpointSection
from trainer.interop.source import has_averages
from trainer.optim.table import AVERAGE
from trainer.record.resume_rules import TABLE_SIZES
from trainer.record.run_record import saved_frozen, saved_model, saved_moments
from trainer.run.build import Run
from trainer.run.fitting import Fitting
from trainer.run.random import fill_initial_values
from trainer.run.state import checkpoint_specs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors filled from a single source: a run's state, or the base beneath its adapters.

    Args:
        name: The part's name in messages. Empty for the state.
        model: The tensors' model.
        live: Returns this rank's tensors to fill.
        section: Settings for the load.
        refuse: Raises if a checkpoint does not fit the run, and returns log lines on the allowed differences, if any.
            Opens no tensor file. Rank 0 only.
        with_optimizer: Whether they include optimizer state, from a checkpoint that has it.
    """

    name: str
    model: ModelConfig
    live: Callable[[], Iterable[LiveTensor]]
    section: CheckpointSection
    refuse: Callable[[Checkpoint], list[str] | None]
    with_optimizer: bool = False


# The source's format and digest, without a path and empty for initial values; and the checkpoint, if it is one.
Filled: TypeAlias = tuple[Json, Restored | None]


class InitialValues:
    """A new run's initial values."""

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part with initial values drawn from `train.seed`."""
        model, seed = part.model, run.config.train.seed
        values = adapter_initial_values(model) if model.is_adapted else families.initial_values(model)
        fill_initial_values(part.live(), values, seed)
        _log.info(f"starting fresh, seed {seed}")
        return {}, None


@dataclass(frozen=True, slots=True)
class Weights:
    """Another program's weights."""

    path: Path

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part with the weights, cast to float32. Collective.

        Raises:
            TrainerError: They do not fit the part. Every rank raises, before a tensor is read.
        """
        from trainer.interop.start import load_pretrained

        seed, tensors, start = run.config.train.seed, list(part.live()), time.perf_counter()
        filled, identity = load_pretrained(self.path, tensors, part.model, run.cluster, part.section, seed=seed)
        _log_load(run, filled, len(tensors), time.perf_counter() - start, f"{part.name or 'weights'} from {self.path}")
        return identity, None


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A Reprise checkpoint, or a run's newest valid checkpoint."""

    source: LoadSource

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part from the newest undamaged checkpoint. Collective, see `Restorer.restore`.

        All its tensors are loaded, or its weights alone, in the forms that its settings allow. With optimizer state,
        only moments may have another dtype, which the resume rules have allowed.
        """
        lines, fittings, start = list[str](), list[Fitting](), time.perf_counter()

        def check(checkpoint: Checkpoint) -> None:
            """Refuse another run's checkpoint, or tensors that do not fit. Rank 0 only."""
            lines[:] = part.refuse(checkpoint) or []
            stored = _stored_forms(run, part, checkpoint)
            places = read_places(checkpoint)
            if not run.state.averages:
                places = {name: place for name, place in places.items() if not name.startswith(f"{AVERAGE}.")}
            check_tensors([*stored.values()], places, where=checkpoint.path)

        def live(checkpoint: Checkpoint) -> list[LiveTensor]:
            """Return this rank's tensors to fill, in stored form. The others get their initial values."""
            stored = _stored_forms(run, part, checkpoint)
            tensors = list(part.live())
            for tensor in tensors:  # a damaged checkpoint may have filled them
                if tensor.spec.name not in stored:
                    tensor.local.zero_()
            fittings[:] = [Fitting(tensors, stored, part.model, run.config.train.seed)]
            return fittings[0].requests

        restored = run.restorer.restore(self.source, check=check, live=live, is_new=True)
        checkpoint, (fitting,) = restored.checkpoint, fittings
        with run.cluster.channel.agreed(f"fitted/{part.name}"):
            fitting.finish()
            checkpoint.files.end()
        for line in (*lines, *fitting.notes(checkpoint.path)) if run.cluster.rank == 0 else ():
            _log.warning(line)
        seconds = time.perf_counter() - start
        if restored.loaded_from:
            _log.info(f"loaded iteration {checkpoint.iteration}: {restored.loaded_from}; {seconds:.1f} s")
        what = f"{part.name or f'iteration {checkpoint.iteration}'} from {checkpoint.path}"
        _log_load(run, fitting.requests, fitting.count, seconds, what)
        return {"format": "reprise", "xxh3_64": checkpoint.digest}, restored


TensorSource: TypeAlias = InitialValues | Weights | Checkpoints


def found_patiently(find: Callable[[], Json], key: str) -> Json:
    """Return what `find` finds at the path named by `key`, trying again while a file system fails."""
    try:
        return retry(find)
    except OSError as error:
        raise failed_read("A path cannot be read", error, where=error.filename, fix=f"Correct {key}.") from error


def named_source(path: Path, *, with_weights: bool = True) -> Json:
    """Return the kind and path of the user's source. A run may be named by its folder.

    Args:
        with_weights: Whether another program's weights are allowed.

    Raises:
        MismatchError: It is a Megatron checkpoint, PEFT adapters, or weights where these are not allowed.
    """
    from trainer.interop.hf.config import is_folder
    from trainer.interop.megatron.refuse import refuse_megatron

    if is_stored(path):
        return {"kind": "checkpoint", "path": str(LoadSource.named(path).path)}
    refuse_megatron(path)
    if is_file(path / ADAPTERS) and not exists(path / MANIFEST):
        raise MismatchError(
            "PEFT adapters alone can neither continue a run nor serve as a base",
            where=path,
            found=f"{ADAPTERS} without {MANIFEST}",
            fix="Name the checkpoint of the run that trained them, or the weights that they were trained on.",
        )
    if not with_weights and (is_file(path) or is_folder(path)):
        raise MismatchError(
            "Adapters continue from a checkpoint of adapters",
            where=path,
            found="weights of another program",
            fix="Set checkpoint.base to these weights, and checkpoint.load to a checkpoint or leave it out.",
        )
    if is_file(path) or is_folder(path):
        return {"kind": "weights", "path": str(path)}
    return {"kind": "checkpoint", "path": str(LoadSource.named(path).path)}


def _stored_forms(run: Run, part: Part, checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """Return the form in which each tensor to load must be stored, by name."""
    if part.with_optimizer:
        return {spec.name: spec for spec in _resumed_specs(run, checkpoint)}
    model, section = part.model, part.section
    if section.finetune and section.resize:
        saved = saved_model(checkpoint.state, where=checkpoint.path)
        model = replace(model, **{name: getattr(saved, name) for name in TABLE_SIZES})
    forms, places = {spec.name: spec for spec in checkpoint_specs(model, None)}, read_places(checkpoint)
    for name in forms.keys() & places.keys():
        if torch_dtype(places[name].spec.dtype).is_floating_point:  # cast to float32
            forms[name] = replace(forms[name], dtype=places[name].spec.dtype)
    return forms


def _resumed_specs(run: Run, checkpoint: Checkpoint) -> Iterable[TensorSpec]:
    """Return every tensor that a resume loads with its optimizer state, as it must be stored.

    They are the run's own, unless the saved run had moments of another dtype, froze other parameters, which then had no
    moments, or kept no averages.
    """
    state, config, moments = checkpoint.state, run.config, saved_moments(checkpoint.state, where=checkpoint.path)
    averages = run.state.averages and has_averages(checkpoint)
    settings = config.optimizer.moments_dtype, run.state.averages, config.train.freeze
    if (moments, averages, state.get("freeze", [])) == settings:
        return run.state.specs
    optimizer, frozen = replace(config.optimizer, moments_dtype=moments), saved_frozen(state, config.model)
    return checkpoint_specs(config.model, optimizer, frozen, averages=averages)


def _log_load(run: Run, filled: Sequence[LiveTensor], expected: int, seconds: float, what: str) -> None:
    """Log a load's size and rate over all ranks. Collective."""
    (filled_bytes,) = run.cluster.counts([sum(tensor.local.nbytes for tensor in filled)])
    megabytes = filled_bytes / 1e6
    rate = megabytes / max(seconds, 1e-9) / 1e3
    _log.info(  # only rank 0 logs such lines
        f"loaded {len(filled)} of {expected} tensors, {megabytes:.1f} MB, {seconds:.2f} s, {rate:.2f} GB/s: {what}"
    )
