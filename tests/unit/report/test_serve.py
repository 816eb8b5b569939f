from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.errors import TrainerError
from tests.reported_runs import steady_run
from trainer.commands.report import make_page
from trainer.report.serve import HOST, ReportServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    run = steady_run(tmp_path, [2.0, 1.0])
    with ReportServer([run], lambda: make_page([run], reload_s=5)) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server: ReportServer, path: str = "/", *, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_the_page_follows_the_run(server: ReportServer, tmp_path: Path) -> None:
    status, page = answer(server)
    assert status == 200
    assert 'data-reload="5"' in page
    assert "<td>2</td>" in page
    assert answer(server, host="example.org")[0] == answer(server, "/metrics.jsonl")[0] == 404
    with pytest.raises(TrainerError, match=str(server.server_port)):
        ReportServer([], str, server.server_port)
    steady_run(tmp_path, [2.0, 1.0, 0.5])
    assert "<td>3</td>" in answer(server)[1]


def test_an_unchanged_run_is_read_once(tmp_path: Path) -> None:
    calls = list[int]()
    with ReportServer([steady_run(tmp_path, [1.0])], lambda: str(calls.append(1))) as server:
        assert server.page() == server.page()
    assert len(calls) == 1


def test_a_run_that_is_gone_is_an_answer(server: ReportServer, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").unlink()
    status, text = answer(server)
    assert status == 503
    assert "metrics.jsonl" in text
