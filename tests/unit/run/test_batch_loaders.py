"""The loaders of a run say when an evaluation repeats its samples."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from reprise.ranks import single_rank_channel
from tests.unit.start.test_decide import cluster_of, config_in
from trainer.run.batch_loaders import build_loaders
from trainer.run.run_data import open_data


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        (1, ""),
        (2, "takes 8 samples .* has 6, which repeat in order"),
    ],
)
def test_repeated_validation_samples_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batches: int, said: str
) -> None:
    (tmp_path / "text.txt").write_text("0123456789" * 100)
    data = ["data=text", f"data.path={tmp_path}/text.txt", f"data.cache={tmp_path}/cache", "data.valid_fraction=0.1"]
    train = ["train.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=4", "train.eval_interval=5"]
    config = config_in(tmp_path / "run", *data, *train, f"train.eval_iters={batches}")
    with caplog.at_level(logging.WARNING):
        cluster = cluster_of(single_rank_channel())
        build_loaders(config, cluster, config.parallel.topology(1), open_data(config, cluster))
    (message,) = caplog.messages or [""]
    assert re.search(said, message) if said else message == ""
