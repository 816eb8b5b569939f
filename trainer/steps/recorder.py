"""Records what iterations compute: each tensor's digest, the loss and gradient norm, and values while space is left."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import nn

from models.layers import Embedding
from models.network import Model
from reprise.format import TensorKind
from reprise.storage import Json
from reprise.tensors import LiveTensor, bytes_of, local_of
from trainer.optim.adamw import stored_names
from trainer.parallel.context import ParallelContext
from trainer.parallel.pipeline import Loss
from trainer.parallel.reduction import GradientReduction
from trainer.run.build import Run
from trainer.steps.records import BITS, RECORDS, VALUES, StepPlace
from trainer.training.loop import iterate

_ROOM_BYTES = 256 << 20  # bytes of values stored per rank
_CHUNK = 1 << 20  # elements digested at once
_MASK = (1 << 64) - 1
# splitmix64's odd constants, as int64.
_STEP, _FIRST, _SECOND = (number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def record_steps(run: Run, folder: Path, header: Json, *, begin: int, last: int, values: Collection[str]) -> None:
    """Train a filled run to an iteration, and record what it computes in a folder. All ranks must call it.

    Args:
        header: The record's description of the run.
        begin, last: The first and last recorded iteration.
        values: Keys of places whose values are stored. Empty stores all values while space is left.
    """
    cluster = run.cluster
    place = run.topology.coordinate(cluster.rank)
    header = {**header, "ranks": cluster.world_size, "stage": place.pp, "tensor_rank": place.tp}
    folder.mkdir(parents=True, exist_ok=True)
    while run.state.progress.iteration < begin - 1:
        iterate(run)
    with (
        open(folder / RECORDS.format(cluster.rank), "w") as lines,
        open(folder / VALUES.format(cluster.rank), "wb") as file,
    ):
        lines.write(json.dumps(header) + "\n")
        recorder = Recorder(run, lines, file, values)
        with recorder.watching() as watched:
            recorder.begin()
            recorder.state("start")
            while watched.state.progress.iteration < last:
                recorder.begin()
                result = iterate(watched)
                recorder.figure("loss", result.loss)
                recorder.figure("gradient norm", result.grad_norm)
                recorder.state("optimizer")
        lines.write(json.dumps({"end": True}) + "\n")


class Recorder:
    """A rank's recorder.

    Args:
        lines, file: The open files for its records and values.
        values: See `record_steps`.
    """

    def __init__(self, run: Run, lines: IO[str], file: IO[bytes], values: Collection[str]) -> None:
        self._run, self._lines, self._file, self._values = run, lines, file, values
        self._iteration = 0
        self._passes = [_Passes() for _ in run.state.parts]

    @contextmanager
    def watching(self) -> Iterator[Run]:
        """Yield the run with hooks on its modules, loss and gradients."""
        run, handles = self._run, list[Any]()
        for part, passes in zip(run.state.parts, self._passes, strict=True):
            handles += self._hooks(part.model, passes)
        reduction = cast(GradientReduction, _Recorded(run.context.reduction, self.gradients))
        context = replace(run.context, loss=self._loss(run.context), reduction=reduction)
        try:
            yield replace(run, context=context)
        finally:
            for handle in handles:
                handle.remove()

    def begin(self) -> None:
        """Start the next iteration."""
        progress = self._run.state.progress
        self._iteration, size = progress.iteration + 1, self._run.batch_schedule.at(progress.consumed_samples)
        for passes in self._passes:
            passes.numbers = iter(self._run.train_data.numbers_of(size))

    def state(self, phase: str) -> None:
        """Record the parameters and the optimizer state, box by box."""
        for tensor in self._run.state.shards():
            key, _, name = tensor.spec.name.partition(".")
            if tensor.spec.kind is not TensorKind.OPTIMIZER:
                key, name = "weight", tensor.spec.name
            self._logical(StepPlace(self._iteration, phase, -1, name, key), tensor)

    def gradients(self) -> None:
        """Record all parameters' gradients, reduced but not clipped."""
        boxes = {tensor.spec.name: tensor for tensor in self._run.state.shards(with_optimizer=False)}
        for part in self._run.state.parts:
            for parameter, name in stored_names(part.model).items():
                if parameter.grad is None or name not in boxes:
                    continue
                gradient, box = local_of(parameter.grad), boxes[name].box
                for dim, size in enumerate(box.shape):  # padding comes after the box
                    gradient = gradient.narrow(dim, 0, size)
                place = StepPlace(self._iteration, "gradient", -1, name, "gradient")
                self._logical(place, replace(boxes[name], local=gradient))

    def figure(self, name: str, value: float) -> None:
        """Record a figure of the iteration."""
        place = StepPlace(self._iteration, "figures", -1, name, "value")
        self._add(place, torch.tensor(value, dtype=torch.float64), digest=value.hex())

    def _hooks(self, model: Model, passes: _Passes) -> Iterator[Any]:
        """Register a stage's hooks. Embeddings and compiled blocks' modules get none: hooks change their code path."""
        compiled = [block for block in model.blocks.values() if self._run.config.train.compile]
        inside = {module for block in compiled for module in block.modules()}
        blocks = set(model.blocks.values())

        def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            passes.enter()
            if model.stage.first:
                self._activation(passes, "the model", "input", arguments[0])

        yield model.register_forward_pre_hook(enter)
        for name, module in model.named_modules():
            if module is model or module in inside or isinstance(module, Embedding):
                continue
            record = partial(self._activation, passes, name)
            if module in blocks:
                yield module.register_forward_pre_hook(lambda _, inputs, record=record: record("input", inputs[0]))
            yield module.register_forward_hook(lambda _, __, output, record=record: record("output", output))
        yield model.register_forward_hook(lambda *_: passes.leave())

    def _activation(self, passes: _Passes, name: str, what: str, tensor: object) -> None:
        """Record an activation and, for an output, its gradient during the backward pass."""
        if not isinstance(tensor, torch.Tensor) or not passes.is_forward:
            return
        place = StepPlace(self._iteration, "forward", passes.micro, name, what)
        call = passes.count(place)
        self._add(place, local_of(tensor), call=call)
        if what == "output" and tensor.requires_grad:
            back = replace(place, phase="backward", what="gradient of its output")
            tensor.register_hook(lambda gradient: self._add(back, local_of(gradient), call=call))  # type: ignore[no-untyped-call]

    def _loss(self, context: ParallelContext) -> Loss:
        def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            value = context.loss(logits, targets)
            if self._passes[-1].is_repeated:
                return value
            place = StepPlace(self._iteration, "forward", self._passes[-1].micro, "the loss", "output")
            self._add(replace(place, what="targets"), targets)
            self._add(place, local_of(value))
            return value

        return loss

    def _logical(self, place: StepPlace, tensor: LiveTensor) -> None:
        box, shape = tensor.box, tuple(tensor.spec.view)
        digest = f"{box_digest(tensor.local, box.offset, shape):016x}"
        self._add(place, tensor.local, digest=digest, offset=box.offset, tensor_shape=shape)

    def _add(
        self,
        place: StepPlace,
        local: torch.Tensor,
        *,
        digest: str = "",
        offset: Sequence[int] = (),
        tensor_shape: Sequence[int] = (),
        call: int = 0,
    ) -> None:
        local = local.detach()
        # An output may be a view of a gathered parameter, whose memory FSDP2 frees unless numpy holds it.
        local = local if tensor_shape else local.clone()
        data = bytes_of(local).cpu().numpy().data
        at, is_named = None, place.key in self._values
        if is_named or (not self._values and self._file.tell() + len(data) <= _ROOM_BYTES):
            at = self._file.tell()
            self._file.write(data)
        record = {
            "place": astuple(place),
            "dtype": str(local.dtype).removeprefix("torch."),
            "shape": list(local.shape),
            "offset": list(offset),
            "tensor_shape": list(tensor_shape),
            "digest": digest or xxhash.xxh3_64_hexdigest(data),
            "at": at,
            "call": call,
        }
        self._lines.write(json.dumps(record) + "\n")


class _Passes:
    """A stage's passes over an iteration's micro-batches."""

    def __init__(self) -> None:
        self.is_forward = False  # False while a block is recomputed for its backward pass
        self.is_repeated = False  # with weight 0, and not recorded
        self.micro = -1
        self.numbers: Iterator[int] = iter(())  # of the iteration's micro-batches that are still to come
        self._calls = Counter[StepPlace]()

    def enter(self) -> None:
        """Start the next micro-batch's forward pass, or a repeated pass if other ranks have another micro-batch."""
        number = next(self.numbers, None)
        self.is_repeated = number is None
        self.is_forward = not self.is_repeated
        self.micro = self.micro if number is None else number
        self._calls.clear()

    def count(self, place: StepPlace) -> int:
        """Return how often a module was called earlier in this pass: a virtual shard is a call."""
        self._calls[place] += 1
        return self._calls[place] - 1

    def leave(self) -> None:
        """End a forward pass."""
        self.is_forward = False


class _Recorded:
    """A gradient reduction calling a function after the gradients are reduced."""

    def __init__(self, reduction: GradientReduction, callback: Callable[[], None]) -> None:
        self._reduction, self._callback = reduction, callback

    def __getattr__(self, name: str) -> object:
        return getattr(self._reduction, name)

    def finish(self) -> None:
        self._reduction.finish()
        self._callback()


def box_digest(local: torch.Tensor, offset: Sequence[int], tensor_shape: Sequence[int]) -> int:
    """Return a 64-bit digest of a tensor's box. The digests of all boxes add up, modulo 2^64, to the tensor's digest.

    Args:
        local: The box.
        offset: Its corner in the tensor.
        tensor_shape: The tensor's shape.
    """
    if not local.numel():
        return 0
    if local.numel() > _CHUNK and len(local) > 1:
        half = len(local) // 2
        first = box_digest(local[:half], offset, tensor_shape)
        return (first + box_digest(local[half:], (offset[0] + half, *offset[1:]), tensor_shape)) & _MASK
    bits = local.contiguous().view(getattr(torch, BITS[local.itemsize])).to(torch.int64)
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    for dim, (size, corner) in enumerate(zip(local.shape, offset, strict=True)):
        places = torch.arange(corner, corner + size, device=local.device) * prod(tensor_shape[dim + 1 :])
        index = index + places.view(-1, *[1] * (local.ndim - dim - 1))
    mixed = bits + (index + 1) * _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    mixed = mixed ^ ((mixed >> 31) & ((1 << 33) - 1))
    return int(mixed.sum()) & _MASK
