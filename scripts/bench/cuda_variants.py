"""Changes of the training step that are not in the trainer: each has to be faster on a device first.

Some are no change and stand beside a change: the trainer's own dropout, whose seeds break the graph of every block,
beside a dropout without seeds, and its own `train.activation_checkpointing` beside a selective form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.layers import Dropout, OutputLayer, token_loss
from models.network import Model
from scripts.bench.cuda_group import Setting, build_training, random_windows, step_of
from scripts.bench.subject import Subject
from trainer.launch.process_group import Cluster
from trainer.optim.adamw import set_learning_rate, squared_norm
from trainer.training.step import forward_backward

# Of the forward pass: where its loss is computed, and what is compiled.
LOSS, WHOLE, CHUNKS = "reprise, loss compiled", "reprise, whole model and loss compiled", "reprise, loss in chunks"
LOSS_VARIANTS = (LOSS, WHOLE, CHUNKS)
# Of the step around it.
UNWAITED = "reprise, figures read one step late"
DROPOUT, UNSEEDED = "reprise, dropout 0.1", "reprise, dropout 0.1 without seeds"
RECOMPUTE, SELECTIVE = "reprise, blocks recomputed", "reprise, blocks recomputed, products kept"
STEP_VARIANTS = (UNWAITED, DROPOUT, UNSEEDED, RECOMPUTE, SELECTIVE)
VARIANTS = (*LOSS_VARIANTS, *STEP_VARIANTS)
_LR = 1e-4
_CHUNKS = 4  # of the sequence
_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def variant(name: str, setting: Setting, cluster: Cluster) -> Callable[[], float]:
    """Return our step with a change; it returns the loss."""
    if name in (DROPOUT, UNSEEDED):
        setting = replace(setting, model=replace(setting.model, dropout=0.1))
    subject = build_training(replace(setting, compiles=setting.compiles and name != WHOLE), cluster)
    if name == UNWAITED:
        return _unwaited(subject, setting)
    (part,) = subject.state.parts
    compiled: Callable[..., Any] = torch.compile if setting.compiles else lambda function: function
    if name == UNSEEDED:
        for module in part.model.modules():
            if isinstance(module, Dropout):
                module.seed = partial(_unseeded, module)  # type: ignore[method-assign]
    if name == RECOMPUTE:
        part.model.activation_checkpointing = True
    if name == SELECTIVE:
        for block in part.model.blocks.values():
            _recompute_all_but_products(block)
    if name in LOSS_VARIANTS:
        subject = replace(subject, context=replace(subject.context, loss=_loss(name, part.model, compiled)))
    return step_of(subject, setting)


def _loss(
    name: str, model: Model, compiled: Callable[..., Any]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if name == WHOLE:
        return _with_model(model, compiled)
    if name == CHUNKS:
        return _in_chunks(model.lm_head, compiled)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = compiled(token_loss)
    return loss


def _unseeded(dropout: Dropout, key: int | None, device: torch.device) -> float:
    """Return the drop probability, and leave the generator as it is: nothing then breaks a graph."""
    return 0.0 if key is None else dropout.p


def _with_model(model: Model, compiled: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that runs the model itself, in a single graph; the call of `model` before it returns the tokens."""
    forward = model.forward

    def keep(tokens: torch.Tensor, **_: object) -> torch.Tensor:
        return tokens

    model.forward = keep

    @compiled
    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_loss(forward(tokens), targets)

    return cast(Callable[[torch.Tensor, torch.Tensor], torch.Tensor], loss)


def _in_chunks(head: OutputLayer, compiled: Callable[..., Any]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a loss that makes the logits itself, chunk by chunk and once more in the backward pass; `head` makes none.

    The loss is the mean of the means of the chunks, which are equally long where their number divides the sequence.
    """
    make, tables = head.forward, list[torch.Tensor | None]()

    def keep(x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        tables[:] = [table]
        return x

    head.forward = keep  # type: ignore[method-assign]

    @compiled
    def of_chunk(x: torch.Tensor, targets: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        return token_loss(make(x, table), targets)

    def loss(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(_CHUNKS, 1), targets.chunk(_CHUNKS, 1), strict=True)
        losses = [
            checkpoint(of_chunk, *part, tables[0], use_reentrant=False, preserve_rng_state=False) for part in parts
        ]
        return torch.stack(losses).mean()

    return loss


def _recompute_all_but_products(block: torch.nn.Module) -> None:
    """Keep the results of matrix products and attention for the backward pass, and recompute the rest of a block."""
    forward, contexts = block.forward, partial(create_selective_checkpoint_contexts, _PRODUCTS)

    def recomputed(*inputs: object) -> object:  # inside the compiled block: the compiler sees what is kept
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    block.forward = recomputed


def _unwaited(subject: Subject, setting: Setting) -> Callable[[], float]:
    """Return a step in which the host never waits for the work that it has just given to the device.

    Its batch comes from pinned memory, the gradients are clipped by a norm that stays on the device, and it returns the
    loss of the step before; NaN the first time.
    """
    device, state = subject.cluster.device, subject.state
    is_accelerator = device.type != "cpu"
    windows = random_windows(setting, torch.device("cpu"))
    windows = windows.pin_memory() if is_accelerator else windows
    last = torch.full((2,), torch.nan)
    last_copied: torch.Event | None = None

    def step() -> float:
        nonlocal last, last_copied
        for parameter in state.parameters():
            parameter.grad = None
        with subject.context.loss_context():
            losses = forward_backward(state, [windows.to(device, non_blocking=True)], [1], subject.context)
        subject.context.reduction.finish()
        norm = squared_norm(subject.context.grad_norm_parameters).sqrt()
        gradients = [parameter.grad for parameter in state.parameters() if parameter.grad is not None]
        torch._foreach_mul_(gradients, (1.0 / norm).clamp(max=1.0).float())
        for part in state.parts:
            set_learning_rate(part.optimizer, _LR)
            part.optimizer.step()
        if last_copied is not None:
            last_copied.synchronize()
        loss = float(last[0])
        last = torch.stack([torch.stack(losses).sum(), norm]).to("cpu", non_blocking=True)
        last_copied = torch.accelerator.current_stream(device).record_event() if is_accelerator else None
        return loss

    return step
