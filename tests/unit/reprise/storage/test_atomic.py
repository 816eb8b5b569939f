"""An atomic output appears whole, is durable in the right order, and leaves nothing behind when it fails."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from reprise.storage.atomic import atomic_output
from reprise.storage.files import Files


class Recording(Files):
    """Notes every sync and rename, by the name of its folder or target."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def write(self, descriptor: int, data: memoryview, *, offset: int) -> None:
        self.calls.append(("write", ""))
        super().write(descriptor, data, offset=offset)

    def sync(self, descriptor: int) -> None:
        self.calls.append(("sync", ""))
        super().sync(descriptor)

    def sync_folder(self, path: Path) -> None:
        self.calls.append(("sync_folder", "partial" if path.suffix == ".partial" else path.name))
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append(("rename", target.name))
        super().rename(source, target)


def make_folder(files: Files, path: Path, data: bytes) -> None:
    (path / "inner").mkdir(parents=True)
    files.write_whole(path / "inner/file", data)


def produce(path: Path, files: Files, *, is_folder: bool, replaces: bool, fails: bool = False) -> None:
    with atomic_output(path, files, replaces=replaces) as partial:
        if is_folder:
            make_folder(files, partial, b"new")
        else:
            files.write_whole(partial, b"new")
        if fails:
            raise OSError("halfway")


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_folder_is_synced_before_its_name_and_its_parent_after(tmp_path: Path) -> None:
    files, root = Recording(), tmp_path / "root"
    root.mkdir()
    with atomic_output(root / "out", files) as partial:
        make_folder(files, partial, b"new")
        assert content(root).keys() == {f"{partial.name}/inner/file"}
    assert files.calls == [
        ("write", ""),
        ("sync", ""),
        ("sync_folder", "inner"),
        ("sync_folder", "partial"),
        ("rename", "out"),
        ("sync_folder", "root"),
    ]
    assert content(root) == {"out/inner/file": b"new"}


def test_a_file_is_replaced_if_another_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with atomic_output(tmp_path / "out", Files(), replaces=True):
        pass
    assert content(tmp_path) == {"out": b"old"}
    produce(tmp_path / "out", Files(), is_folder=False, replaces=True)
    assert content(tmp_path) == {"out": b"new"}


@pytest.mark.parametrize("is_folder", [False, True])
def test_nothing_is_replaced_without_the_request(tmp_path: Path, is_folder: bool) -> None:
    make_folder(Files(), tmp_path / "out", b"old")
    with pytest.raises(FileExistsError) as caught:
        produce(tmp_path / "out", Files(), is_folder=is_folder, replaces=False)
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert content(tmp_path) == {"out/inner/file": b"old"}


class Failing(Files):
    def sync_folder(self, path: Path) -> None:
        raise OSError("halfway")


@pytest.mark.parametrize(
    ("is_folder", "files", "fails"), [(False, Files(), True), (True, Files(), True), (True, Failing(), False)]
)
def test_a_failure_removes_the_partial_output(tmp_path: Path, is_folder: bool, files: Files, fails: bool) -> None:
    (tmp_path / "out").write_bytes(b"old")
    with pytest.raises(OSError, match="halfway"):
        produce(tmp_path / "out", files, is_folder=is_folder, replaces=True, fails=fails)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert content(tmp_path) == {"out": b"old"}
