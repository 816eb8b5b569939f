"""What virtual shards cost on one rank is measured in turns."""

from __future__ import annotations

import pytest

from scripts.bench import shards


def test_every_number_of_shards_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shards", "2", "4", "--tokens", "8", "--rounds", "2", "--set", "model.n_embd=16"]
    assert shards.main(["gpt2_tiny", *options]) == 0
    title, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert title.startswith("gpt2_tiny, 8 tokens, float32")
    assert [row.split()[0] for row in rows] == ["-", "2", "4"]
    assert "1.000 (1.000 to 1.000)" in rows[0]


def test_sides_take_turns() -> None:
    order: list[int] = []
    seconds = shards.measure([lambda: order.append(0), lambda: order.append(1)], 2)
    assert order == [1, 0, 0, 1, 1, 0]
    assert [len(times) for times in seconds] == [2, 2]
