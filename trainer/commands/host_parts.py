"""Describes the folders of single hosts: the share of a checkpoint in each, and in several together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reprise.errors import TrainerError
from reprise.format.host_file import HostFile, missing, without
from reprise.loading.blocks import bytes_of
from reprise.local.fetch import damaged_pieces
from reprise.local.survey import candidates, describe
from reprise.reading import Checkpoint, read_places
from trainer.commands.rows import Row

PART = "a part"  # of a checkpoint, the rest of which lies on other hosts
WHOLE = "whole together"


def describe_held(checkpoint: Checkpoint) -> str:
    """Return in words the share of a checkpoint in the folder of a host; empty for a folder of no single host."""
    host = checkpoint.host
    if host is None:
        return ""
    names = "copies alone" if host.host is None else host.hosts[host.host]
    held_size, total = held_bytes(checkpoint), sum(place.spec.total_bytes for place in read_places(checkpoint).values())
    share = "100 %" if host.is_whole else f"{min(99, round(100 * held_size / max(1, total)))} %"
    lacks = describe(missing(host.writers, [host.held]), host)
    return f"{share} of {len(host.hosts)} host{'s' * (len(host.hosts) > 1)}: {names}" + (
        f"; missing {lacks}" if lacks else ""
    )


def held_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the tensors in a folder."""
    places = read_places(checkpoint)
    if checkpoint.host is None:
        return sum(place.spec.total_bytes for place in places.values())
    return bytes_of(checkpoint, places, checkpoint.host.held)


def pieces_by_host(checkpoint: Checkpoint) -> list[Row]:
    """Return a row for each host of a local checkpoint: the number of its pieces in this folder."""
    host, places, rows = checkpoint.host, read_places(checkpoint), list[Row]()
    for number, name in enumerate(() if host is None else host.hosts):
        assert host is not None
        pieces_of_host = host.written_by(number)
        present = without(pieces_of_host, without(pieces_of_host, host.held))
        pieces, count = (sum(map(len, numbers.values())) for numbers in (pieces_of_host, present))
        row = {"host": name, "pieces": pieces, "held": count, "missing": pieces - count}
        rows.append({**row, "bytes": bytes_of(checkpoint, places, present)})
    return rows


def without_damage(checkpoint: Checkpoint) -> HostFile | None:
    """Return the `host.json` of a local checkpoint without its damaged pieces; reads all of them."""
    if checkpoint.host is None:
        return None
    try:
        damaged = damaged_pieces(checkpoint, read_places(checkpoint), checkpoint.host.held)
    except TrainerError:  # a header
        return None
    return replace(checkpoint.host, held=without(checkpoint.host.held, damaged))


def completeness_of(parts: Iterable[tuple[int, HostFile]]) -> dict[int, str]:
    """Return by iteration whether the parts are complete together, or the pieces in none of them.

    Args:
        parts: the iteration and the `host.json` of each.
    """
    completeness: dict[int, str] = {}
    for candidate in candidates([{iteration: host} for iteration, host in parts]):
        lacks = candidate.describe_missing()
        completeness.setdefault(candidate.iteration, f"missing {lacks}" if lacks else WHOLE)
    return completeness
