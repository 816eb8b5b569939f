"""What `reprise.list` says of old checkpoints without a check of them."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

import reprise
from reprise import CheckpointStatus, json_file
from reprise.errors import CheckpointError, TrainerError
from reprise.format import manifest
from reprise.format.names import FORMAT
from reprise.management.glance import StateParser
from tests.local_folders import save_on_two_hosts
from tests.messages import refused
from tests.profiles import scaled
from tests.unit.reprise.management.test_listing import save

UNCHECKED, WHOLE, DAMAGED = CheckpointStatus.UNCHECKED, CheckpointStatus.WHOLE, CheckpointStatus.DAMAGED


def statuses(*folders: Path, check: int | None) -> list[CheckpointStatus]:
    return [summary.status for summary in reprise.list(*folders, check=check)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collect the manifests that are parsed."""
    where, parse = list[object](), manifest.from_bytes

    def counted(data: bytes, **arguments: Any) -> manifest.Manifest:
        where.append(arguments["where"])
        return parse(data, **arguments)

    monkeypatch.setattr(manifest, "from_bytes", counted)
    return where


def test_the_newest_are_checked_and_older_ones_only_listed(tmp_path: Path, opened: list[object]) -> None:
    folder = save(tmp_path, 1, 2, 3, 4)
    (folder / "iter_0000001" / "hold").touch()
    whole = reprise.list(folder)
    opened.clear()
    listed = reprise.list(folder, check=2)
    assert opened == [folder / "iter_0000003" / "manifest.json", folder / "iter_0000004" / "manifest.json"]
    assert [summary.status for summary in listed] == [UNCHECKED, UNCHECKED, WHOLE, WHOLE]
    for old, same in zip(listed, whole, strict=True):
        assert (old.iteration, old.total_bytes, old.state, old.is_pinned, old.written_at) == (
            same.iteration, same.total_bytes, same.state, same.is_pinned, same.written_at,
        )  # fmt: skip
    opened.clear()
    assert statuses(folder, check=0) == [UNCHECKED] * 4
    assert opened == []


def test_damage_is_found_in_what_is_checked_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3)
    for iteration in (1, 3):
        path = folder / f"iter_000000{iteration}" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte of the tensors
        path.write_bytes(data)
    assert statuses(folder, check=2) == [UNCHECKED, WHOLE, DAMAGED]
    assert statuses(folder, check=None) == [DAMAGED, WHOLE, DAMAGED]
    (folder / "iter_0000001" / "manifest.json").unlink()
    (folder / "iter_0000002" / "trainer_state.json").write_text("{}")
    save(folder, 4)
    (folder / "iter_0000003" / "trainer_state.json").unlink()
    assert [str(s.problem) for s in reprise.list(folder, check=0)] == [str(s.problem) for s in reprise.list(folder)]
    assert statuses(folder, check=0) == [DAMAGED] * 3 + [UNCHECKED]


def test_weights_links_and_superseded_ones_take_no_place(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2, 3)
    save(folder / "weights", 3, 4)
    (folder / "iter_0000003").rename(folder / "iter_0000003.superseded-1")
    (folder / "iter_0000009").symlink_to(folder / "iter_0000001")
    expected = [UNCHECKED, WHOLE, UNCHECKED, DAMAGED, UNCHECKED, WHOLE]
    _, _, superseded, link, *_ = listed = reprise.list(folder, check=1)
    assert [summary.status for summary in listed] == expected
    assert (superseded.iteration, superseded.is_superseded, link.is_link) == (3, True, True)


def test_an_iteration_checked_on_one_host_is_checked_on_all(tmp_path: Path) -> None:
    """The host that is ahead would else seem to lack what the other one has."""
    a, b = save_on_two_hosts(tmp_path, 2)
    save(b, 3)
    for listed in (reprise.list(a, b, check=1), reprise.list(b, a, check=1)):
        parts = [summary for summary in listed if summary.iteration == 2]
        assert [(part.status, part.missing_everywhere) for part in parts] == [(CheckpointStatus.PART, "")] * 2
    assert {summary.missing_everywhere for summary in reprise.list(a, b, check=0)} == {None}
    (part,) = reprise.list(a, check=0)
    assert (part.status, part.share, part.total_bytes) == (UNCHECKED, None, reprise.list(a)[0].total_bytes)


def state(**members: Any) -> bytes:
    return json_file.to_bytes({"format": FORMAT, "iteration": 7, **members})


def test_states_by_members_are_those_of_the_document() -> None:
    draws, parser, path = random.Random(1), StateParser(), Path("iter_0000007")
    base = state(a=1, b=[1.0, {"c": "\u2028", "d": {}}], e='x,\n  "y', f={"g": [], "h": {"i": None}})
    seen = set()
    for _ in range(scaled(4000)):
        document = bytearray(base)
        for _ in range(draws.randrange(3)):
            at, size = draws.randrange(len(document)), draws.randrange(4)
            document[at : at + size] = draws.choice([b"", b",", b'\n  "', b'"', b"{", b"}", b"\n}\n", b"[", b"1", b" "])
        found = expected = None
        with contextlib.suppress(TrainerError):
            expected = json_file.parse(bytes(document), where=path)
        with contextlib.suppress(TrainerError):
            found = parser.parse(bytes(document), path)
        if expected is not None and (expected.get("format"), expected.get("iteration")) == (FORMAT, 7):
            assert repr(found) == repr(expected), document
            seen.add(document == base)
        else:
            assert found is None, document
    assert seen == {True, False}


def test_equal_members_of_states_are_parsed_once() -> None:
    parser, path = StateParser(), Path("somewhere")
    first, second = (parser.parse(state(groups=["w"], loss=loss), path) for loss in (1.5, 2.5))
    assert first["groups"] is second["groups"]
    assert (first["loss"], second["loss"]) == (1.5, 2.5)
    with refused(CheckpointError, "iter_0000008"):
        parser.parse(state(), Path("iter_0000008"))
