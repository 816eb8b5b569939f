from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest

from reprise.errors import DataError
from tests.reported_runs import BEGAN, LENGTH, steady_run
from trainer.report.history import read_history


def test_values_of_a_log_keep_their_bits(tmp_path: Path) -> None:
    losses = [0.1 + 0.2, math.nan, math.inf, 1e-310]
    log = read_history(steady_run(tmp_path, losses)).log
    assert [value.hex() for value in log.columns.loss.tolist()] == [loss.hex() for loss in losses]


def test_the_sequence_length_follows_from_speed_and_samples(tmp_path: Path) -> None:
    assert read_history(steady_run(tmp_path, [1.0] * 5)).tokens_per_sample == LENGTH


def test_a_launch_of_an_older_version_is_told_by_its_first_line(tmp_path: Path) -> None:
    (launch,) = read_history(steady_run(tmp_path, [1.0] * 5)).launches
    assert (launch.began, launch.start_seconds, launch.ended) == (BEGAN, 2.0, BEGAN + 7)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    log = steady_run(tmp_path, [1.0, 2.0]) / "metrics.jsonl"
    log.write_text(log.read_text() + '{"iteration": 3, "lo')
    assert read_history(tmp_path).log.columns.iteration.tolist() == [1, 2]


def test_a_malformed_line_is_refused_with_its_file(tmp_path: Path) -> None:
    log = steady_run(tmp_path, [1.0]) / "metrics.jsonl"
    log.write_text(log.read_text() + "no record\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_history(tmp_path)


def test_a_log_is_read_in_parts(tmp_path: Path) -> None:
    losses = numpy.arange(10_000) / 7
    assert numpy.array_equal(read_history(steady_run(tmp_path, losses.tolist())).log.columns.loss, losses)
