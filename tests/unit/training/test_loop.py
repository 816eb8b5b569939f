"""The loop's iterations and their lines."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from reprise.ranks import single_rank_channel
from tests.harness import built, filled
from tests.unit.start.test_decide import cluster_of, config_in
from trainer.training.loop import train


def test_memory_is_measured_at_the_log_interval_and_at_the_end(tmp_path: Path) -> None:
    config = config_in(tmp_path, "train.train_iters=5", "logging.log_interval=2", "checkpoint.save=null")
    run, log = filled(built(config, cluster_of(single_rank_channel()))), Mock()
    run.logs = (log,)
    train(run)
    lines = [call.args for call in log.iteration.call_args_list]
    assert [record.iteration for record, memory in lines if memory is not None] == [2, 4, 5]
