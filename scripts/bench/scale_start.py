"""What the agreements of a start cost by ranks, for `scripts.bench.scale`: hosts, a problem, an answer of each rank.

Rank 0 makes the real calls in this process. A second process makes them for every other rank in turn over a single
connection: up to the first message of rank 0 that is not there, and for some ranks once more when rank 0 is through.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from reprise.channel import StoreChannel, find_hosts

_TIMEOUT_S = 600.0
_RANKS_PER_HOST = 8
_SAMPLES = 256  # ranks that read rank 0's answer


class _NotYetError(Exception):
    """Rank 0 has not sent a message."""


class _PeerChannel(StoreChannel):
    """The channel of a rank that waits for nothing."""

    read_bytes = 0
    has_sent = False

    def put(self, key: str, data: bytes, *, is_first: bool = True) -> None:
        if not self.has_sent:
            super().put(key, data, is_first=is_first)

    def _message(self, key: str, sender: str) -> tuple[bytes, int]:
        if not self.has_sent:
            raise _NotYetError
        data, chunks = super()._message(key, sender)
        _PeerChannel.read_bytes += len(data)
        return data, chunks


def _answers(channel: StoreChannel) -> object:
    answers = channel.gather("answers", b"false")
    return channel.from_first("answer", lambda: len(answers))


def _hosts(channel: StoreChannel) -> object:
    first = channel.rank // _RANKS_PER_HOST * _RANKS_PER_HOST
    return find_hosts(channel, range(first, first + _RANKS_PER_HOST), "k")


CALLS: Mapping[str, Callable[[StoreChannel], object]] = {
    "hosts": _hosts,
    "agreement": lambda channel: channel.agree("agree", None),
    "answers": _answers,
}


def _serve(ranks: int, pipe: Connection) -> None:
    """Stand for all ranks but rank 0: at each name of a call from the pipe, make it on all of them."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.send(store.port)
    spare = [store.clone()]  # type: ignore[attr-defined]
    while name := pipe.recv():
        before, peers = _PeerChannel.read_bytes, list[_PeerChannel]()
        for has_sent in (False, True):
            for rank in range(1, ranks, max(1, ranks // _SAMPLES) if has_sent else 1):
                if not has_sent:
                    peers.append(_PeerChannel(store, rank, world_size=ranks, timeout_s=_TIMEOUT_S, spare=spare))
                    spare.append(peers[-1]._connection)
                peer = peers[rank - 1]
                peer.has_sent = has_sent
                try:
                    CALLS[name](peer)
                except _NotYetError:
                    assert not has_sent
            pipe.send((_PeerChannel.read_bytes - before) / len(range(1, ranks, max(1, ranks // _SAMPLES))))
            pipe.recv()


def measure(ranks: int) -> Mapping[str, float]:
    """Return what each call costs rank 0 in seconds, and the bytes that another rank reads."""
    context = multiprocessing.get_context("spawn")
    pipe, other_end = context.Pipe()
    process = context.Process(target=_serve, args=(ranks, other_end), daemon=True)
    process.start()
    figures: dict[str, float] = {}
    try:
        store = TCPStore("127.0.0.1", pipe.recv(), None, False, wait_for_workers=False)
        channel = StoreChannel(store, 0, world_size=ranks, timeout_s=_TIMEOUT_S)
        for name, call in CALLS.items():
            pipe.send(name)
            pipe.recv()
            start, start_cpu = time.perf_counter(), time.thread_time()
            call(channel)
            figures |= {f"{name} s": time.perf_counter() - start, f"{name} CPU s": time.thread_time() - start_cpu}
            pipe.send("")
            figures[f"{name} B/rank"] = pipe.recv()
            pipe.send("")
        figures["all s"] = sum(figures[f"{name} s"] for name in CALLS)
    finally:
        pipe.send("")
        process.join(_TIMEOUT_S)
    return figures
