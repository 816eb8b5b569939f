"""Pipeline parallelism: divides layers among stages, and runs torch's 1F1B and interleaved schedules.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from models.config import Stage
from models.families import aliases
from models.network import Model
from reprise.tensors import local_of
from trainer.data.documents import WindowForm

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


# Returns the mean cross entropy, given this rank's logits and targets.
Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divide_layers(n_layer: int, stages: int) -> list[range]:
    """Return each stage's layers: equal shares, plus another layer in `n_layer % stages` middle stages.

    The first and last stages get fewer layers, because they also hold the embedding and the output layer. If an odd
    number of stages is smaller, the extra one is at the end, where the loss is computed. LLaMA-3 405B has 126 layers to
    balance 16 stages in the same way (Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2).
    """
    share, more = divmod(n_layer, stages)
    first = (stages - more) // 2
    starts = [stage * share + min(max(stage - first, 0), more) for stage in range(stages + 1)]
    return [range(lo, hi) for lo, hi in itertools.pairwise(starts)]


def stages_of(n_layer: int, *, pp: int, vpp: int, rank: int) -> list[Stage]:
    """Return the stages on pipeline rank `rank`: numbers rank, rank + pp, ... out of pp * vpp."""
    layers = divide_layers(n_layer, pp * vpp)
    last = pp * vpp - 1
    return [Stage(layers[n], first=n == 0, last=n == last) for n in range(rank, pp * vpp, pp)]


class Pipeline:
    """A rank's stages and their schedule. Every rank in the pipeline makes the same calls.

    Args:
        tokens, hidden, logits: Tensors like a micro-batch's tokens, the hidden states between stages, and the logits.
        loss: Called on the last stage with a micro-batch's logits and targets.
        takes_mean: Whether to divide gradients by this rank's micro-batch count after the last micro-batch.
        form: See `ParallelContext`. Every rank has the windows, so each stage reads their documents locally.
    """

    def __init__(
        self,
        parts: Sequence[Model],
        mesh: DeviceMesh,
        *,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        loss: Loss,
        form: WindowForm,
        takes_mean: bool,
    ) -> None:
        from torch.distributed.pipelining import PipelineStage

        pp, rank = mesh.size(), mesh.get_local_rank()
        stages = [
            PipelineStage(
                part,
                rank + index * pp,
                pp * len(parts),
                tokens.device,
                input_args=(tokens if part.stage.first else hidden,),
                output_args=(logits if part.stage.last else hidden,),
                group=mesh.get_group(),
            )
            for index, part in enumerate(parts)
        ]
        self._is_first, self._is_last = rank == 0, rank == pp - 1
        self._micro_batch_size = len(tokens)
        self._stages, self._takes_mean = stages, takes_mean
        self._loss = loss
        self._form = form
        # By micro-batch count. They share the stages, which keep receive buffers for each micro-batch.
        self._schedules: dict[int, PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def forward_backward(self, windows: torch.Tensor, keys: torch.Tensor) -> list[torch.Tensor]:
        """Accumulate the loss gradients. Return each micro-batch's loss on the last stage, else [].

        Args:
            windows: int64 [samples, seq_length + 1], this coordinate's samples: a multiple of the micro-batch size.
            keys: int64 [micro-batches], the dropout keys.
        """
        return self._run(self._schedule_of(windows).step, windows, {"dropout_key": keys})

    def evaluate(self, windows: torch.Tensor) -> list[torch.Tensor]:
        """Return each micro-batch's loss on the last stage, else []. Windows must have the training shape."""
        losses = self._run(self._schedule_of(windows).eval, windows, {})
        for stage in self._stages:
            _require_gradients(stage)
        return losses

    def _schedule_of(self, windows: torch.Tensor) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """Return a batch's schedule, and prepare the stages for its micro-batch count."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

        count = windows.shape[0] // self._micro_batch_size
        if count not in self._schedules:
            shared: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": self._takes_mean}
            self._schedules[count] = (
                Schedule1F1B(self._stages[0], count, **shared)
                if len(self._stages) == 1
                else ScheduleInterleaved1F1B(self._stages, count, **shared)  # type: ignore[arg-type]
            )
        for stage in self._stages:
            stage.chunks = count  # torch sets it at a schedule's first step only
        return self._schedules[count]

    def _run(
        self, call: Callable[..., object], windows: torch.Tensor, extra: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        inputs = self._form.split(windows)
        # torch 2.11 refuses evaluation inputs whose strides differ from those of a stage's example.
        arguments = (inputs.tokens.contiguous(),) if self._is_first else ()
        extra = extra | inputs.keywords()
        if self._is_last:
            call(*arguments, target=inputs.targets, losses=losses, return_outputs=False, **extra)
        else:
            call(*arguments, return_outputs=False, **extra)
        return [local_of(loss) for loss in losses]


def _require_gradients(stage: PipelineStage) -> None:
    """Make receive buffers require gradients: torch 2.11 leaves that out if an evaluation prepared them."""
    for infos in stage.args_recv_info.values():
        for info in infos:
            if isinstance(buffer := getattr(info, "buffer", None), torch.Tensor):
                buffer.requires_grad_()


def embedding_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group with this rank's first and last stage. None on stages between. A collective call on all ranks.

    Args:
        mesh: The mesh over all ranks, pp first.
    """
    local_group: dist.ProcessGroup | None = None
    columns = mesh.mesh.flatten(1)  # [pp, ranks per stage]
    for column in range(columns.shape[1]):
        ranks = [int(columns[0, column]), int(columns[-1, column])]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            local_group = group
    return local_group


def sum_tied_gradients(parts: Sequence[Model], group: dist.ProcessGroup) -> None:
    """All-reduce the gradients for both copies of a tied embedding, which keeps the copies bit-identical."""
    for part in parts:
        for parameter in tied_parameters(part):
            if parameter.grad is not None:
                dist.all_reduce(local_of(parameter.grad), group=group)


def tied_parameters(part: Model) -> list[nn.Parameter]:
    """Return a stage's parameters tied to another parameter."""
    tied = {name for pair in aliases(part.config).items() for name in pair}
    return [parameter for name, parameter in part.named_parameters() if name in tied]
