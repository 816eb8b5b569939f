"""The benchmark of `parallel.invariant_ranks` runs on one rank and on two."""

from __future__ import annotations

import pytest

from scripts.bench import invariant


def test_every_way_is_measured_with_and_without_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "WAYS", ((1, 0), (2, 3)))
    assert invariant.main(["tiny", "--rounds", "2"]) == 0
    alone, sharded = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert alone[:2] == ["1", "0"]
    assert sharded[:2] == ["2", "3"]
    assert "1.0013" in sharded  # what it sends / the bytes of a reduce-scatter: rows are padded to two shards


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(SystemExit):
        invariant.main(["huge"])
