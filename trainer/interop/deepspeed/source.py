"""Reads checkpoints of DeepSpeed's `engine.save_checkpoint` at ZeRO stages 0 to 3, without DeepSpeed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from models.config import ModelConfig
from models.families import aliases, stored_tensors
from reprise.errors import CheckpointError, ConfigError, MismatchError, count_of
from reprise.files import is_file
from reprise.json_file import shown
from trainer.config.derived import batch_schedule_of
from trainer.interop.deepspeed.flat import MOMENTS, WEIGHTS, Flats, Unsharded, locate
from trainer.interop.deepspeed.folder import DeepSpeedCheckpoint, Table, open_saved, tag_of, take
from trainer.interop.deepspeed.megatron import is_megatron, read_megatron
from trainer.interop.finite import require_finite
from trainer.interop.formats import Format, ImportOptions, require_moments
from trainer.interop.hf.config import require_layers
from trainer.interop.hf.folder import CONFIG, read_folder_model
from trainer.interop.megatron.state import as_source
from trainer.interop.source import StateSource
from trainer.interop.torch_file import is_plain

_log = logging.getLogger(__name__)

_STEP = "step"
_MOST_NAMED = 10
# What the model file has besides what is read, where it is not None, 0 or empty.
_KNOWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size"),
        *("ds_config", "ds_version", "checkpoint_parallel_dimensions"),
    }
)


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a DeepSpeed checkpoint of a model under transformers' names, with at most one prefix, or under the names of
    Megatron-DeepSpeed.

    The `config.json` of transformers' Trainer beside the tag's folder describes the model, otherwise the configuration
    does. Weights are the optimizer's float32 copies, otherwise the model's own. Frozen parameters get zero moments and
    step 0. Files are mapped; beyond them, at most one tensor is in memory.

    Args:
        path: the folder given to DeepSpeed, or the folder of a tag in it.

    Raises:
        ConfigError: if pickles are not trusted: the files are pickles, although no code in them is run.
        CheckpointError: if files are missing or damaged.
        MismatchError: if it holds another model, was saved in an unsupported way, or stage 0 moments cannot be assigned
            with certainty.
    """
    if not options.trusts_pickle:
        raise ConfigError(
            "DeepSpeed's files are pickles",
            where=path,
            fix="If you know who wrote them, add --trust-pickle: no class of theirs is imported and no code is run.",
        )
    try:
        folder = tag_of(path)
        if is_megatron(folder):
            state, described = read_megatron(folder, options)
            return as_source(state, described, where=folder)
        saved = open_saved(path)
        model = _model(saved, options)
        unsharded = Unsharded(_unsharded_weights(saved), _shared(saved))
        names = _names(saved, unsharded.shared, model)
        if not saved.is_stage_3:  # so that another model is not taken for names that are not certain
            _check_model(
                {name: tuple(t.shape) for name, t in unsharded.weights.items()}, names, model, where=saved.path
            )
        flats = locate(saved, unsharded, listed_names=options.optimizer_names, weights_only=options.weights_only)
        reader = _Reader(saved, flats, unsharded.weights, names)
        _check_model({name: place.shape for name, place in flats.places.items()}, names, model, where=saved.path)
        has_optimizer = not options.weights_only and any(place.step is not None for place in flats.places.values())
        _log_content(saved, reader, options, has_optimizer=has_optimizer)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            "A DeepSpeed checkpoint has a form that is not known",
            where=path,
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix="It is damaged, or its version of DeepSpeed lays it out in another way.",
        ) from error
    iteration = take(saved.models[0], "global_steps", int, saved.path)
    if iteration < 0:
        raise CheckpointError("The number of steps is below 0", where=saved.path, found=iteration)
    if options.weights_only:
        return StateSource(model, 0, has_optimizer=False, read=reader.read)
    if not has_optimizer:
        require_moments([count_of(iteration, "step")] if iteration else [], options, where=saved.path)
    _warn_of_position(saved.models[0].get("global_samples"), iteration, options)
    return StateSource(model, iteration, has_optimizer, reader.read)


def _model(saved: DeepSpeedCheckpoint, options: ImportOptions) -> ModelConfig:
    path = saved.path.parent / CONFIG
    if not is_file(path):
        return options.config.model
    _log.info(f"the model is that of {path}")
    model, lost = read_folder_model(path.parent)
    for line in lost:
        _log.warning(line)
    require_layers(model, len(take(saved.models[0], "module", dict, saved.path)), where=path)
    return model


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads tensors under our names.

    Args:
        weights: the model's own weights at stages 0 to 2, in its dtype.
        names: DeepSpeed's name of every tensor of ours, by our name.
    """

    saved: DeepSpeedCheckpoint
    flats: Flats
    weights: Mapping[str, torch.Tensor]
    names: Mapping[str, str]

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor under our name.

        Raises:
            CheckpointError: if the optimizer's copy of a weight differs from the model's, or holds NaN.
        """
        key, _, parameter = name.partition(".")
        if key != _STEP and key not in MOMENTS:
            return self._weights(self.names[name])
        place = self.flats.places[self.names[parameter]]
        if key == _STEP:
            return torch.tensor(place.step or 0.0)
        return torch.zeros(place.shape) if place.step is None else self.flats.read(key, self.names[parameter])

    def _weights(self, name: str) -> torch.Tensor:
        copied, weight = self.flats.read(WEIGHTS, name), self.weights.get(name)
        if weight is not None and not torch.equal(copied.to(weight.dtype), weight):
            require_finite(copied, where=name)  # NaN is never equal to itself
            raise CheckpointError(
                "The optimizer's copy of a parameter differs from the model's",
                where=f"{self.saved.path}, {name}",
                fix="The weights were changed beside DeepSpeed, or the files are of several saves.",
            )
        return copied


def _check_model(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], model: ModelConfig, *, where: object
) -> None:
    """Refuse a model other than `model`.

    Args:
        shapes: the checkpoint's shapes, by DeepSpeed's names.
        names: DeepSpeed's name of every tensor of ours.

    Raises:
        MismatchError: naming missing tensors, unexpected ones, and other shapes.
    """
    expected = stored_tensors(model)
    lacking = [name for name in expected if names[name] not in shapes]
    unexpected = sorted(shapes.keys() - set(names.values()))
    misshapen = [
        f"{name} is {list(shapes[origin])}, expected {list(expected[name].shape)}"
        for name, origin in names.items()
        if origin in shapes and shapes[origin] != expected[name].shape
    ]
    if lacking or unexpected or misshapen:
        lines = (
            [f"missing: {name}" for name in lacking] + [f"not of the model: {name}" for name in unexpected] + misshapen
        )
        listing = "\n".join(f"  {line}" for line in lines[:_MOST_NAMED])
        raise MismatchError(
            "The checkpoint holds another model",
            where=where,
            found=f"{count_of(len(lines), 'difference')}:\n{listing}{'' if lines[:_MOST_NAMED] == lines else ' ...'}",
            fix="Choose its model by overrides, such as model=gpt2_124m or model.tie_word_embeddings=false; a "
            "config.json beside the tag's folder goes before them.",
        )


def _unsharded_weights(saved: DeepSpeedCheckpoint) -> dict[str, torch.Tensor]:
    """Return the unsharded parameters in the model file, a shared parameter once, in the module's order."""
    if saved.is_stage_3:
        return {}
    module = take(saved.models[0], "module", dict, saved.path)
    left_out = {*(saved.models[0].get("buffer_names") or ()), *_shared(saved)}
    parameters = {name: tensor for name, tensor in module.items() if name not in left_out}
    for name, tensor in parameters.items():
        if not is_plain(tensor):
            raise _no_tensor(saved, name)
    return parameters


def _shared(saved: DeepSpeedCheckpoint) -> Mapping[str, str]:
    """Return the names of shared parameters, with the name of the first."""
    shared = saved.models[0].get("shared_params")
    if isinstance(shared, Mapping):
        for name, original in shared.items():
            if not isinstance(original, str):
                raise CheckpointError(
                    "A shared parameter has no name", where=f"{saved.path}, {name}", found=shown(original)
                )
        return shared
    first, shared_names = dict[tuple[int, torch.Size], str](), dict[str, str]()
    for name, tensor in take(saved.models[0], "module", dict, saved.path).items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise _no_tensor(saved, name)
        original = first.setdefault((tensor.data_ptr(), tensor.shape), name)
        if original != name and tensor.numel():
            shared_names[name] = original
    return shared_names


def _no_tensor(saved: DeepSpeedCheckpoint, name: object) -> CheckpointError:
    return CheckpointError("A model file holds something else than dense tensors", where=f"{saved.path}, {name}")


def _names(saved: DeepSpeedCheckpoint, shared: Mapping[str, str], model: ModelConfig) -> dict[str, str]:
    """Return DeepSpeed's name of every tensor of ours, with a prefix, and with shared memory resolved."""
    stored = list(stored_tensors(model))
    module = take(saved.models[0], "module", dict, saved.path)
    prefix = next((name.removesuffix(stored[0]) for name in module if name.endswith(stored[0])), "")
    second = aliases(model).values()
    # Only where we tie them too may a name stand for another one.
    return {name: shared.get(prefix + name, prefix + name) if name in second else prefix + name for name in stored}


def _warn_of_position(samples: object, iteration: int, options: ImportOptions) -> None:
    """Warn if DeepSpeed's count of samples is not a run's at this iteration."""
    expected = batch_schedule_of(options.config.train).consumed_after(iteration)
    if isinstance(samples, int) and samples != expected:
        _log.warning(
            f"DeepSpeed counted {count_of(samples, 'sample')} in {count_of(iteration, 'iteration')}, where its batch "
            f"size makes {expected}: --consumed-samples={samples} begins behind them"
        )


def _log_content(saved: DeepSpeedCheckpoint, reader: _Reader, options: ImportOptions, *, has_optimizer: bool) -> None:
    """Log the content, and the part not carried over."""
    table, places = saved.models[0], reader.flats.places
    frozen = [name for name, place in places.items() if place.step is None]
    ranks = count_of(len(saved.optimizers), "rank") if saved.optimizers else "stage 0"
    _log.info(f"{saved.path}: DeepSpeed {shown(table.get('ds_version'))}, {ranks}")
    if saved.optimizers and options.optimizer_names is not None:
        _log.warning("--optimizer-names is not used: at ZeRO 1 and above the files have the names themselves")
    if not has_optimizer:
        if saved.optimizers or table.get("optimizer") is not None:
            note = "; the weights are the model's own, in its dtype" if not saved.optimizers else ""
            _log.warning(f"not carried, as --weights-only asks: the optimizer's moments{note}")
    elif frozen:
        _log.warning(f"the moments of {count_of(len(frozen), 'frozen parameter')} begin as zeros: {_first(frozen)}")
    added = [(key, value) for key, value in table.items() if key not in _KNOWN]
    if uncarried := [str(key) for key, value in added if isinstance(value, torch.Tensor) or value]:
        _log.info(f"not carried: {_first(uncarried)}")
    for group in _settings(saved):
        _log.info(f"the optimizer was set to {group}: not carried, the run that continues has its own, optimizer.*")


def _settings(saved: DeepSpeedCheckpoint) -> list[str]:
    """Return the numbers of the optimizer's groups, as text, each once."""
    state = saved.models[0].get("optimizer")
    first: Table = {"optimizer_state_dict": state}
    if saved.optimizers:
        first = saved.optimizers[0]
    elif isinstance(state, Mapping) and "optimizer_state_dict" in state:
        first = state
    tables = [first.get(key) for key in ("base_optimizer_state", "optimizer_state_dict")]
    group_lists = [table.get("param_groups") for table in tables if isinstance(table, Mapping)]
    groups = [group for group in (group_lists[0] if group_lists else None) or () if isinstance(group, Mapping)]
    keys = ("lr", "betas", "eps", "weight_decay")
    return sorted({", ".join(f"{key} {shown(group[key])}" for key in keys if key in group) for group in groups})


def _first(names: Collection[str]) -> str:
    return ", ".join(list(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")


FORMAT = Format(
    "a folder of DeepSpeed's save_checkpoint, ZeRO stages 0 to 3, or of Megatron-DeepSpeed",
    read_source,
    names_model=True,
    numbers_moments=True,
    has_copies=True,
)
