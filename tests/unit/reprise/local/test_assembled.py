"""The files that a mirror assembles of the pieces of several hosts, while some of these hosts fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from reprise.errors import CheckpointError
from reprise.format.manifest import digest_of
from reprise.local.part_server import PartServer
from reprise.storage.files import Files
from reprise.storage.folder import iteration_name
from reprise.stores.upload import SourceChangedError
from tests.local_folders import flip
from tests.unit.reprise.local.sites import Site

NAME, FILE = iteration_name(2), "model.safetensors"


@pytest.fixture
def site(saved_hosts: Path, tmp_path: Path, stack: ExitStack) -> Site:
    """Return three hosts, of which the last two have the same pieces."""
    site = Site(saved_hosts / "copies0", tmp_path, stack, hosts=(0, 1, 1), timeout_s=1.0)
    site.passes[0].run()
    assert site.held() == [NAME] * 3
    return site


def assembled(site: Site, host: int = 0) -> bytes:
    with site.pools[host].source(site.folders[host] / NAME).file(FILE) as path:
        assert path.parent == site.folders[host] / ".mirror" / "file"
        return path.read_bytes()


def scratch(site: Site) -> list[Path]:
    return [path for folder in site.folders for path in folder.glob(".mirror/*")]


def damage(site: Site, host: int) -> None:
    for block in range(3):
        flip(site.folders[host] / NAME, of_host=1, block=block)


def test_wrong_bytes_are_taken_from_another_host(site: Site, saved_hosts: Path) -> None:
    damage(site, 1)
    whole = (saved_hosts / "shared" / NAME / FILE).read_bytes()
    assert assembled(site) == whole
    assert assembled(site, 1) == whole  # whose own are the wrong ones
    assert scratch(site) == []


@pytest.mark.parametrize("damaged", [[], [0], [0, 1]], ids=["no host", "one host", "both hosts"])
def test_a_whole_file_with_wrong_bytes_comes_from_another_host(
    saved_hosts: Path, tmp_path: Path, stack: ExitStack, damaged: list[int]
) -> None:
    site = Site(saved_hosts / "copies1", tmp_path, stack)
    manifest = (site.folders[0] / NAME / "manifest.json").read_bytes()
    assert site.parts[0].hold(2, digest_of(manifest)) is not None
    for host in damaged:
        flip(site.folders[host] / NAME, of_host=1)
    source = site.pools[0].source(site.folders[0] / NAME)
    if len(damaged) < 2:
        with source.file(FILE) as path:
            assert path.read_bytes() == (saved_hosts / "shared" / NAME / FILE).read_bytes()
            assert (path.parent == site.folders[0] / NAME) is not bool(damaged)
    else:
        with pytest.raises(CheckpointError, match="on no host, or damaged"), source.file(FILE):
            pass
    assert scratch(site) == []


def ends_in_the_middle(server: PartServer) -> None:
    answer = server._answer

    def cut(request: dict[str, Any]) -> tuple[dict[str, object], Any]:
        line, blocks = answer(request)
        return line, _cut(iter(blocks))

    server._answer = cut  # type: ignore[method-assign]


def _cut(blocks: Iterator[Any]) -> Iterator[Any]:
    for block, data in blocks:
        yield block, data[:5]
        raise OSError(errno.EIO, "the process dies")


def never_answers(server: PartServer) -> None:
    answer = server._answer

    def wait(request: dict[str, Any]) -> tuple[dict[str, object], Any]:
        if request["order"] == "pieces":
            threading.Event().wait(60.0)
        return answer(request)

    server._answer = wait  # type: ignore[method-assign]


@pytest.mark.parametrize("fails", [ends_in_the_middle, never_answers])
def test_a_host_that_fails_is_left_for_another(site: Site, saved_hosts: Path, fails: Any) -> None:
    fails(site.servers[1])
    assert assembled(site) == (saved_hosts / "shared" / NAME / FILE).read_bytes()


@pytest.mark.parametrize("fails", [ends_in_the_middle, never_answers])
def test_the_last_host_with_a_piece_is_awaited(site: Site, saved_hosts: Path, fails: Any) -> None:
    damage(site, 2)
    fails(site.servers[1])
    with pytest.raises(OSError, match=str(site.addresses[1][1])):
        assembled(site)
    assert scratch(site) == []
    del site.servers[1]._answer  # type: ignore[method-assign]
    assert assembled(site) == (saved_hosts / "shared" / NAME / FILE).read_bytes()


def test_a_file_of_a_killed_process_is_removed_at_the_start(site: Site) -> None:
    (site.folders[1] / ".mirror" / "file").mkdir(parents=True)
    (site.folders[1] / ".mirror" / "file" / FILE).touch()
    site.restart(1)
    assert scratch(site) == []


def test_bytes_that_are_wrong_everywhere_are_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    damage(site, 1)
    damage(site, 2)
    with pytest.raises(CheckpointError, match="2 of 3 pieces"):
        assembled(site)
    monkeypatch.setattr(Files, "reserve", full)  # which is no fault of a host
    with pytest.raises(OSError, match=r"No space left on device: .*\.mirror/file/model\.safetensors"):
        assembled(site)
    assert scratch(site) == []


def test_a_checkpoint_left_by_host_0_is_uploaded_no_further(site: Site) -> None:
    source = site.pools[1].source(site.folders[1] / NAME)
    source.check(source.files)
    site.parts[1].release()
    with pytest.raises(SourceChangedError):
        source.check(source.files)
