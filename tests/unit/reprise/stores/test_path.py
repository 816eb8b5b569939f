"""A path of a store has the parents, the order and the equality of a path."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reprise.stores import path as path_module
from reprise.stores.locations import location, manifest_version


def test_a_folder_of_a_store_is_found_among_the_parents() -> None:
    path = location("s3://bucket/run/checkpoints/iter_0000004")
    parents = [location("s3://bucket/run/checkpoints"), location("s3://bucket/run"), location("s3://bucket")]
    assert list(path.parents)[:3] == parents
    assert location("s3://bucket/other") not in path.parents
    assert location("gs://bucket/run") not in path.parents
    assert str(path.parents[-1]) == ""
    assert sorted([path, *parents]) == [*reversed(parents), path]


@pytest.mark.parametrize("other", [(101, None, 5.0), (100, None, 7.0), (100, '"b"', 5.0)])
def test_a_checkpoint_saved_again_has_another_version(
    monkeypatch: pytest.MonkeyPatch, other: tuple[int, str | None, float]
) -> None:
    answers = [(100, None, 5.0), (100, None, 5.0), other]
    monkeypatch.setattr(path_module, "CHILD_CLIENT", SimpleNamespace(head=lambda _: answers.pop(0)))
    first, same, new = (manifest_version(location("s3://bucket/run/iter_0000004")) for _ in range(3))
    assert first == same != new
