"""Opens the token files of a run on every rank, and ends the run if two hosts have different tokens.

One rank of each host computes the digests of its files. The other ranks of that host use its result if they see the
same files. All of this runs before the state is built, with its own time limit, because reading the tokens may take
longer than `train.distributed_timeout_minutes`. A missing heartbeat reports a rank that dies meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from trainer.checkpoint.commit.channel import StoreChannel
from trainer.config.schema import Config
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.digest_file import digest_of
from trainer.data.fingerprint import TokenDigest, check_tokens, fingerprint
from trainer.data.indexed_file import open_indexed_file
from trainer.data.section import DataKind, DigestSource
from trainer.data.token_file import TokenFile, open_token_file, open_token_files
from trainer.errors import DataError, TrainerError
from trainer.launch.process_group import Cluster

_DATA_TIMEOUT_S = 24 * 3600.0
_SIDES = {"train": "training", "valid": "validation"}

_Files = Mapping[str, Sequence[TokenFile]]
_Digests = Mapping[str, Sequence[TokenDigest]]


@dataclass(frozen=True, slots=True)
class RunData:
    """The open token files of a run, with the same tokens on every rank.

    Args:
        valid: empty if the run never evaluates.
        fingerprint: of the training data.
        valid_fingerprint: of the validation data; None if the run never evaluates.
    """

    train: Sequence[TokenFile]
    valid: Sequence[TokenFile]
    fingerprint: str
    valid_fingerprint: str | None


@dataclass(frozen=True, slots=True)
class _HostData:
    """The digests of the files of one host, by side, as one of its ranks reports them to rank 0."""

    host: str
    paths: Mapping[str, Sequence[str]]
    digests: _Digests

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> _HostData:
        table = json.loads(data)
        digests = {side: [TokenDigest(**found) for found in files] for side, files in table["digests"].items()}
        return _HostData(table["host"], table["paths"], digests)


def open_data(config: Config, cluster: Cluster) -> RunData:
    """Open the files and check that all hosts have the same tokens. Collective.

    Raises:
        TrainerError: on every rank, if the data does not match the model or differs on a host; names host and file.
    """
    channel = cluster.channel.clone(_DATA_TIMEOUT_S)
    files: _Files | None = None
    mine: _HostData | None = None
    problem: TrainerError | None = None
    if cluster.rank == 0:  # first alone, so that the others find the prepared files and the digests
        try:
            files = _open(config)
            mine = _look(files, config)
        except TrainerError as error:
            problem = error
    channel.agree("data", problem)
    if files is None:
        try:
            files = _open(config)
        except TrainerError as error:
            problem = error
    host_ranks = _agree_on_host_ranks(channel, cluster, files)
    if files is not None and mine is None and cluster.rank in host_ranks:
        try:
            mine = _look(files, config)
        except TrainerError as error:
            problem = error
    found = _agree_on_data(channel, mine, problem, are_alone=host_ranks == [0])
    assert files is not None  # or the ranks would not have agreed
    return RunData(files["train"], files["valid"], *found)


def look_alone(config: Config) -> tuple[str, str | None]:
    """Return the fingerprints of training and validation data, as in `RunData`, for a program without ranks.

    Raises:
        TrainerError: if the data does not match the model.
    """
    return _fingerprints(_look(_open(config), config))


def _cache(config: Config) -> Path:
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config) -> _Files:
    """Open the files of both sides, and prepare them if they do not exist."""
    corpus = prepare(config.data, cache=_cache(config))
    _check_vocabulary(corpus, config.model.vocab_size)
    valid = corpus.valid if config.train.eval_interval else ()
    open_file = open_indexed_file if config.data.kind is DataKind.megatron else open_token_file
    return {side: open_token_files(paths, open_file) for side, paths in (("train", corpus.train), ("valid", valid))}


def _check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            "The data has more tokens than the model",
            expected=f"model.vocab_size of at least {corpus.vocab_size}",
            found=vocab_size,
            fix=f"Set model.vocab_size={corpus.vocab_size}, or choose other data.",
        )


def _look(files: _Files, config: Config) -> _HostData:
    """Return the digests of the files, after checking that the model's vocabulary covers every token."""
    cache, read_again = _cache(config), config.data.verify is DigestSource.full
    digests: dict[str, list[TokenDigest]] = {side: [] for side in files}
    for side, found in files.items():
        for file in found:
            digests[side].append(digest_of(file, cache=cache, read_again=read_again))
            if digests[side][-1].largest >= config.model.vocab_size:
                check_tokens(file, config.model.vocab_size)
    paths = {side: [str(file.path) for file in found] for side, found in files.items()}
    return _HostData(socket.gethostname(), paths, digests)


def _agree_on_host_ranks(channel: StoreChannel, cluster: Cluster, files: _Files | None) -> list[int]:
    """Return the first rank of each group of ranks on one host that see the same files; rank 0 is among them."""
    host = (cluster.local_ranks or (cluster.rank,))[0]
    group = b"" if files is None else f"{host} {_identity(files)}".encode()
    groups = channel.gather("data/groups", group)
    host_ranks = sorted({groups.index(group) for group in groups})
    found: list[int] = json.loads(channel.broadcast("data/host_ranks", json.dumps(host_ranks).encode()))
    return found


def _identity(files: _Files) -> str:
    """Return a digest of the identity of the files on this host."""
    found = xxhash.xxh3_64()
    for side, opened in files.items():
        for file in opened:
            status = file.status()
            times = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            found.update(f"{side} {status.st_dev} {status.st_ino} {times}\n".encode())
    return found.hexdigest()


def _agree_on_data(
    channel: StoreChannel, mine: _HostData | None, problem: TrainerError | None, *, are_alone: bool
) -> tuple[str, str | None]:
    """Return the fingerprints of both sides, after checking that every host has the same."""
    if not are_alone:
        reports = channel.gather("data/hosts", b"" if mine is None else mine.encode())
        reported = {rank: _HostData.decode(report) for rank, report in enumerate(reports) if report}
        problem = problem or _difference(reported)
        channel.agree("data/hosts", problem)
    found = b"" if mine is None else json.dumps(_fingerprints(mine)).encode()
    train, valid = json.loads(channel.broadcast("data/fingerprints", found))
    return train, valid


def _fingerprints(data: _HostData) -> tuple[str, str | None]:
    valid = data.digests["valid"]
    return fingerprint(data.digests["train"]), fingerprint(valid) if valid else None


def _difference(reported: Mapping[int, _HostData]) -> DataError | None:
    """Return an error that names the first host with other data than rank 0's and the first file that differs."""
    for rank, theirs in reported.items():
        for side, words in _SIDES.items():
            expected, found = reported[0].digests[side], theirs.digests[side]
            if fingerprint(expected) == fingerprint(found):
                continue
            same = [one == other for one, other in zip(expected, found, strict=False)]
            number = same.index(False) if False in same else len(same)
            return DataError(
                f"Hosts do not have the same {words} data",
                where=f"host {theirs.host}, rank {rank}",
                expected=f"that of host {reported[0].host}, rank 0: {_describe(reported[0], side, number)}",
                found=_describe(theirs, side, number),
                fix="Give every host the same files. If a cached digest may be wrong, data.verify=full reads all "
                "tokens again.",
            )
    return None


def _describe(data: _HostData, side: str, number: int) -> str:
    """Return the fingerprint of a side, and the name, size and digest of one of its files."""
    digests = data.digests[side]
    text = f"fingerprint {fingerprint(digests)} of {len(digests)} {'file' if len(digests) == 1 else 'files'}"
    if number >= len(digests):
        return f"{text}, no file number {number + 1}"
    file = digests[number]
    return f"{text}, {data.paths[side][number]} with {file.token_bytes} bytes of {file.dtype}, digest {file.digest}"
