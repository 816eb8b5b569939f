"""A disk as a file in a FUSE folder, with a log of all writes and flushes.

    python -m scripts.faults.power.logged_disk FOLDER IMAGE LOG

`FOLDER/disk` has the content of the file IMAGE. A loop device over it turns every flush of its file system, and every
write with FUA, into an fsync of this file. Writes to `FOLDER/said` appear only in the log, between the writes and
flushes of the disk. A job uses it as standard output, so the log has the time of each output line.

The server implements the kernel's protocol (linux/fuse.h) in a single thread, so the log has the order of the requests.
It reads all waiting requests before it answers any of them. A flush that is read together with a write was therefore
requested before the write was answered, and does not cover it.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import stat
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.faults.power.block_log import Entry, LogKind, encode

DISK, SAID = "disk", "said"
_ROOT_NODE, _DISK_NODE, _SAID_NODE = 1, 2, 3
_MOST_BYTES = 1 << 20  # of one request's data
_FOREVER_S = 1 << 30

_IN = struct.Struct("<IIQQ16x")  # length, opcode, unique, node; not user, group, process
_OUT = struct.Struct("<IiQ")  # length, negative errno, unique
_SPAN = struct.Struct("<8xQI")  # offset and size: in fuse_read_in and in fuse_write_in
_WRITE_IN_BYTES = 40
_ATTRIBUTES = struct.Struct("<QQQ36xIIIIIII")  # inode, size, blocks; mode, links, user, group, device, block, flags
_INIT_OUT = struct.Struct("<IIIIHHIIHH32x")
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _MAX_PAGES = 1 << 0, 1 << 5, 1 << 15, 1 << 22
_DIRECT_IO = 1  # of an open file: no page cache lies between the writer and the log


class Opcode(enum.IntEnum):
    """The supported requests."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25  # a descriptor is closed: nothing is made durable by it
    INIT = 26
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


_UNANSWERED = {Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT}
_FINE = {Opcode.FLUSH, Opcode.RELEASE, Opcode.DESTROY}  # answered with success and nothing else


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the kernel; `data` is the part after its header."""

    opcode: int
    unique: int
    node: int
    data: bytes

    @staticmethod
    def parse(message: bytes) -> Request:
        """Return the request in a message read from /dev/fuse."""
        _, opcode, unique, node = _IN.unpack_from(message)
        return Request(opcode, unique, node, message[_IN.size :])


class LoggedDisk:
    """Answers the kernel's requests for the two files, and logs them.

    Args:
        image: the descriptor of the disk's content.
        log: the descriptor of the log.
    """

    def __init__(self, image: int, log: int) -> None:
        self._image, self._log = image, log
        self._logged = 0  # entries
        self._answered = 0  # how many of them were answered before the requests at hand were read

    def answer_all(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the answers to requests that were all read before any of them was answered."""
        self._answered = self._logged
        return [self._answer(request) for request in requests if request.opcode not in _UNANSWERED]

    def _answer(self, request: Request) -> bytes:
        try:
            data, error = self._perform(request), 0
        except OSError as failure:
            data, error = b"", failure.errno or errno.EIO
        return _OUT.pack(_OUT.size + len(data), -error, request.unique) + data

    def _perform(self, request: Request) -> bytes:
        match request.opcode:
            case Opcode.INIT:
                return _begin(request.data)
            case Opcode.LOOKUP:
                return self._look_up(request.data.rstrip(b"\0").decode())
            case Opcode.GETATTR | Opcode.SETATTR:
                return struct.pack("<QQ", 0, 0) + self._attributes(request.node)
            case Opcode.OPEN:
                return struct.pack("<QII", 0, _DIRECT_IO, 0)
            case Opcode.STATFS:
                return struct.pack("<40xIII28x", 4096, 255, 4096)
            case Opcode.READ:
                offset, size = _SPAN.unpack_from(request.data)
                return os.pread(self._image, size, offset) if request.node == _DISK_NODE else b""
            case Opcode.WRITE:
                return self._write(request)
            case Opcode.FSYNC:
                if request.node == _DISK_NODE:
                    self._append(Entry(LogKind.FLUSH, self._answered))
                return b""
        if request.opcode in _FINE:
            return b""
        raise OSError(errno.ENOSYS, "a disk does without")

    def _look_up(self, name: str) -> bytes:
        node = {DISK: _DISK_NODE, SAID: _SAID_NODE}.get(name)
        if node is None:
            raise OSError(errno.ENOENT, "no such file")
        return struct.pack("<QQQQQ", node, 0, _FOREVER_S, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        size = os.fstat(self._image).st_size if node == _DISK_NODE else 0
        mode = stat.S_IFDIR | 0o700 if node == _ROOT_NODE else stat.S_IFREG | 0o600
        return _ATTRIBUTES.pack(node, size, size // 512, mode, 1, 0, 0, 0, 4096, 0)

    def _write(self, request: Request) -> bytes:
        offset, size = _SPAN.unpack_from(request.data)
        data = request.data[_WRITE_IN_BYTES : _WRITE_IN_BYTES + size]
        if request.node == _SAID_NODE:
            self._append(Entry(LogKind.SAID, 0, data))
        else:
            os.pwrite(self._image, data, offset)
            self._append(Entry(LogKind.WRITE, offset, data))
        return struct.pack("<II", size, 0)

    def _append(self, entry: Entry) -> None:
        os.write(self._log, encode(entry))
        self._logged += 1


def _begin(data: bytes) -> bytes:
    _, _, readahead, offered = struct.unpack_from("<IIII", data)
    flags = offered & (_ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _MAX_PAGES)
    return _INIT_OUT.pack(7, 31, readahead, flags, 64, 48, _MOST_BYTES, 1, _MOST_BYTES // 4096, 0)


def mount(folder: Path) -> int:
    """Mount a FUSE file system on a folder and return the descriptor on which its requests come.

    Raises:
        OSError: if mounting is not allowed or the kernel has no FUSE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,max_read={_MOST_BYTES}"
    if libc.mount(b"logged_disk", os.fsencode(folder), b"fuse", 0, options.encode()):
        code = ctypes.get_errno()
        os.close(device)
        raise OSError(code, os.strerror(code), str(folder))
    return device


def serve(device: int, disk: LoggedDisk) -> None:
    """Answer requests until the folder is unmounted."""
    while True:
        os.set_blocking(device, True)
        requests = [_receive(device)]
        os.set_blocking(device, False)
        while requests[-1] is not None:
            try:
                requests.append(_receive(device))
            except BlockingIOError:
                break
        for answer in disk.answer_all([request for request in requests if request is not None]):
            try:
                os.write(device, answer)
            except FileNotFoundError:  # whoever asked was interrupted meanwhile
                continue
        if requests[-1] is None:
            return


def _receive(device: int) -> Request | None:
    """Return the next request, or None if the folder was unmounted."""
    while True:
        try:
            return Request.parse(os.read(device, _MOST_BYTES + 4096))
        except FileNotFoundError:  # a request that was interrupted before it was read
            continue
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return None


def main(arguments: Sequence[str]) -> int:
    """Mount, serve until the folder is unmounted, and return the exit status."""
    folder, image, log = map(Path, arguments)
    device = mount(folder)
    disk = LoggedDisk(os.open(image, os.O_RDWR), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))
    serve(device, disk)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
