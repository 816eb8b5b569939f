"""Checkpoints in a store, read by a process of its own: a folder behind `file://` stands for the store."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import reprise
from reprise import copy, diff, load, save, show, verify
from reprise.format.names import MANIFEST, STATE
from reprise.stores import store as store_module
from reprise.stores.child import Server
from reprise.stores.client import StoreClient
from reprise.stores.files import StoreFiles
from reprise.stores.locations import files_of, location
from reprise.stores.path import store_path
from reprise.stores.ranges import CELL_BYTES, FIRST_CELL_BYTES
from reprise.stores.store import CHILD, CHILD_CLIENT, CONNECTIONS, MOST_TRIES, Child
from reprise.stores.upload import remove
from tests.stores import saving
from tests.stores.saving import asking
from tests.unit.reprise.loading.test_choose import filled

FORKS = 20


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for iteration in (1, 2):
        save(tmp_path / "run", filled(iteration), iteration=iteration, state={"epoch": iteration})
    return tmp_path / "run"


def url_of(path: Path) -> str:
    return f"file://{path}"


def process_id() -> int:
    process = CHILD.process
    assert process is not None
    return process.pid


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)
    os.waitpid(process, os.WUNTRACED)  # until then its threads may answer


def test_a_replaced_object_is_found(run: Path) -> None:
    path = location(url_of(run / "iter_0000002" / STATE))
    files = files_of(path)
    number, version = files.open_for_reading(path), path.stat().st_ino
    (run / "iter_0000002" / STATE).write_text("{}" * 100)
    assert path.stat().st_ino != version
    with pytest.raises(OSError, match="replaced"):
        files.read(number, memoryview(bytearray(10)), offset=0)
    files.reopen(number, path)
    assert files.read(number, memoryview(bytearray(300)), offset=0) == 200
    files.end()


def test_an_object_is_read_while_another_thread_reopens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Emptied(dict[Path, Any]):
        """Forgets what it was asked for, as if another thread reopened the object just then."""

        def __contains__(self, path: object) -> bool:
            return super().__contains__(path) and self.pop(path) is not None

    files, path = StoreFiles(), location("s3://bucket/x")
    monkeypatch.setattr(type(CHILD_CLIENT), "head", lambda *_: (7, None, 0.0), raising=False)
    files._versions = Emptied()
    assert [files.size(path) for _ in range(2)] == [7, 7]
    CHILD.end()


def test_a_replaced_object_is_found_without_its_etag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some stores have none: nothing else tells the kept bytes from the new ones."""
    head = StoreClient.head
    monkeypatch.setattr(Child, "ask", asking(Server()))
    monkeypatch.setattr(StoreClient, "head", lambda *call: (head(*call)[0], None, head(*call)[2]))
    path = location(url_of(tmp_path / "x"))
    for time, content in ((5, b"old"), (7, b"new"), (7, b"longer")):
        (tmp_path / "x").write_bytes(content)
        os.utime(tmp_path / "x", (time, time))
        assert files_of(path).read_whole(path) == content


def test_a_program_that_has_loaded_forks(run: Path) -> None:
    path = location(url_of(run / "iter_0000002" / STATE))
    content, files = (run / "iter_0000002" / STATE).read_bytes(), files_of(path)
    number = files.open_for_reading(path)
    for index in range(FORKS):
        child = os.fork()
        if not child:
            has_failed = not index % 10 and not (path.exists() and CHILD.process)  # some ask a child of their own
            CHILD.end()
            os._exit(int(has_failed))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        buffer = bytearray(len(content))
        files.read(number, memoryview(buffer), offset=0)
        assert buffer == content
    files.end()


def test_a_fork_does_not_wait_for_a_thread_that_reads(run: Path) -> None:
    CHILD_CLIENT.names(store_path("file://"))
    stop(process_id())
    thread = threading.Thread(target=CHILD_CLIENT.names, args=(store_path("file://"),))
    thread.start()
    while not _is_asleep(thread):
        os.sched_yield()
    child = os.fork()
    if not child:
        os._exit(0)
    descriptor = os.pidfd_open(child)
    has_ended = bool(select.select([descriptor], [], [], 30)[0])
    os.close(descriptor)
    os.kill(process_id(), signal.SIGCONT)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    thread.join()
    CHILD.end()
    assert has_ended


def _is_asleep(thread: threading.Thread) -> bool:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def test_a_child_ends_with_the_program_that_started_it() -> None:
    """Though a fork of the program lives on. Another rank's program then starts its own."""
    program = (
        "import os, sys\n"
        "from reprise.stores.store import CHILD\n"
        "from reprise.stores.path import store_path\n"
        "CHILD.share('shared')\n"
        "for line in sys.stdin:\n"
        "    CHILD.ask('names', store_path('file://'))\n"
        "    print(CHILD.process and CHILD.process.pid, flush=True)\n"
        "    if line == 'fork\\n' and not os.fork():\n"
        "        os._exit(sys.stdin.read() != '')\n"
    )

    def asked(started: subprocess.Popen[bytes], line: bytes = b"\n") -> bytes:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(line)
        return started.stdout.readline()

    command = [sys.executable, "-c", program]
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
            for _ in range(2)
        ]
        descriptor = os.pidfd_open(int(asked(programs[0], b"fork\n")))
        assert asked(programs[1]) == b"None\n"
        programs[0].kill()
        assert select.select([descriptor], [], [], 30)[0]
        assert asked(programs[1]) != b"None\n"
        os.close(descriptor)


def test_a_killed_child_is_started_again_a_few_times(
    run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHILD.end()
    send, kills = Connection.send, MOST_TRIES - 1

    def killed(connection: Connection, request: Any) -> None:
        nonlocal kills
        kills -= 1
        if kills >= 0:
            os.kill(process_id(), signal.SIGKILL)
        send(connection, request)

    monkeypatch.setattr(Connection, "send", killed)
    assert location(url_of(run) + "/iter_0000001").is_dir()
    assert caplog.text.count("exited and is restarted") == MOST_TRIES - 1
    kills = MOST_TRIES
    with pytest.raises(OSError, match=f"exited {MOST_TRIES} times"):
        location(url_of(run) + "/iter_0000001").is_dir()
    CHILD.end()


def test_connections_of_a_killed_child_are_no_tries() -> None:
    url = store_path("file://")
    CHILD_CLIENT.names(url)
    CHILD._idle.extend(CHILD.link() for _ in range(CONNECTIONS))  # as after a load
    os.kill(process_id(), signal.SIGKILL)
    assert CHILD_CLIENT.names(url)
    CHILD.end()


def test_a_load_goes_on_after_its_child_is_killed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, loaded, kills = Child.ask, filled(9), [1, 2]

    def killed(child: Child, call: str, *arguments: Any) -> Any:
        if call == "open" and kills and kills.pop():
            os.kill(process_id(), signal.SIGKILL)
        return asked(child, call, *arguments)

    monkeypatch.setattr(Child, "ask", killed)
    assert load(url_of(run), loaded)["epoch"] == 2
    assert bool((loaded.get_parameter("weight") == 2).all())


def test_an_answer_never_taken_is_not_the_next_one(tmp_path: Path) -> None:
    keys = [str(tmp_path / name)[1:] for name in ("long", "short")]
    for key, size in zip(keys, (9, 1), strict=True):
        Path(f"/{key}").write_bytes(bytes(size))

    def interrupted(*_: object) -> None:
        patch.undo()
        raise KeyboardInterrupt

    patch = pytest.MonkeyPatch()
    patch.setattr(Connection, "recv", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        CHILD_CLIENT.head(store_path(f"file://{keys[0]}"))
    assert {CHILD_CLIENT.head(store_path(f"file://{keys[1]}"))[0] for _ in range(2 * CONNECTIONS)} == {1}
    CHILD.end()


def test_a_child_of_another_user_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "is_of_this_user", lambda _: False)
    with pytest.raises(PermissionError, match="another user"):
        CHILD.link()
    CHILD.end()


def test_too_many_open_files_are_named(run: Path) -> None:
    files, limits = StoreFiles(), resource.getrlimit(resource.RLIMIT_NOFILE)
    number, body = files.open_for_reading(location(url_of(run)) / "iter_0000001" / MANIFEST), memoryview(bytearray(9))
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                files.read(number, body, offset=0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert files.read(number, body, offset=0) == 9
    CHILD.end()


def test_a_listing_of_a_store_is_that_of_a_folder(run: Path) -> None:
    (run / "iter_0000001" / "hold").touch()
    (run / "iter_0000002" / MANIFEST).rename(run / "manifest-of-2")  # its deletion or upload is under way
    save(run / "weights", filled(3), iteration=3)
    held, light = reprise.list(url_of(run), check=0)
    assert (held.iteration, held.status, held.is_pinned) == (1, "unchecked", True)
    assert (light.path.parent.name, light.is_pinned) == ("weights", False)
    of_folder = reprise.list(run, check=0)
    assert [held.state, light.state] == [of_folder[0].state, of_folder[-1].state]
    assert [held.total_bytes, light.total_bytes] == [of_folder[0].total_bytes, of_folder[-1].total_bytes]
    assert held.written_at == int(of_folder[0].written_at)
    assert "iter_0000002" not in [path.name for path in location(url_of(run)).iterdir()]
    CHILD.end()


def test_the_tools_take_urls(run: Path) -> None:
    url, counts = url_of(run), list[tuple[str, int, int]]()
    listed = reprise.list(url)
    assert [(summary.iteration, summary.status.value) for summary in listed] == [(1, "whole"), (2, "whole")]
    assert show(url).tensors == show(run).tensors
    assert [result.checked_bytes for result in verify(url)] == [result.checked_bytes for result in verify(run)]
    assert diff(url, run, progress=lambda *call: counts.append(call)).is_empty
    assert counts == [("", count, 2) for count in range(3)]
    CHILD.end()


def test_bytes_are_those_of_the_object_at_every_size(tmp_path: Path) -> None:
    content = os.urandom(CELL_BYTES + 3 * FIRST_CELL_BYTES + 77)
    (tmp_path / "x").write_bytes(content)
    path, files = location(url_of(tmp_path / "x")), StoreFiles()
    with pytest.raises(TypeError, match="is in a store"):
        os.stat(path)  # no system call takes such a path
    number = files.open_for_reading(path)
    first, second = FIRST_CELL_BYTES, FIRST_CELL_BYTES + CELL_BYTES
    for start, size in [
        (0, 0),
        (0, 1),
        (first - 1, 2),
        (5, second),
        (second - 1, 2),
        (second + 9, 1 << 20),
        (0, 9 << 20),
    ]:
        buffer = bytearray(size)
        count = files.read(number, memoryview(buffer), offset=start)
        assert bytes(buffer[:count]) == content[start : start + size]
    files.end()


@pytest.mark.parametrize(("load", "kept_cells"), [(None, 1), ("a load of several ranks", 3)])
def test_what_a_load_keeps_is_bounded(
    load: str | None, kept_cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "KEPT_BYTES", CELL_BYTES + (1 << 20))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    content = os.urandom(FIRST_CELL_BYTES + 2 * CELL_BYTES)
    (tmp_path / "x").write_bytes(content)
    CHILD.end()
    path, files = location(url_of(tmp_path / "x")), StoreFiles(load)
    number, body = files.open_for_reading(path), memoryview(bytearray(1000))
    for start in range(0, len(content) - 1000, 1 << 20):
        CHILD._idle.append(CHILD.link())  # as for another thread, whose connection then idles
        assert files.read(number, body, offset=start) == 1000
        assert body == content[start : start + 1000]
    opened = Path(f"/proc/{process_id()}/fd").iterdir()
    assert sum(os.readlink(entry).startswith(str(tmp_path)) for entry in opened) == kept_cells
    files.end()


def test_a_removed_checkpoint_takes_no_folder_of_the_user(run: Path, tmp_path: Path) -> None:
    target = store_path(url_of(tmp_path / "user" / "archive" / "iter_0000002"))
    (tmp_path / "user" / "archive").mkdir(parents=True)
    copy(run / "iter_0000002", str(target))
    remove(CHILD_CLIENT, target)
    assert [path.name for path in (tmp_path / "user").rglob("*")] == ["archive"]


def test_a_folder_of_any_name_is_uploaded(run: Path, tmp_path: Path) -> None:
    folder = run.rename(tmp_path / "a b%20#1?\u00e9")
    copy(folder / "iter_0000001", url_of(tmp_path / "copied"))
    assert saving.content(tmp_path / "copied" / "iter_0000001") == saving.content(folder / "iter_0000001")
    with pytest.raises(OSError, match="Could not parse path"):
        copy(folder.rename(tmp_path / "a\nb") / "iter_0000001", url_of(tmp_path / "again"))
    CHILD.end()
