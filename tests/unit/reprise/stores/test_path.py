"""A path of a store has the parents, the order and the equality of a path."""

from __future__ import annotations

from reprise.stores.locations import location


def test_a_folder_of_a_store_is_found_among_the_parents() -> None:
    path = location("s3://bucket/run/checkpoints/iter_0000004")
    parents = [location("s3://bucket/run/checkpoints"), location("s3://bucket/run"), location("s3://bucket")]
    assert list(path.parents)[:3] == parents
    assert location("s3://bucket/other") not in path.parents
    assert location("gs://bucket/run") not in path.parents
    assert str(path.parents[-1]) == ""
    assert sorted([path, *parents]) == [*reversed(parents), path]
