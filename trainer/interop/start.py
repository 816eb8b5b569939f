"""Starts a run, on any topology, from another program's weights: a transformers folder or an llm.c file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from models.config import ModelConfig
from reprise.commit import check_replicas
from reprise.errors import MismatchError
from reprise.format import MANIFEST
from reprise.storage import is_file, log_progress, on_this_host, unreadable
from reprise.tensors import LiveTensor
from trainer.config.checkpoint import CheckpointSection
from trainer.interop import llmc
from trainer.interop.finite import require_finite
from trainer.interop.hf.folder import check_tied, open_folder, other_files_notes, stored_tensors
from trainer.interop.samples import digest_of_samples
from trainer.interop.stored import ForeignWeights
from trainer.launch.process_group import Cluster
from trainer.record.resume_rules import TABLE_SIZES, Rule, Verdict, differences, rules_for, settle
from trainer.record.run_record import model_record
from trainer.run.fitting import Fitting
from trainer.run.state import checkpoint_specs

_log = logging.getLogger(__name__)


def open_weights(path: Path) -> ForeignWeights:
    """Open another program's weight files, mapped into memory.

    Raises:
        TrainerError: They are missing, damaged, or hold an unsupported model.
    """
    return llmc.open_file(path) if is_file(path) else open_folder(path)


def weights_identity(weights: ForeignWeights) -> dict[str, str]:
    """Return the format of another program's weights, and a digest that does not depend on the path.

    Raises:
        CheckpointError: A file cannot be read.
    """
    owner = "llm.c" if is_file(weights.path) else "transformers"
    try:
        return {"format": owner, "xxh3_64": digest_of_samples(sorted(set(weights.files.values()))).hex()}
    except OSError as error:
        raise unreadable(error, where=weights.path) from error


def fill_live(
    weights: ForeignWeights, live: Sequence[LiveTensor], progress: Callable[[int], object] = lambda _: None
) -> None:
    """Copy each box in `live` from its file, reading nothing else. `progress` receives the bytes copied so far.

    Raises:
        CheckpointError: A number is NaN or infinite.
    """
    done_bytes = 0
    for tensor in live:
        spec, values = tensor.spec, weights.tensors[tensor.spec.name].read()
        part = values.reshape(spec.view)[tensor.box.slices]
        tensor.local.detach().copy_(part.reshape(tensor.local.shape))
        require_finite(tensor.local, where=f"{weights.files[spec.name]}, {spec.name}")
        done_bytes += tensor.local.nbytes
        progress(done_bytes)


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

    All ranks must call it. Rows left out, as `section` allows, keep their initial values for `seed`. Each
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
        files = open_weights(path)
        weights = fit_weights(files, model, section, is_first=cluster.rank == 0)
        identity = weights_identity(files)
    digest = identity["xxh3_64"]
    expected = channel.from_first("pretrained/digest", lambda: digest)
    with channel.agreed("pretrained/same"):
        if digest != expected:
            raise MismatchError(
                "This host sees different weights from rank 0 at the same path",
                where=on_this_host(path),
                expected=f"digest {expected}",
                found=f"digest {digest}",
                fix="No training was done. Mount the same file system at this path on every host, or copy the same "
                "files.",
            )
    fitting = Fitting(live, {spec.name: spec for spec in checkpoint_specs(weights.model, None)}, model, seed)
    for text in [*weights.notes, *fitting.notes(path)] if cluster.rank == 0 else ():
        _log.warning(text)
    with channel.agreed("pretrained/fill"):
        progress = log_progress(f"loading {path}", sum(tensor.local.nbytes for tensor in live))
        fill_live(weights, fitting.requests, progress)
        fitting.finish()
    check_replicas(live, channel, "pretrained/replicas")
    return fitting.requests, identity


def fit_weights(
    weights: ForeignWeights, model: ModelConfig, section: CheckpointSection, *, is_first: bool = True
) -> ForeignWeights:
    """Return the tensors to load for a model, which may differ as `section` allows. The notes say how.

    Args:
        is_first: Whether to compare the values of tied tensors. That reads them, so once per run is enough.

    Raises:
        TrainerError: The weights do not fit the model.
    """
    path, stored = weights.path, replace(weights.model, pad_vocab_multiple=model.pad_vocab_multiple)
    notes = [*weights.notes, *other_files_notes(path)]
    if stored.vocab_size == model.padded_vocab_size != model.vocab_size:
        notes.append(f"rows {model.vocab_size} to {stored.vocab_size} of the vocabulary are padding, left out")
        stored = replace(stored, vocab_size=model.vocab_size)
    notes += settle(
        differences({"model": model_record(stored)}, {"model": model_record(model)}, [*rules_for(section), *_TOKENS]),
        where=path,
        problem="The weights do not hold the configured model",
        fix="Set the saved model values, or set checkpoint.load to other weights.",
    )
    sizes = {name: getattr(stored, name) for name in TABLE_SIZES} if section.resize else {}
    same = replace(model, **sizes)
    tensors = stored_tensors(weights, same)
    if is_first:
        check_tied(weights, model)
    return replace(weights, model=same, tensors=tensors, notes=notes)


# No tensor depends on them.
_TOKENS = [Rule(f"model.{name}", Verdict.LOGGED, "it affects only texts") for name in ("bos_token_id", "eos_token_id")]


def _require_finetune(path: Path, section: CheckpointSection) -> None:
    if not section.finetune:
        raise MismatchError(
            "The path holds another program's weights, not a run to continue",
            where=path,
            found=f"no {MANIFEST}, which every checkpoint has",
            fix="To start at iteration 0 from its weights, set checkpoint.finetune=true.",
        )
    if section.ckpt_step is not None:
        raise MismatchError(
            "Another program's weights have no iterations",
            where=path,
            found=f"checkpoint.ckpt_step={section.ckpt_step}",
            fix="Omit checkpoint.ckpt_step.",
        )
