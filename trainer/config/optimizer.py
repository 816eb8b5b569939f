"""The `optimizer` section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from trainer.config.dtype import Dtype

_MOST_BFLOAT16 = 0.996  # below 1 - 2^-8: a smaller step may be less than half the distance to the next bfloat16


class OptimizerName(Enum):
    """An optimizer. `muon` updates the blocks' matrices with Muon and all other parameters with AdamW."""

    adamw = "adamw"
    muon = "muon"


@dataclass
class OptimizerSection:
    """Optimizer settings.

    Args:
        name: `muon` uses Muon for the blocks' matrices, AdamW for the rest.
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, for matrices only.
        adam_beta1: Decay rate for the first moment.
        adam_beta2: Decay rate for the second moment.
        adam_eps: Epsilon added to the update's denominator.
        muon_momentum: Nesterov momentum: the share kept by a step.
        muon_ns_steps: Newton-Schulz iterations to orthogonalize an update.
        muon_match_rms_adamw: Scale updates by 0.2 sqrt(max(rows, columns)), to AdamW's size, for the same `lr` and
            `weight_decay` (torch's `match_rms_adamw`). false scales by sqrt(max(1, rows / columns)), with the stored
            matrix's shape (`original`).
        moments_dtype: Dtype for the moments in memory and in checkpoints. A step updates them in float32, and
            `bfloat16` rounds them to nearest even.
    """

    name: OptimizerName = OptimizerName.adamw
    lr: float = 1e-3
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    muon_momentum: float = 0.95
    muon_ns_steps: int = 5
    muon_match_rms_adamw: bool = True
    moments_dtype: Dtype = Dtype.float32


def optimizer_problems(optimizer: OptimizerSection) -> Iterator[str]:
    """List decay rates too near to 1 for moments in bfloat16."""
    for name in ("adam_beta1", "adam_beta2", "muon_momentum"):
        if optimizer.moments_dtype is Dtype.bfloat16 and _MOST_BFLOAT16 < getattr(optimizer, name) < 1:
            yield (
                f"optimizer.{name}={getattr(optimizer, name)}: must be at most {_MOST_BFLOAT16} with "
                "optimizer.moments_dtype=bfloat16, which rounds smaller changes of a moment away"
            )
