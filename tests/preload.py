"""What every launched rank needs, imported once in the fork server so that a rank starts in a fraction of a second."""

import hydra  # noqa: F401
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.tensorboard  # noqa: F401

import trainer.__main__
import trainer.build
import trainer.loop
import trainer.restore  # noqa: F401
