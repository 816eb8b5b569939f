"""Describes the folders of single hosts: the share of a checkpoint in one, and in several together."""

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
    """Return in words the share of a checkpoint in the folder of a host; empty for a folder that is not of one host."""
    host = checkpoint.host
    if host is None:
        return ""
    names = "copies alone" if host.host is None else host.hosts[host.host]
    held, total = held_bytes(checkpoint), sum(place.spec.total_bytes for place in read_places(checkpoint).values())
    share = "100 %" if host.is_whole else f"{min(99, round(100 * held / max(1, total)))} %"
    lacks = describe(missing(host.writers, [host.held]), host)
    return f"{share} of {len(host.hosts)} host{'s' * (len(host.hosts) > 1)}: {names}" + (
        f"; missing {lacks}" if lacks else ""
    )


def held_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the tensors that lie in a folder."""
    places = read_places(checkpoint)
    if checkpoint.host is None:
        return sum(place.spec.total_bytes for place in places.values())
    return bytes_of(checkpoint, places, checkpoint.host.held)


def pieces_by_host(checkpoint: Checkpoint) -> list[Row]:
    """Return a row for each host that saved a local checkpoint: how many of its pieces lie in this folder."""
    host, places, rows = checkpoint.host, read_places(checkpoint), list[Row]()
    for number, name in enumerate(() if host is None else host.hosts):
        assert host is not None
        written = host.written_by(number)
        held = without(written, without(written, host.held))
        pieces, count = (sum(map(len, numbers.values())) for numbers in (written, held))
        row = {"host": name, "pieces": pieces, "held": count, "missing": pieces - count}
        rows.append({**row, "bytes": bytes_of(checkpoint, places, held)})
    return rows


def without_damage(checkpoint: Checkpoint) -> HostFile | None:
    """Return the `host.json` of a local checkpoint with only those pieces that are not damaged; reads all of them."""
    if checkpoint.host is None:
        return None
    try:
        damaged = damaged_pieces(checkpoint, read_places(checkpoint), checkpoint.host.held)
    except TrainerError:  # a header
        return None
    return replace(checkpoint.host, held=without(checkpoint.host.held, damaged))


def together(parts: Iterable[tuple[int, HostFile]]) -> dict[int, str]:
    """Return by iteration whether these parts are whole together, or which pieces none of them has.

    Args:
        parts: the iteration and the `host.json` of each.
    """
    found: dict[int, str] = {}
    for candidate in candidates([{iteration: host} for iteration, host in parts]):
        lacks = candidate.describe_missing()
        found.setdefault(candidate.iteration, f"missing {lacks}" if lacks else WHOLE)
    return found
