"""What every launched rank needs, imported once in the fork server so that a rank starts in a fraction of a second.

That includes pytest and the helpers below `tests`: a rank that calls a function of a test's module imports this module.
A configuration is composed there too: the parser of overrides fills its tables at the first one, and a rank that is
forked later finds them full. So is the commit of the source, for which git reads the whole tree. No tensor is computed:
autograd's threads would not live on in a rank.
"""

import encodings.idna  # noqa: F401
import gc
import multiprocessing.synchronize  # noqa: F401

import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.pipelining
import torch.profiler  # noqa: F401

import reprise
import tests.crash.hosts
import tests.crash.moments
import tests.crash.small_run
import tests.fakes  # noqa: F401
import trainer.__main__
import trainer.config.compose
import trainer.launch.process_group
import trainer.launch.relaunch
import trainer.launch.watchdog
import trainer.metrics.event_file
import trainer.parallel.tensor
import trainer.parallel.tree_reduce_scatter
import trainer.record.versions
import trainer.run.build
import trainer.start.fill
import trainer.train_command
import trainer.training.loop

for name in reprise.__all__:  # which it imports at their first use
    getattr(reprise, name)
trainer.config.compose.compose(["model=gpt2_tiny", "train.train_iters=3", "optimizer.lr=0.001"])
trainer.record.versions.source_commit()
gc.freeze()  # a collection in a rank would copy the pages of all these modules
