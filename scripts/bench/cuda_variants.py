"""Changes of the training step that are not in the trainer: each has to be faster on a device first.

Some are no change and stand beside a change: the trainer's own dropout, whose seeds break the graph of every block,
beside a dropout without seeds, and its own `train.activation_checkpointing` beside a selective form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from models.layers import Dropout
from scripts.bench.cuda_group import Setting, build_training, step_of
from trainer.launch.process_group import Cluster

DROPOUT, UNSEEDED = "reprise, dropout 0.1", "reprise, dropout 0.1 without seeds"
RECOMPUTE, SELECTIVE = "reprise, blocks recomputed", "reprise, blocks recomputed, products kept"
VARIANTS = (DROPOUT, UNSEEDED, RECOMPUTE, SELECTIVE)
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
    subject = build_training(setting, cluster)
    (part,) = subject.state.parts
    if name == UNSEEDED:
        for module in part.model.modules():
            if isinstance(module, Dropout):
                module.seed = partial(_unseeded, module)  # type: ignore[method-assign]
    if name == RECOMPUTE:
        part.model.activation_checkpointing = True
    if name == SELECTIVE:
        for block in part.model.blocks.values():
            _recompute_all_but_products(block)
    return step_of(subject, setting)


def _unseeded(dropout: Dropout, key: int | None, device: torch.device) -> float:
    """Return the drop probability, and leave the generator as it is: nothing then breaks a graph."""
    return 0.0 if key is None else dropout.p


def _recompute_all_but_products(block: torch.nn.Module) -> None:
    """Keep the results of matrix products and attention for the backward pass, and recompute the rest of a block."""
    forward, contexts = block.forward, partial(create_selective_checkpoint_contexts, _PRODUCTS)

    def recomputed(*inputs: object) -> object:  # inside the compiled block: the compiler sees what is kept
        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    block.forward = recomputed
