"""The whole model and its optimizer's state from the ranks' pieces, under our names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from models.families import stored_tensors
from trainer.errors import CheckpointError, MismatchError
from trainer.interop.finite import require_finite
from trainer.interop.megatron.arguments import DescribedModel
from trainer.interop.megatron.names import Correspondence, MegatronTensor, by_our_name, correspondences, is_norm
from trainer.interop.megatron.shards import Piece, join, joined_shape, require_equal

MOMENTS, STEP, MASTERS = ("exp_avg", "exp_avg_sq"), "step", "masters"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_MOST_NAMED = 10

Pieces = Mapping[str, Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class JoinedModel:
    """A model in pieces.

    Args:
        described: our model.
        weights: the pieces of each of Megatron's tensors, by tensor-parallel rank, under numbered names.
        kept: the same of the optimizer's float32 copies (`MASTERS`) and of each moment; empty for weights alone.
        step: number of updates by the optimizer.
        where: the folder.
    """

    described: DescribedModel
    weights: Pieces
    kept: Mapping[str, Pieces]
    step: float
    where: object
    _ours: Mapping[str, Correspondence] = field(init=False)

    def __post_init__(self) -> None:
        found = correspondences(self.described.model, self.described.padded_vocab_size)
        object.__setattr__(self, "_ours", by_our_name(found))

    def check(self) -> None:
        """Refuse another model than the described one: tensors that are missing, unexpected or of another shape.

        Raises:
            MismatchError: listing the differences.
        """
        expected = {one.tensor.numbered: one.tensor for one in self._ours.values()}
        is_tied = self.described.model.tie_word_embeddings
        for kind, pieces in {"weights": self.weights, **self.kept}.items():
            problems = [f"missing: {name}" for name in expected if name not in pieces]
            allowed = expected.keys() | ({_OUTPUT} if is_tied else set())
            problems += [f"not of the model: {name}" for name in pieces if name not in allowed]
            problems += _odd_shapes(expected.values(), pieces)
            if problems:
                shown = "\n".join(f"  {problem}" for problem in problems[:_MOST_NAMED])
                raise MismatchError(
                    "The checkpoint holds another model than its arguments describe",
                    where=f"{self.where}, {kind}",
                    found=f"{len(problems)} differences:\n{shown}{' ...' if problems[_MOST_NAMED:] else ''}",
                )

    def read(self, name: str) -> torch.Tensor:
        """Return one of our tensors.

        Raises:
            CheckpointError: if copies of one of Megatron's differ, or a master weight does not round to its weight.
        """
        key, _, rest = name.partition(".")
        if key == STEP:
            return torch.tensor(self.step)
        if key in MOMENTS:
            return self._taken(rest, self.kept[key])
        one = self._ours[name]
        self._check_copies(one.tensor.numbered)
        found = self._taken(name, self.kept.get(MASTERS, self.weights))
        return found + 1.0 if self.described.adds_one and is_norm(one.tensor) else found

    def _taken(self, name: str, pieces: Pieces) -> torch.Tensor:
        one = self._ours[name]
        tensor = one.tensor
        where = f"{self.where}, {tensor.numbered}"
        joined = join(pieces[tensor.numbered], cut=tensor.cut, is_gated=tensor.is_gated, where=where)
        return one.take(name, joined)

    def _check_copies(self, name: str) -> None:
        """Compare what the checkpoint holds twice: a tied embedding, and the optimizer's copy of a weight."""
        if name == _EMBEDDING and self.described.model.tie_word_embeddings and _OUTPUT in self.weights:
            for rank, (one, other) in enumerate(zip(self.weights[name], self.weights[_OUTPUT], strict=True)):
                where = f"{self.where}, {name} of tensor-parallel rank {rank}"
                require_equal(one.read(), other.read(), what="the first and the last stage", where=where)
        for rank, (master, own) in enumerate(
            zip(self.kept[MASTERS][name], self.weights[name], strict=True) if MASTERS in self.kept else ()
        ):
            copy, weights = master.read(), own.read()
            if not torch.equal(copy.to(weights.dtype), weights):
                where = f"{self.where}, {name} of tensor-parallel rank {rank}"
                require_finite(copy, where=where)  # NaN is never equal to itself
                raise CheckpointError(
                    "The optimizer's copy of a weight does not round to the model's",
                    where=where,
                    fix="The weights were changed without their optimizer, or the files are of several saves. Take the "
                    "weights alone with --weights-only.",
                )


def _odd_shapes(expected: Iterable[MegatronTensor], pieces: Pieces) -> list[str]:
    found = []
    for tensor in expected:
        if tensor.numbered in pieces:
            shape = joined_shape(pieces[tensor.numbered], tensor.cut)
            if shape != tensor.shape:
                found.append(f"{tensor.numbered} is {list(shape)}, expected {list(tensor.shape)}")
    return found


def stored_count(model: JoinedModel) -> int:
    """Return the number of our tensors that the model has."""
    return len(stored_tensors(model.described.model))
