"""Sources for a run's tensors: Reprise checkpoints, another program's weights, or initial values."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from models import families
from models.adapters import adapter_initial_values
from models.config import ModelConfig
from reprise.format import StoredDtype, TensorKind, TensorSpec
from reprise.loading import Checkpoint, LoadReport, LoadSource, Restored, check_tensors, fill, read_places
from reprise.storage import Json
from reprise.tensors import LiveTensor, torch_dtype
from trainer.config.checkpoint import CheckpointSection, Verify
from trainer.interop.source import has_averages
from trainer.interop.start import WeightsKind, load_pretrained
from trainer.optim.table import AVERAGE
from trainer.record.run_record import saved_frozen, saved_model, saved_moments
from trainer.run.build import Run
from trainer.run.fitting import Fit, Fitting, fill_unstored
from trainer.run.random import fill_initial_values
from trainer.run.state import checkpoint_specs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors filled from a single source: a run's state, or the base beneath its adapters.

    Args:
        name: The part's name in messages. Empty for the state.
        model: The tensors' model.
        live: Returns this rank's tensors, including optimizer state if there is any.
        section: Settings for the load.
        refuse: Raises if a checkpoint does not fit the run, and logs differences. Opens no tensor file. Rank 0 only.
    """

    name: str
    model: ModelConfig
    live: Callable[[], Iterable[LiveTensor]]
    section: CheckpointSection
    refuse: Callable[[Checkpoint], None]

    def weights(self) -> list[LiveTensor]:
        """Return this rank's tensors without optimizer state."""
        return [tensor for tensor in self.live() if tensor.spec.kind is not TensorKind.OPTIMIZER]


@dataclass(frozen=True, slots=True)
class Filled:
    """The source that filled a part.

    Args:
        identity: The source's format and digest, without a path. Empty for initial values.
        restored: The checkpoint. None for other sources.
    """

    identity: Json
    restored: Restored | None = None


class TensorSource(Protocol):
    """A tensor source."""

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part of a run. Collective.

        Raises:
            TrainerError: The source does not fit the part. Every rank raises, before a tensor is read.
        """


class InitialValues:
    """A new run's initial values."""

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part with initial values drawn from `train.seed`."""
        model, seed = part.model, run.config.train.seed
        values = adapter_initial_values(model) if model.is_adapted else families.initial_values(model)
        fill_initial_values(part.weights(), values, seed)
        _log.info(f"starting fresh, seed {seed}")
        return Filled({})


@dataclass(frozen=True, slots=True)
class Weights:
    """Another program's weights."""

    path: Path
    kind: WeightsKind

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part with the weights, cast to float32."""
        seed = run.config.train.seed
        pretrained = load_pretrained(
            self.path,
            self.kind,
            part.weights(),
            part.model,
            run.cluster,
            part.section,
            seed=seed,
        )
        _log_load(run, pretrained.report, part.name or "weights", self.path)
        return Filled({"format": self.kind.owner, "xxh3_64": pretrained.digest})


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A Reprise checkpoint, or a run's newest valid checkpoint.

    Args:
        source: The checkpoint or run to load.
        loads_weights_alone: Whether to omit optimizer state, and to allow other table sizes.
        is_own: Whether they are this run's. Local checkpoints are then candidates as well.
    """

    source: LoadSource
    loads_weights_alone: bool
    is_own: bool = False

    def fill(self, run: Run, part: Part) -> Filled:
        """Fill a part from the newest undamaged checkpoint. See `Restorer.restore`."""
        filling = _FittedLoad(run, part) if self.loads_weights_alone else _ExactLoad(run, part)
        start = time.perf_counter()
        restored = run.restorer.restore(
            self.source,
            check=filling.check,
            live=filling.live,
            verify=part.section.verify is not Verify.none,
            verify_all=part.section.verify is Verify.full,
            with_local=self.is_own,
            is_new=True,
        )
        checkpoint = restored.checkpoint
        report = filling.finish(restored)
        if restored.loaded_from:
            seconds = time.perf_counter() - start
            _log.info(f"loaded iteration {checkpoint.iteration}: {restored.loaded_from}; {seconds:.1f} s")
        _log_load(run, report, part.name or f"iteration {checkpoint.iteration}", checkpoint.path)
        return Filled(identity_of(checkpoint), restored)


def weights_of(choice: Json) -> Weights:
    """Return another program's weights by their kind and path."""
    return Weights(Path(choice["path"]), WeightsKind(choice["kind"]))


def identity_of(checkpoint: Checkpoint) -> Json:
    """Return a Reprise checkpoint's identity, the same at any path."""
    return {"format": "reprise", "xxh3_64": checkpoint.digest}


class _ExactLoad:
    """Fills a part from a checkpoint with all its tensors in the same form, or with moments in another dtype.

    The resume rules have allowed this dtype.
    """

    def __init__(self, run: Run, part: Part) -> None:
        self._run, self._part = run, part
        self._converted = list[tuple[LiveTensor, LiveTensor]]()

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse another run's checkpoint, or other tensors. Rank 0 only."""
        self._part.refuse(checkpoint)
        places = read_places(checkpoint)
        if not self._run.state.averages:
            places = {name: place for name, place in places.items() if not name.startswith(f"{AVERAGE}.")}
        check_tensors(self._specs(checkpoint), places, where=checkpoint.path)

    def live(self, checkpoint: Checkpoint) -> list[LiveTensor]:
        """Return this rank's tensors to fill. Zero the others again, in case a damaged checkpoint had them."""
        dtypes, tensors = {spec.name: spec.dtype for spec in self._specs(checkpoint)}, list(self._part.live())
        for tensor in tensors:
            if tensor.spec.name not in dtypes:
                tensor.local.zero_()
        tensors = [tensor for tensor in tensors if tensor.spec.name in dtypes]
        requests = [_in_dtype(tensor, dtypes[tensor.spec.name]) for tensor in tensors]
        self._converted = [pair for pair in zip(tensors, requests, strict=True) if pair[0] is not pair[1]]
        return requests

    def finish(self, restored: Restored) -> LoadReport:
        """Convert moments in another dtype, rounding to nearest even, and return the load's report."""
        for tensor, request in self._converted:
            tensor.local.copy_(request.local)
        return restored.report

    def _specs(self, checkpoint: Checkpoint) -> list[TensorSpec]:
        """Return the part's tensors, without moments for parameters frozen when the checkpoint was saved."""
        model, dtype = self._part.model, saved_moments(checkpoint.state, where=checkpoint.path)
        section = replace(self._run.config.optimizer, moments_dtype=dtype)
        frozen = saved_frozen(checkpoint.state, model, where=checkpoint.path)
        averages = self._run.state.averages and has_averages(checkpoint)
        return list(checkpoint_specs(model, section, frozen, averages=averages))


def _in_dtype(tensor: LiveTensor, dtype: StoredDtype) -> LiveTensor:
    """Return the tensor or, if the files have another dtype, a tensor in that dtype with its own memory."""
    if tensor.spec.dtype is dtype:
        return tensor
    local = torch.empty_like(tensor.local, dtype=torch_dtype(dtype))
    return replace(tensor, spec=replace(tensor.spec, dtype=dtype), local=local)


class _FittedLoad:
    """Fills a part's weights from a checkpoint with another dtype or other table sizes, or loads a subset."""

    def __init__(self, run: Run, part: Part) -> None:
        self._run, self._part = run, part
        self._specs = list(checkpoint_specs(part.model, None))
        self._fitting: Fitting | None = None

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse another run's checkpoint, or tensors that do not fit. Rank 0 only."""
        self._part.refuse(checkpoint)
        fit, places = self._fit(checkpoint), read_places(checkpoint)
        fit.unselected([spec.name for spec in self._specs])
        stored = [fit.stored(spec, places.get(spec.name)) for spec in self._specs if fit.selects(spec.name)]
        check_tensors(stored, places, where=checkpoint.path, is_partial=bool(fit.patterns))

    def live(self, checkpoint: Checkpoint) -> list[LiveTensor]:
        """Return the tensors to fill, in stored form. Tensors without a stored form get their initial values."""
        fit, tensors = self._fit(checkpoint), self._part.weights()
        fill_unstored(fit, tensors, self._part.model, self._run.config.train.seed)
        self._fitting = Fitting(fit, tensors, read_places(checkpoint))
        return self._fitting.requests

    def finish(self, restored: Restored) -> LoadReport:
        """Fill this rank's tensors from their stored form, log the differences, and return the load's report.

        Collective.
        """
        assert self._fitting is not None
        fitting, checkpoint = self._fitting, restored.checkpoint
        with self._run.cluster.channel.agreed(f"fitted/{self._part.name}"):
            places = read_places(checkpoint)
            fitting.finish(lambda tensor: fill(checkpoint, places, [tensor]))
            checkpoint.files.end()
        if self._run.cluster.rank == 0:
            for line in fitting.notes([spec.name for spec in self._specs], where=checkpoint.path):
                _log.warning(line)
        return replace(restored.report, expected=restored.report.expected + fitting.unloaded_count)

    def _fit(self, checkpoint: Checkpoint) -> Fit:
        """Return how a checkpoint's weights may differ from the part's."""
        model, section = self._part.model, self._part.section
        saved = saved_model(checkpoint.state, where=checkpoint.path) if section.resize else model
        return Fit.of(section, saved, model)


def _log_load(run: Run, report: LoadReport, what: str, path: Path) -> None:
    """Log a load's size and rate over all ranks. Collective."""
    (filled_bytes,) = run.cluster.counts([report.filled_bytes])
    megabytes = filled_bytes / 1e6
    rate = megabytes / max(report.seconds, 1e-9) / 1e3
    _log.info(  # only rank 0 logs such lines
        f"loaded {report.tensors} of {report.expected} tensors, {megabytes:.1f} MB, {report.seconds:.2f} s, "
        f"{rate:.2f} GB/s: {what} from {path}"
    )
