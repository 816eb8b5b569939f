"""Serves the page about runs on this machine alone, made again when the logs have grown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from reprise.errors import TrainerError
from reprise.files import matching
from trainer.report.history import run_folder

HOST = "127.0.0.1"
RELOAD_S = 10.0  # until an open page loads itself again


class ReportServer(HTTPServer):
    """A server of one page, on a port of 127.0.0.1.

    Args:
        runs: folders of runs.
        make_page: makes the page.
        port: 0 for a free one.

    Raises:
        TrainerError: if the port is taken.
    """

    def __init__(self, runs: Sequence[Path], make_page: Callable[[], str], port: int = 0) -> None:
        self._runs, self._make_page = runs, make_page
        self._state: object = None
        self._page = b""
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise TrainerError("Cannot serve the report", where=f"{HOST}:{port}", found=error.strerror) from error

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> bytes:
        """Return the page of the logs as they are.

        Raises:
            TrainerError: if a run cannot be read.
        """
        files = sorted(path for run in self._runs for path in matching(run_folder(run), "*.jsonl"))
        state = [(str(path), path.stat().st_size) for path in files]
        if state != self._state:
            self._page, self._state = self._make_page().encode(), state
        return self._page


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        # A page of another site may reach this port under a name of its own, but not under this one.
        names = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in names or self.path != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            status, kind, body = HTTPStatus.OK, "text/html", self.server.page()
        except (TrainerError, OSError) as error:
            status, kind, body = HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error).encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet: the terminal has the address alone."""
