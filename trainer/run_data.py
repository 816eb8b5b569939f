"""Opens the token files of a run on every rank, and ends the run where two hosts have different tokens.

One rank of each host finds out what its files hold; the others of that host take its answer where they see the same
files as it does. All of this runs before the state is built, with a time limit of its own: a rank that dies meanwhile
is noticed by its missing heartbeat, and reading the tokens may take longer than `train.distributed_timeout_minutes`.
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
from trainer.data.section import DigestSource
from trainer.data.token_file import TokenFile, open_token_files
from trainer.errors import DataError, TrainerError
from trainer.launch.process_group import Cluster

_DATA_TIMEOUT_S = 24 * 3600.0
_SIDES = {"train": "training", "valid": "validation"}

_Files = Mapping[str, Sequence[TokenFile]]
_Digests = Mapping[str, Sequence[TokenDigest]]


@dataclass(frozen=True, slots=True)
class RunData:
    """The open token files of a run, which hold the same on every rank.

    Args:
        valid: empty where the run never evaluates.
        fingerprint: of the training data.
        valid_fingerprint: of the validation data; None where the run never evaluates.
    """

    train: Sequence[TokenFile]
    valid: Sequence[TokenFile]
    fingerprint: str
    valid_fingerprint: str | None


@dataclass(frozen=True, slots=True)
class _HostData:
    """What the files of one host hold, by side, as one of its ranks tells it to rank 0."""

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
    """Open the files and make sure that all hosts have the same tokens. A call of all ranks.

    Raises:
        TrainerError: on every rank, if the data does not suit or a host has different data; names host and file.
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
    speakers = _agree_on_speakers(channel, cluster, files)
    if files is not None and mine is None and cluster.rank in speakers:
        try:
            mine = _look(files, config)
        except TrainerError as error:
            problem = error
    found = _agree_on_data(channel, mine, problem, are_alone=speakers == [0])
    assert files is not None  # or the ranks would not have agreed
    return RunData(files["train"], files["valid"], *found)


def look_alone(config: Config) -> tuple[str, str | None]:
    """Return the fingerprints of training and validation data as a `RunData` has them, for a program without ranks.

    Raises:
        TrainerError: if the data does not suit.
    """
    return _fingerprints(_look(_open(config), config))


def _cache(config: Config) -> Path:
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config) -> _Files:
    """Open the files of both sides, preparing them where they are not there yet."""
    corpus = prepare(config.data, cache=_cache(config))
    _check_vocabulary(corpus, config.model.vocab_size)
    valid = corpus.valid if config.train.eval_interval else ()
    return {"train": open_token_files(corpus.train), "valid": open_token_files(valid)}


def _check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            "The data has more tokens than the model",
            expected=f"model.vocab_size of at least {corpus.vocab_size}",
            found=vocab_size,
            fix=f"Set model.vocab_size={corpus.vocab_size}, or choose other data.",
        )


def _look(files: _Files, config: Config) -> _HostData:
    """Return what the files hold, after checking that the model's vocabulary holds every token."""
    cache, read_again = _cache(config), config.data.verify is DigestSource.full
    digests: dict[str, list[TokenDigest]] = {side: [] for side in files}
    for side, found in files.items():
        for file in found:
            digests[side].append(digest_of(file, cache=cache, read_again=read_again))
            if digests[side][-1].largest >= config.model.vocab_size:
                check_tokens(file, config.model.vocab_size)
    paths = {side: [str(file.path) for file in found] for side, found in files.items()}
    return _HostData(socket.gethostname(), paths, digests)


def _agree_on_speakers(channel: StoreChannel, cluster: Cluster, files: _Files | None) -> list[int]:
    """Return the first rank of each group of ranks that are on one host and see the same files; rank 0 is one."""
    host = (cluster.local_ranks or (cluster.rank,))[0]
    group = b"" if files is None else f"{host} {_identity(files)}".encode()
    groups = channel.gather("data/groups", group)
    speakers = sorted({groups.index(group) for group in groups})
    found: list[int] = json.loads(channel.broadcast("data/speakers", json.dumps(speakers).encode()))
    return found


def _identity(files: _Files) -> str:
    """Return a digest of which files of this host these are."""
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
    """Return the fingerprints of both sides, which are those of every rank that speaks for its host."""
    if not are_alone:
        reports = channel.gather("data/hosts", b"" if mine is None else mine.encode())
        told = {rank: _HostData.decode(report) for rank, report in enumerate(reports) if report}
        problem = problem or _difference(told)
        channel.agree("data/hosts", problem)
    found = b"" if mine is None else json.dumps(_fingerprints(mine)).encode()
    train, valid = json.loads(channel.broadcast("data/fingerprints", found))
    return train, valid


def _fingerprints(data: _HostData) -> tuple[str, str | None]:
    valid = data.digests["valid"]
    return fingerprint(data.digests["train"]), fingerprint(valid) if valid else None


def _difference(told: Mapping[int, _HostData]) -> DataError | None:
    """Return an error that names the first host with other data than rank 0's and the first file that differs."""
    for rank, theirs in told.items():
        for side, words in _SIDES.items():
            expected, found = told[0].digests[side], theirs.digests[side]
            if fingerprint(expected) == fingerprint(found):
                continue
            same = [one == other for one, other in zip(expected, found, strict=False)]
            number = same.index(False) if False in same else len(same)
            return DataError(
                f"Hosts do not have the same {words} data",
                where=f"host {theirs.host}, rank {rank}",
                expected=f"that of host {told[0].host}, rank 0: {_describe(told[0], side, number)}",
                found=_describe(theirs, side, number),
                fix="Give every host the same files. data.verify=full reads all tokens again, where a digest that an "
                "earlier start has kept may be wrong.",
            )
    return None


def _describe(data: _HostData, side: str, number: int) -> str:
    """Return the fingerprint of a side, and of one of its files name, size and digest."""
    digests = data.digests[side]
    text = f"fingerprint {fingerprint(digests)} of {len(digests)} {'file' if len(digests) == 1 else 'files'}"
    if number >= len(digests):
        return f"{text}, no file number {number + 1}"
    file = digests[number]
    return f"{text}, {data.paths[side][number]} with {file.token_bytes} bytes of {file.dtype}, digest {file.digest}"
