"""Starts a run, on any topology, from another program's weights: a transformers folder or an llm.c file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models import families
from models.config import ModelConfig
from reprise.commit import check_replicas
from reprise.errors import MismatchError
from reprise.format import MANIFEST, STATE
from reprise.storage import ProgressLine, exists, is_file, on_this_host, unreadable
from reprise.tensors import LiveTensor
from trainer.config.checkpoint import CheckpointSection
from trainer.interop import llmc
from trainer.interop.finite import require_finite
from trainer.interop.hf.config import CONFIG, differences
from trainer.interop.hf.folder import (
    check_tied,
    open_folder,
    other_files_notes,
    stored_tensors,
    trainer_checkpoints,
)
from trainer.interop.samples import digest_of_samples
from trainer.launch.process_group import Cluster
from trainer.run.fitting import Fit, Fitting, fill_unstored

_log = logging.getLogger(__name__)


def weights_identity(path: Path, files: Iterable[Path] | None = None) -> dict[str, str]:
    """Return the format of another program's weights, and a digest that does not depend on the path.

    Args:
        files: The weight files. By default they are searched.

    Raises:
        CheckpointError: A file cannot be read.
    """
    owner = "llm.c" if is_file(path) else "transformers"
    if files is None:
        files = [path] if is_file(path) else list(open_folder(path).files.values())
    try:
        return {"format": owner, "xxh3_64": digest_of_samples(sorted(set(files))).hex()}
    except OSError as error:
        raise unreadable(error, where=path) from error


@dataclass(frozen=True, slots=True)
class ForeignWeights:
    """Weights for the configured model.

    Args:
        fit: How they may differ from the model's tensors.
        notes: Log lines on allowed differences from the configuration.
        files: Each tensor's file, by stored name.
        read: Returns a tensor by its stored name, as a view of a mapped file where possible.
    """

    fit: Fit
    notes: Sequence[str]
    files: Mapping[str, Path]
    read: Callable[[str], torch.Tensor]

    def fill(self, live: Sequence[LiveTensor], progress: Callable[[int], object] = lambda _: None) -> None:
        """Copy each box in `live` from its file, reading nothing else. `progress` receives the copied bytes.

        Raises:
            CheckpointError: A number is NaN or infinite.
        """
        for tensor in live:
            spec, values = tensor.spec, self.read(tensor.spec.name)
            part = values.reshape(spec.view)[tensor.box.slices]
            tensor.local.detach().copy_(part.reshape(tensor.local.shape))
            require_finite(tensor.local, where=f"{self.files[spec.name]}, {spec.name}")
            progress(tensor.local.nbytes)


def load_pretrained(
    path: Path,
    live: Sequence[LiveTensor],
    model: ModelConfig,
    cluster: Cluster,
    section: CheckpointSection,
    *,
    seed: int,
) -> tuple[Sequence[LiveTensor], dict[str, str]]:
    """Fill parameters from `path`, cast to float32. Return the filled tensors and the weights' identity.

    All ranks must call it. Rows and tensors left out, as `section` allows, keep their initial values for `seed`. Each
    rank reads only its boxes' bytes. The log names a trainer's other files in the folder.

    Args:
        live: The parameters of `model`.
        section: The checkpoint section, which must request a start at iteration 0.

    Raises:
        TrainerError: The weights are damaged or do not fit the model. Every rank raises. A model mismatch is found
            before any parameter is filled.
    """
    channel = cluster.channel
    with channel.agreed("pretrained/open"):
        _require_finetune(path, section)
        weights = open_weights(path, model, section, is_first=cluster.rank == 0)
        identity = weights_identity(path, weights.files.values())
    digest = identity["xxh3_64"]
    expected = channel.from_first("pretrained/digest", lambda: digest)
    with channel.agreed("pretrained/same"):
        if digest != expected:
            raise _other_weights(path, digest, expected)
    fill_unstored(weights.fit, live, model, seed)
    fitting = Fitting(weights.fit, live, weights.fit.stored((tensor.spec for tensor in live), {}))
    names = list(families.stored_tensors(model))
    for text in [*weights.notes, *fitting.notes(names, where=path)] if cluster.rank == 0 else ():
        _log.warning(text)
    with channel.agreed("pretrained/fill"):
        line = ProgressLine(f"loading {path}", sum(tensor.local.nbytes for tensor in live))
        weights.fill(fitting.requests, line.add)
        fitting.finish()
    check_replicas(live, channel, "pretrained/replicas")
    return fitting.requests, identity


def open_weights(
    path: Path, model: ModelConfig, section: CheckpointSection, *, is_first: bool = True
) -> ForeignWeights:
    """Open a model's weight files, mapped into memory.

    Args:
        is_first: Whether to compare the values of tied tensors. That reads them, so once per run is enough.

    Raises:
        TrainerError: The weights do not fit the model.
    """
    if is_file(path):
        return _open_file(path, model, section)
    folder = open_folder(path)
    same = _with_stored_sizes(folder.model, model) if section.resize else model
    fit = replace(Fit.of(section, same, model), casts=False)  # every dtype is copied as float32
    notes = [] if fit.patterns else differences(folder.model, same, where=path / CONFIG)
    fit.unselected(list(families.stored_tensors(model)))
    tensors = stored_tensors(folder, same, fit.selects)
    if is_first and not fit.patterns:
        check_tied(folder, model)
    notes += [*folder.lost, *other_files_notes(path)]
    return ForeignWeights(fit, notes, folder.files, tensors.__getitem__)


def _with_stored_sizes(stored: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Return the model with the stored table sizes. Vocabulary padding rows do not count as a size difference."""
    vocab_size = model.vocab_size if stored.vocab_size == model.padded_vocab_size else stored.vocab_size
    return replace(model, vocab_size=vocab_size, max_position_embeddings=stored.max_position_embeddings)


def _open_file(path: Path, model: ModelConfig, section: CheckpointSection) -> ForeignWeights:
    for name in ("resize", "partial"):
        if getattr(section, name):
            raise MismatchError(
                "An llm.c file must be loaded in full",
                where=path,
                found=f"checkpoint.{name}={getattr(section, name)}",
                fix="Convert it first with `reprise convert import llmc`, and load the checkpoint.",
            )
    file = llmc.open_file(path)
    notes = differences(file.model, model, where=path, kind="file")
    return ForeignWeights(Fit(), notes, dict.fromkeys(file.tensors, path), file.read)


def _other_weights(path: Path, digest: str, first: str) -> MismatchError:
    return MismatchError(
        "This host sees different weights from rank 0 at the same path",
        where=on_this_host(path),
        expected=f"digest {first}",
        found=f"digest {digest}",
        fix="No training was done. Mount the same file system at this path on every host, or copy the same files.",
    )


def _trainer_note(path: Path) -> str:
    """Describe the Trainer's files in a folder mistaken for a run."""
    note = f"; the {STATE} is that of transformers' Trainer, which `reprise convert import trainer` takes"
    saved = [f"; {name} beside it has the Trainer's newest checkpoint" for name in trainer_checkpoints(path)]
    return "".join([note] * exists(path / STATE) + saved[-1:])


def _require_finetune(path: Path, section: CheckpointSection) -> None:
    if not section.finetune:
        raise MismatchError(
            "The path holds another program's weights, not a run to continue",
            where=path,
            found=f"no {MANIFEST}, which every checkpoint has{_trainer_note(path)}",
            fix="To start at iteration 0 from its weights, set checkpoint.finetune=true.",
        )
    if section.ckpt_step is not None:
        raise MismatchError(
            "Another program's weights have no iterations",
            where=path,
            found=f"checkpoint.ckpt_step={section.ckpt_step}",
            fix="Omit checkpoint.ckpt_step.",
        )
