"""The zip archive of `torch.save`: its members, and the numbers of tensors in them.

Everything is a view of the archive's bytes. An archive lists its members at its end; sizes from 4 GiB on are in a
further field of the list. Source: 4.3 of PKWARE's APPNOTE.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from reprise.json_file import shown
from trainer.interop.plain_pickle import PickleProblem, most_reads

_BLOCK_BYTES = 4 << 20
_LOCAL = struct.Struct("<4s22xHH")
_LISTED = struct.Struct("<4s4xHH4xIIIHHH8xI")
_END = struct.Struct("<4s6xHII2x")
_LOCATOR, _LARGE_END = struct.Struct("<4s4xQ4x"), struct.Struct("<4s28xQQQ")
_LARGE = 0xFFFFFFFF  # of a size that is in the further field
_LONGEST_COMMENT = 1 << 16
_IS_ENCRYPTED = 1


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers of a tensor, and those of its views."""

    memory: torch.UntypedStorage
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Member:
    """The first byte of a member, its size and its checksum."""

    begin: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A zip archive with uncompressed members.

    Args:
        raw: its bytes.
        members: by their names without the folder.
    """

    raw: torch.Tensor
    members: Mapping[str, Member]
    _storages: dict[str, torch.UntypedStorage] = field(default_factory=dict)

    @classmethod
    def open(cls, raw: torch.Tensor) -> TorchArchive:
        """Read the list of members.

        Args:
            raw: the bytes of the archive.

        Raises:
            PickleProblem: if it is damaged, or a member is compressed.
        """
        try:
            return cls(raw, dict(_members(raw)))
        except struct.error:
            raise PickleProblem("no zip archive, as torch.save writes, or one cut short") from None

    def check(self) -> None:
        """Compare the checksum of every member; torch writes 0 for all if it is set to leave them out.

        Raises:
            PickleProblem: naming a member with another checksum.
        """
        for name, member in self.members.items():
            checksum, end = 0, member.begin + member.size
            for at in range(member.begin, end, _BLOCK_BYTES) if member.checksum else ():
                checksum = zlib.crc32(self._view(at, min(at + _BLOCK_BYTES, end)), checksum)
            if checksum != member.checksum:
                raise PickleProblem(f"another checksum of {shown(name)}")

    def read(self, name: str, default: bytes | None = None) -> bytes:
        """Return the bytes of a member, or `default` if there is none.

        Raises:
            PickleProblem: if there is neither.
        """
        if name in self.members:
            member = self.members[name]
            return bytes(self._view(member.begin, member.begin + member.size))
        if default is None:
            raise PickleProblem(f"an archive without {name}")
        return default

    def storage(self, number: object) -> Storage:
        """Return the numbers of a pickle's entry ("storage", type, name, device, count).

        Raises:
            PickleProblem: if the archive does not have so many.
        """
        match number:
            case ("storage", torch.dtype() as dtype, str(name), str(), int(count)) if f"data/{name}" in self.members:
                member = self.members[f"data/{name}"]
                if 0 <= count * dtype.itemsize <= member.size:
                    if name not in self._storages:
                        begin = self.raw.storage_offset() + member.begin
                        self._storages[name] = self.raw.untyped_storage()[begin : begin + member.size]
                    return Storage(self._storages[name], dtype)
        raise PickleProblem(f"numbers that the archive does not have: {shown(number)}")

    def _view(self, begin: int, end: int) -> memoryview:
        return memoryview(self.raw[begin:end].numpy())  # type: ignore[arg-type]


def _members(raw: torch.Tensor) -> Iterator[tuple[str, Member]]:
    """Yield the members in the list at the end of an archive."""
    count, size, begin = _list(raw)
    if begin + size > raw.numel() or count > most_reads(raw.numel()):
        raise PickleProblem("an archive whose list of members is not in it")
    listed, at = _bytes(raw, begin, size), 0
    for _ in range(count):
        magic, flags, method, checksum, packed, full, *lengths, header = _LISTED.unpack_from(listed, at)
        name_end = at + _LISTED.size + lengths[0]
        name = listed[at + _LISTED.size : name_end].decode("utf-8", "replace")
        extra = listed[name_end : name_end + lengths[1]]
        full, packed, header = _large(extra, [full, packed, header])
        at = name_end + lengths[1] + lengths[2]
        if magic != b"PK\1\2":
            raise PickleProblem("an archive whose list of members is damaged")
        if method or flags & _IS_ENCRYPTED or packed != full:
            raise PickleProblem(f"{shown(name)} is compressed, as torch writes nothing, and may become of any size")
        local, name_length, extra_length = _LOCAL.unpack(_bytes(raw, header, _LOCAL.size))
        first = header + _LOCAL.size + name_length + extra_length
        if local != b"PK\3\4" or first + full > raw.numel():
            raise PickleProblem(f"{shown(name)} is not in the archive")
        yield name.partition("/")[2], Member(first, full, checksum)


def _list(raw: torch.Tensor) -> tuple[int, int, int]:
    """Return the number of members, the size of their list, and its first byte."""
    first = max(0, raw.numel() - _END.size - _LONGEST_COMMENT)
    tail = _bytes(raw, first, raw.numel() - first)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise PickleProblem("no zip archive, as torch.save writes, or one cut short")
    _, *fields = _END.unpack_from(tail, at)
    if at >= _LOCATOR.size:
        magic, place = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if magic == b"PK\6\7":
            magic, *fields = _LARGE_END.unpack(_bytes(raw, place, _LARGE_END.size))
            if magic != b"PK\6\6":
                raise PickleProblem("an archive whose list of members is not in it")
    return fields[0], fields[1], fields[2]


def _large(extra: bytes, sizes: list[int]) -> list[int]:
    """Return sizes with `_LARGE` replaced by the values of the further field."""
    values: Iterator[int] = iter(())
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            values = (value for (value,) in struct.iter_unpack("<Q", extra[4 : 4 + length // 8 * 8]))
        extra = extra[4 + length :]
    return [next(values, size) if size == _LARGE else size for size in sizes]


def _bytes(raw: torch.Tensor, begin: int, size: int) -> bytes:
    if not 0 <= begin <= begin + size <= raw.numel():
        raise PickleProblem("an archive whose parts are not in it")
    return raw[begin : begin + size].numpy().tobytes()
