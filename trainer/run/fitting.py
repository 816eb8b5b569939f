"""Adapts stored tensors to a model with another dtype or other table sizes, or loads a subset.

With optimizer state, only moments may have another dtype: every other tensor has its saved form.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from models import families
from models.config import ModelConfig
from reprise.errors import MismatchError, count_of
from reprise.format import Box, Place, TensorSpec
from reprise.tensors import LiveTensor, torch_dtype
from trainer.config.checkpoint import CheckpointSection
from trainer.record.resume_rules import TABLE_SIZES
from trainer.run.random import fill_initial_values

# Dtypes without a log line.
_UNCAST = {"float32"}


@dataclass(frozen=True, slots=True)
class Fit:
    """The allowed differences between stored weights and the tensors to fill.

    Args:
        casts: Whether other floating-point dtypes are cast to float32.
        rows: Stored row counts by name, for tables with an allowed difference in rows.
        patterns: Shell patterns for the names of tensors to load. Empty loads all.
    """

    casts: bool = False
    rows: Mapping[str, int] = field(default_factory=dict)
    patterns: tuple[str, ...] = ()

    @staticmethod
    def of(section: CheckpointSection, saved: ModelConfig, model: ModelConfig) -> Fit:
        """Return the differences that a configuration allows between the saved and the configured model.

        Args:
            section: Settings as they apply to the load: without `finetune` if a run resumes from its own checkpoint.
        """
        rows = _stored_rows(saved, model) if section.finetune and section.resize else {}
        patterns = tuple(section.partial) if section.finetune else ()
        return Fit(section.loads_weights_alone, rows, patterns)

    def selects(self, name: str) -> bool:
        """Return whether to load a tensor."""
        return not self.patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)

    def stored(self, specs: Iterable[TensorSpec], places: Mapping[str, Place]) -> dict[str, TensorSpec]:
        """Return the form in which each tensor to load must be stored, by name.

        Args:
            places: Stored tensors by name, whose floating-point dtypes a cast accepts.
        """
        forms = dict[str, TensorSpec]()
        for spec in (spec for spec in specs if self.selects(spec.name)):
            place = places.get(spec.name)
            if self.casts and place is not None and torch_dtype(place.spec.dtype).is_floating_point:
                spec = replace(spec, dtype=place.spec.dtype)
            if spec.name in self.rows:
                shape = (self.rows[spec.name], *spec.shape[1:])
                spec = replace(spec, shape=shape, view=shape)
            forms[spec.name] = spec
        return forms

    def unselected(self, names: Sequence[str]) -> list[str]:
        """Return the names of tensors keeping their initial values.

        Raises:
            MismatchError: A pattern has no match.
        """
        unused = [p for p in self.patterns if not any(fnmatch.fnmatchcase(name, p) for name in names)]
        if unused:
            raise MismatchError(
                "A pattern in checkpoint.partial matches no tensor in the model",
                found=", ".join(unused),
                fix="Correct it, or leave it out; `reprise checkpoint show` lists the names.",
            )
        return [name for name in names if not self.selects(name)]


class Fitting:
    """A rank's live tensors, matched to their stored form.

    Args:
        live: The tensors to fill. Tensors that are not loaded must have their values before `finish`.
        stored: The form of every tensor to load, by name.
    """

    def __init__(self, fit: Fit, live: Sequence[LiveTensor], stored: Mapping[str, TensorSpec]) -> None:
        self._fit, self._stored, self.count = fit, stored, len(live)
        tensors = [tensor for tensor in live if tensor.spec.name in stored]
        self._pairs = [(tensor, _request(tensor, stored[tensor.spec.name])) for tensor in tensors]

    @property
    def requests(self) -> list[LiveTensor]:
        """Return the tensors to fill from the files, in stored form."""
        return [request for _, request in self._pairs]

    def notes(self, names: Sequence[str], *, where: object) -> list[str]:
        """Return log lines about tensors in `names` not loaded, or loaded in part."""
        lines, fit = [], self._fit
        if unloaded := fit.unselected(names):
            verb = "keeps" if len(unloaded) == 1 else "keep"
            tensors = f"{count_of(len(unloaded), 'tensor')} {verb} initial values: {', '.join(unloaded)}"
            lines.append(f"not loaded from {where}, {tensors}")
        for name in (name for name in fit.rows if fit.selects(name)):
            lines.append(f"{name}: {fit.rows[name]} rows of {where} are kept by number")
        cast = sorted({str(spec.dtype) for spec in self._stored.values()} - _UNCAST)
        if cast and fit.casts:
            lines.append(f"cast to float32 from {', '.join(cast)}: {where}")
        return lines

    def finish(self) -> None:
        """Move the filled values into the live tensors."""
        with torch.no_grad():
            for tensor, request in self._pairs:
                if request is not tensor:
                    tensor.local.narrow(0, 0, request.box.shape[0]).copy_(request.local)


def fill_unstored(fit: Fit, live: Sequence[LiveTensor], model: ModelConfig, seed: int) -> None:
    """Fill unselected tensors, and tables with new rows, with a fresh run's initial values."""
    unloaded = [tensor for tensor in live if not fit.selects(tensor.spec.name) or tensor.spec.name in fit.rows]
    if unloaded:
        fill_initial_values(unloaded, families.initial_values(model), seed)


def _request(tensor: LiveTensor, stored: TensorSpec) -> LiveTensor:
    """Return the tensor itself, or a tensor in stored form with its own memory if it differs."""
    spec, box = tensor.spec, tensor.box
    if (stored.dtype, stored.shape) == (spec.dtype, spec.shape):
        return tensor
    count = max(0, min(box.end[0], stored.view[0]) - box.offset[0])
    box = Box(box.offset if count else (0, *box.offset[1:]), (count, *box.shape[1:]))
    local = torch.empty(box.shape, dtype=torch_dtype(stored.dtype), device=tensor.local.device)
    return replace(tensor, spec=stored, box=box, local=local)


def _stored_rows(saved: ModelConfig, model: ModelConfig) -> dict[str, int]:
    """Return the stored row count for every table whose count differs, by name."""
    same = replace(model, **{name: getattr(saved, name) for name in TABLE_SIZES})
    saved_tensors, tensors = families.stored_tensors(same), families.stored_tensors(model)
    return {name: saved_tensors[name].shape[0] for name in tensors if saved_tensors[name].shape != tensors[name].shape}
