"""A proxy before a server of S3 that fails as stores do: refusals, cut bodies, wrong bytes, conflicts, silence.

The number of a request decides its fate, so that a run of a test is like the one before.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SILENCE_S = 2.0
TIMEOUT_S = 30.0
_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@dataclass(slots=True)
class Faults:
    """Which requests fail: every n-th of its kind, 0 for none.

    Args:
        busy: are answered with 503, as a store does that asks to slow down.
        cut: answers of GET that end in the middle.
        wrong: answers of GET with a flipped bit.
        conflict: PUT that are answered with 409, without effect.
        silent: are answered only once the test is over.
        expired: are refused, as by a store whose token has expired.

    Attributes:
        counts: the requests that failed, by their kind.
    """

    busy: int = 0
    cut: int = 0
    wrong: int = 0
    conflict: int = 0
    silent: int = 0
    expired: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _requests: int = 0

    def next(self, method: str, *, has_body: bool) -> str:
        """Return the fault of the next request; empty for none."""
        with self._lock:
            self._requests += 1
            kinds = {"busy": self.busy, "silent": self.silent, "expired": self.expired}
            if method == "GET" and has_body:
                kinds |= {"cut": self.cut, "wrong": self.wrong}
            if method == "PUT":
                kinds |= {"conflict": self.conflict}
            for offset, (kind, interval) in enumerate(kinds.items()):
                if interval and (self._requests + offset) % interval == 0:
                    self.counts[kind] = self.counts.get(kind, 0) + 1
                    return kind
        return ""


@contextmanager
def faulty(port: int, faults: Faults) -> Iterator[str]:
    """Yield the URL of a proxy before a server on a port of this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = TIMEOUT_S

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_object = "list-type" not in self.path and "uploads" not in self.path
            fault = faults.next(self.command, has_body=is_object)
            if fault == "silent":
                faults.over.wait(SILENCE_S)
                self.close_connection = True
                return
            if fault == "expired":
                self._answer(400, {}, b"<Error><Code>ExpiredToken</Code></Error>")
                return
            if fault in ("busy", "conflict"):
                self._answer(503 if fault == "busy" else 409, {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            try:
                connection.request(self.command, self.path, body, dict(self.headers))
                response = connection.getresponse()
                headers, data = dict(response.getheaders()), response.read()
            finally:
                connection.close()
            if fault == "wrong" and data and response.status in (200, 206):
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._answer(response.status, headers, data, is_cut=fault == "cut" and len(data) > 1)

        def _answer(self, status: int, headers: dict[str, str], data: bytes, *, is_cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            is_head = self.command == "HEAD"
            self.send_header("Content-Length", headers.get("Content-Length", "0") if is_head else str(len(data)))
            self.end_headers()
            if not is_head:
                self.wfile.write(data[: len(data) // 2] if is_cut else data)
            if is_cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        faults.over.set()
        server.shutdown()
        server.server_close()
        thread.join(TIMEOUT_S)
