"""Builds a Megatron run's state from its ranks' parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from reprise.errors import MismatchError
from trainer.interop.formats import listed
from trainer.interop.megatron.arguments import DescribedModel
from trainer.interop.megatron.names import MegatronTensor
from trainer.interop.megatron.shards import RankCopies, RankPiece, join, joined_shape
from trainer.interop.megatron.state import MOMENTS, WEIGHTS, MegatronState

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

# The parts of Megatron's tensors, by tensor-parallel rank, under `MegatronTensor.numbered`.
Pieces = Mapping[str, Sequence[RankPiece]]


def joined_state(
    weights: Pieces,
    optimizer: Mapping[str, Pieces],
    described: DescribedModel,
    *,
    step: float,
    iteration: int,
    consumed_samples: int | None,
    copies: RankCopies,
    where: object,
) -> MegatronState:
    """Return a state from its pieces, which are read tensor by tensor.

    Args:
        optimizer: Parts of the optimizer's copies (`MASTERS`) and each moment. Empty for weights alone.
        copies: Compares tensors held in full by several ranks.

    Raises:
        MismatchError: Tensors are missing, unexpected or have another shape than the model's. The error lists them.
    """
    pieces_of = {WEIGHTS: weights, **optimizer}
    for kind, pieces in pieces_of.items():
        _check(pieces, described, where=f"{where}, {kind}")

    def read(kind: str, tensor: MegatronTensor) -> torch.Tensor:
        pieces = pieces_of[kind]
        if (
            kind not in MOMENTS
            and tensor.name == EMBEDDING
            and described.model.tie_word_embeddings
            and OUTPUT in pieces
        ):
            for rank, (first, last) in enumerate(zip(pieces[EMBEDDING], pieces[OUTPUT], strict=True)):
                where_rank = f"{where}, {kind} of {EMBEDDING} of tensor-parallel rank {rank}"
                copies.compare(first.read(), last.read(), what="the first and the last stage", where=where_rank)
        where_tensor = f"{where}, {kind} of {tensor.numbered}"
        parts = pieces[tensor.numbered]
        return join(parts, cut=tensor.cut, is_gated=tensor.is_gated, copies=copies, where=where_tensor)

    return MegatronState({kind: partial(read, kind) for kind in pieces_of}, step, iteration, consumed_samples)


def _check(pieces: Pieces, described: DescribedModel, *, where: object) -> None:
    """Refuse pieces from another model. A tied output layer may be stored twice."""
    model = described.model
    expected = {correspondence.tensor.numbered: correspondence.tensor for correspondence in described.correspondences()}
    problems = [f"missing: {name}" for name in expected if name not in pieces]
    allowed = expected.keys() | ({OUTPUT} if model.tie_word_embeddings else set())
    problems += [f"not of the model: {name}" for name in pieces if name not in allowed]
    for name, tensor in expected.items():
        shape = joined_shape(pieces[name], tensor.cut) if name in pieces else tensor.shape
        if shape != tensor.shape:
            problems.append(f"{name} is {list(shape)}, expected {list(tensor.shape)}")
    if problems:
        raise MismatchError(
            "The Megatron checkpoint's tensors do not match its arguments",
            where=where,
            found=listed(problems, "difference"),
        )
