"""A failing file system is no missing file; and what is named as a file and is none is refused at once."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PosixPath

import pytest

from reprise import load_state_dict
from reprise.errors import ConfigError
from reprise.storage.paths import (
    exists,
    is_dir,
    is_file,
    is_symlink,
    lexists,
    matching,
    read_regular,
)
from tests.messages import refused

QUESTIONS = (exists, lexists, is_dir, is_file, is_symlink)
TOO_LONG = "x" * 300  # a name that no file system takes: a failure also for a user who may do everything


@contextmanager
def bounded(seconds: float = 5.0, more_bytes: int = 1 << 30) -> Iterator[None]:
    """Fail what blocks, and what takes memory without end."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done in {seconds} s")  # no OSError: the code under test handles these

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more_bytes, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["pipe", "device"])
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a file that has no end: a pipe that nobody writes to, or a link to a device."""
    path = tmp_path / "odd"
    if request.param == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


class OtherPath(PosixPath):
    """A path of the system whose class is a user's."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_failure_is_not_the_answer_no(tmp_path: Path, question: Callable[[Path], bool]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    missing = ["missing", "file/below", "loop/below", "a\0b"]
    assert not any(question(tmp_path / name) for name in missing)
    with pytest.raises(OSError, match="too long"):
        question(tmp_path / TOO_LONG)


@pytest.mark.parametrize("kind", [Path, OtherPath])
def test_a_link_counts_as_its_target_unless_it_is_asked_for(tmp_path: Path, kind: type[Path]) -> None:
    tmp_path = kind(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for target in ("folder", "file", "gone"):
        (tmp_path / f"to_{target}").symlink_to(target)
    answers = {path.name: [question(path) for question in QUESTIONS] for path in tmp_path.iterdir()}
    assert answers == {
        "folder": [True, True, True, False, False],
        "file": [True, True, False, True, False],
        "to_folder": [True, True, True, False, True],
        "to_file": [True, True, False, True, True],
        "to_gone": [False, True, False, False, True],
    }


def test_patterns_match_names_or_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b/inner/run-2.x", "a/run-1.x", "c.x", "run-3.x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "to_b").symlink_to("b")
    assert matching(tmp_path, "*.x") == [tmp_path / "c.x", tmp_path / "run-3.x"]
    assert matching(tmp_path / "a", "run-*.x") == [tmp_path / "a/run-1.x"]
    assert not any(matching(tmp_path / name, "*") for name in ("missing", "c.x", "a\0b"))

    def fail(path: object) -> list[str]:
        raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(OSError, match="the disk fails"):
        matching(tmp_path, "*.x")


@pytest.mark.parametrize("size", [10, 1 << 34])
def test_a_file_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path, size: int) -> None:
    try:
        with (tmp_path / "file").open("wb") as file:
            file.truncate(size)
    except OSError as error:
        pytest.skip(f"no sparse file of this size can be made here: {error}")
    (tmp_path / "link").symlink_to("file")
    if size == 10:
        assert read_regular(tmp_path / "link", limit_bytes=10) == bytes(10)
    with bounded(), pytest.raises(OSError, match="larger than 9 B") as caught:
        read_regular(tmp_path / "file", limit_bytes=9)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "file"))


@pytest.mark.parametrize("url", ["hf://", "hdfs://host/run/model", "https://example.com/hf/model"])
def test_a_load_of_no_store_is_refused(url: str) -> None:
    with refused(ConfigError, url):
        load_state_dict(url, {})
