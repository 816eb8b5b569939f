"""The benchmark of `parallel.invariant_ranks` runs on one rank and on two."""

from __future__ import annotations

import pytest

from scripts.bench import invariant


@pytest.mark.nightly
def test_every_way_is_measured_with_and_without_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "WAYS", (invariant.MeasuredTopology(1), invariant.MeasuredTopology(2, 3)))
    assert invariant.main(["tiny", "--rounds", "2"]) == 0
    alone, sharded = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert alone[:4] == ["1", "1", "-", "0"]
    assert sharded[:4] == ["2", "1", "-", "3"]
    assert "1.0013" in sharded  # what it sends / the bytes of a reduce-scatter: rows are padded to two shards


@pytest.mark.nightly
def test_virtual_shards_are_measured_on_one_rank_and_on_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert invariant.main(["tiny", "--rounds", "2", "--shards", "2"]) == 0
    alone, cut = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert alone[:4] == ["1", "1", "2", "0"]
    assert cut[:4] == ["2", "2", "2", "0"]


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        invariant.main(["huge"])
