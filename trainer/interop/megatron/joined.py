"""The state of a Megatron run from the parts of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from reprise.errors import MismatchError
from trainer.interop.formats import listed
from trainer.interop.megatron.arguments import DescribedModel
from trainer.interop.megatron.names import MegatronTensor
from trainer.interop.megatron.shards import RankCopies, RankPiece, join, joined_shape
from trainer.interop.megatron.state import MegatronState

MASTERS = "masters"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

# The parts of each of Megatron's tensors, by tensor-parallel rank, under `MegatronTensor.numbered`.
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
        optimizer: the parts of the optimizer's copies (`MASTERS`) and of each moment; empty for weights alone.
        copies: compares tensors held in full by several ranks.

    Raises:
        MismatchError: listing tensors that are missing, unexpected or of another shape than the model's.
    """
    for kind, pieces in {"weights": weights, **optimizer}.items():
        _check(pieces, described, where=f"{where}, {kind}")

    def read(pieces: Pieces, tensor: MegatronTensor, kind: str) -> torch.Tensor:
        where_tensor = f"{where}, {kind} of {tensor.numbered}"
        parts = pieces[tensor.numbered]
        return join(parts, cut=tensor.cut, is_gated=tensor.is_gated, copies=copies, where=where_tensor)

    def read_copied(pieces: Pieces, tensor: MegatronTensor, kind: str) -> torch.Tensor:
        if tensor.name == EMBEDDING and described.model.tie_word_embeddings and OUTPUT in pieces:
            for rank, (first, last) in enumerate(zip(pieces[EMBEDDING], pieces[OUTPUT], strict=True)):
                where_rank = f"{where}, {kind} of {EMBEDDING} of tensor-parallel rank {rank}"
                copies.compare(first.read(), last.read(), what="the first and the last stage", where=where_rank)
        return read(pieces, tensor, kind)

    masters, moments = optimizer.get(MASTERS), {kind: pieces for kind, pieces in optimizer.items() if kind != MASTERS}
    read_masters: Callable[[MegatronTensor], torch.Tensor] | None = None
    if masters is not None:
        read_masters = partial(read_copied, masters, kind=MASTERS)
    return MegatronState(
        weights=partial(read_copied, weights, kind="weights"),
        masters=read_masters,
        moments=(lambda kind, tensor: read(moments[kind], tensor, kind)) if moments else None,
        step=step,
        iteration=iteration,
        consumed_samples=consumed_samples,
    )


def _check(pieces: Pieces, described: DescribedModel, *, where: object) -> None:
    """Refuse pieces of another model; a tied output layer may be there twice."""
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
            "A Megatron checkpoint holds another model than its arguments describe",
            where=where,
            found=listed(problems, "difference"),
        )
