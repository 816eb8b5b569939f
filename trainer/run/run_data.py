"""Opens the token files of a run on every rank, and ends the run if two hosts have different tokens.

One rank of each host computes the digests of its files. The other ranks of the host use its result if they see the same
files. All of this runs before the state is built, with its own time limit, because reading the tokens may take longer
than `train.distributed_timeout_minutes`. A missing heartbeat reports a rank's death meanwhile.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TypeVar

import xxhash

from reprise.errors import DataError
from reprise.ranks import StoreChannel
from trainer.config.schema import Config
from trainer.data.corpus import Corpus, default_cache, prepare, refuse_shared
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.digest_file import digest_of
from trainer.data.document_table import documents_of, table_of
from trainer.data.documents import DocumentMarks
from trainer.data.fingerprint import TokenDigest, check_tokens, fingerprint, fingerprint_of_sources
from trainer.data.indexed_file import open_indexed_file
from trainer.data.section import INDEXED_KINDS, TOKEN_KINDS, DataKind, DigestSource, SampleCut, sources_of
from trainer.data.text import open_encoder
from trainer.data.token_file import TokenFile, open_token_file, open_token_files
from trainer.launch.process_group import Cluster

_DATA_TIMEOUT_S = 24 * 3600.0
_SIDES = {"train": "training", "valid": "validation"}
# Openers of files with an index; all others have the header of token files.
_OPENERS = {DataKind.megatron: open_indexed_file, DataKind.datatrove: open_datatrove_file}

_Files = Mapping[str, Sequence[TokenFile]]
_Digests = Mapping[str, Sequence[TokenDigest]]
T = TypeVar("T")
# Of each source of training data, of the borders of its documents, and of the validation data.
Fingerprints = tuple[list[str], list[str | None], str | None]


@dataclass(frozen=True, slots=True)
class Source:
    """A source of training data: its open files, their fingerprint, and its weight.

    Args:
        documents: the fingerprint of the borders of its documents; None where no sample depends on them.
    """

    files: Sequence[TokenFile]
    fingerprint: str
    weight: Fraction
    documents: str | None


@dataclass(frozen=True, slots=True)
class RunData:
    """The open token files of a run, with the same tokens on every rank.

    Args:
        train: the sources of training data, in order of their fingerprints.
        valid: empty if the run never evaluates.
        valid_fingerprint: of the validation data; None if the run never evaluates.
        marks: the documents of `data.document_mask`; None without it.
    """

    train: Sequence[Source]
    valid: Sequence[TokenFile]
    valid_fingerprint: str | None
    marks: DocumentMarks | None = None

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the training data, without the weights of its sources."""
        return fingerprint_of_sources([source.fingerprint for source in self.train])

    @property
    def documents(self) -> str | None:
        """Return the fingerprint of the borders of all documents; None where no sample depends on them."""
        fingerprints = [source.documents for source in self.train if source.documents is not None]
        return fingerprint_of_sources(fingerprints) if fingerprints else None

    @property
    def weights(self) -> dict[str, Fraction]:
        """Return the share of each source of training data by its fingerprint."""
        return {source.fingerprint: source.weight for source in self.train}


@dataclass(frozen=True, slots=True)
class _OpenFiles:
    """The open files of a rank by side, and for each source of training data its weight and number of files."""

    sides: _Files
    sources: Sequence[tuple[Fraction, int]]
    marks: DocumentMarks | None

    @property
    def counts(self) -> list[int]:
        """Return the number of files of each source of training data."""
        return [count for _, count in self.sources]

    def split(self, members: Sequence[T]) -> list[Sequence[T]]:
        """Return the parts of a list with a member for each training file, by source."""
        ends = list(itertools.accumulate(self.counts, initial=0))
        return [members[first:end] for first, end in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class _HostData:
    """The digests of the files of a host, by side, as reported to rank 0 by one of its ranks.

    Args:
        counts: the number of files of each source of training data.
        documents: the digest of the borders of each file's documents; empty where no sample depends on them.
    """

    host: str
    paths: Mapping[str, Sequence[str]]
    digests: _Digests
    counts: Sequence[int]
    documents: Mapping[str, Sequence[str]]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> _HostData:
        table = json.loads(data)
        digests = {side: [TokenDigest(**digest) for digest in files] for side, files in table["digests"].items()}
        return _HostData(table["host"], table["paths"], digests, table["counts"], table["documents"])


def open_data(config: Config, cluster: Cluster) -> RunData:
    """Open the files and check that all hosts have the same tokens. Collective.

    Raises:
        TrainerError: on every rank, if the data does not match the model or differs on a host; names host and file.
    """
    channel, host_data = cluster.channel.clone(_DATA_TIMEOUT_S), None
    with channel.agreed("data"):  # rank 0 first alone, so that the others find the prepared files and the digests
        if cluster.rank == 0:
            files = _open(config)
            host_data = _host_data(files, config)
    with channel.agreed("data/open"):
        if cluster.rank != 0:
            files = _open(config)
    host_ranks = _host_ranks(channel, cluster, files)
    with channel.agreed("data/digests"):
        if cluster.rank in host_ranks and host_data is None:
            host_data = _host_data(files, config)
    reports = channel.gather("data/hosts", b"" if host_data is None else host_data.encode())

    def fingerprints() -> Fingerprints:
        hosts = {rank: _HostData.decode(report) for rank, report in enumerate(reports) if report}
        if (error := _difference(hosts)) is not None:
            raise error
        return _fingerprints(hosts[0], files)

    return _run_data(files, *channel.from_first("data/fingerprints", fingerprints))


def open_data_alone(config: Config) -> RunData:
    """Return the data of a program without ranks.

    Raises:
        TrainerError: if the data does not match the model.
    """
    files = _open(config)
    return _run_data(files, *_fingerprints(_host_data(files, config), files))


def _run_data(files: _OpenFiles, train: Sequence[str], documents: Sequence[str | None], valid: str | None) -> RunData:
    """Return the data with the sources in order of their fingerprints, and weights that sum to 1.

    Args:
        train, documents: of each source.

    Raises:
        DataError: if two sources have the same tokens.
    """
    total = sum((weight for weight, _ in files.sources), Fraction())
    parts = zip(files.split(files.sides["train"]), train, files.sources, documents, strict=True)
    all_sources = [Source(members, digest, weight / total, borders) for members, digest, (weight, _), borders in parts]
    sources = sorted(all_sources, key=_by_fingerprint)
    for first, second in itertools.pairwise(sources):
        if first.fingerprint == second.fingerprint:
            raise DataError(
                "Two sources of a blend have the same tokens",
                where=f"{first.files[0].path} and {second.files[0].path}",
                found=f"fingerprint {first.fingerprint} of both",
                fix="Name one of them in data.train, with the sum of the weights.",
            )
    return RunData(sources, files.sides["valid"], valid, files.marks)


def _by_fingerprint(source: Source) -> str:
    return source.fingerprint


def data_cache(config: Config) -> Path:
    """Return the folder of prepared data."""
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config) -> _OpenFiles:
    """Open the files of both sides, and prepare them if they do not exist."""
    cache, weighted = data_cache(config), sources_of(config.data)
    corpora = [prepare(source.section, cache=cache) for source in weighted]
    for corpus in corpora:
        _check_vocabulary(corpus, config.model.vocab_size)
    train, valid = ([path for corpus in corpora for path in getattr(corpus, side)] for side in _SIDES)
    refuse_shared(train, valid)
    paths = {"train": train, "valid": valid if config.train.eval_interval else []}
    open_file = _OPENERS.get(config.data.kind, open_token_file)
    sides = {side: open_token_files(side_paths, open_file) for side, side_paths in paths.items()}
    pairs = zip(weighted, corpora, strict=True)
    counts = [(source.weight, len(corpus.train)) for source, corpus in pairs]
    return _OpenFiles(sides, counts, _marks(config, corpora[0]) if config.data.document_mask else None)


def _marks(config: Config, corpus: Corpus) -> DocumentMarks:
    """Return where documents end: by `data.end_of_text`, the index, or the tokenizer.

    Raises:
        DataError: if the tokenizer cannot be read, or the model does not have the token.
    """
    data, token = config.data, config.data.end_of_text
    if token is None and data.kind in INDEXED_KINDS:
        return DocumentMarks(None)
    if token is None:
        token = open_encoder(data.tokenizer).end_of_text if data.kind in TOKEN_KINDS else corpus.end_of_text
    if token is None or token >= config.model.vocab_size:
        raise DataError(
            "The token that ends a document is not in the vocabulary of the model",
            where="data.end_of_text",
            expected=f"0 to {config.model.vocab_size - 1}",
            found=token,
        )
    return DocumentMarks(token)


def _check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            "The data has more tokens than the model",
            expected=f"model.vocab_size of at least {corpus.vocab_size}",
            found=vocab_size,
            fix=f"Set model.vocab_size={corpus.vocab_size}, or choose other data.",
        )


def _host_data(files: _OpenFiles, config: Config) -> _HostData:
    """Return the digests of the files, after checking every token against the model's vocabulary."""
    cache, read_again = data_cache(config), config.data.verify is DigestSource.full
    digests: dict[str, list[TokenDigest]] = {side: [] for side in files.sides}
    for side, side_files in files.sides.items():
        for file in side_files:
            digests[side].append(digest_of(file, cache=cache, read_again=read_again))
            if digests[side][-1].largest >= config.model.vocab_size:
                check_tokens(file, config.model.vocab_size)
    paths = {side: [str(file.path) for file in side_files] for side, side_files in files.sides.items()}
    documents: dict[str, list[str]] = {side: [] for side in files.sides}
    if _uses_index(config, files.marks):
        make = partial(table_of, seq_length=config.train.seq_length, cache=cache, read_again=read_again)
        for side, side_files in files.sides.items():
            tables = [make(documents_of(file)) for file in side_files]
            documents[side] = [table.digest for table in tables]
    return _HostData(socket.gethostname(), paths, digests, files.counts, documents)


def _uses_index(config: Config, marks: DocumentMarks | None) -> bool:
    """Return whether samples depend on the index of documents beside the tokens."""
    return config.data.samples is SampleCut.per_document or (marks is not None and marks.end_of_text is None)


def _host_ranks(channel: StoreChannel, cluster: Cluster, files: _OpenFiles) -> list[int]:
    """Return the first rank of each group of ranks with a common view of files on a host; rank 0 is among them."""
    host = (cluster.local_ranks or (cluster.rank,))[0]
    groups = channel.gather("data/groups", f"{host} {_identity(files)}".encode())
    ranks: list[int] = channel.from_first("data/host_ranks", lambda: sorted({groups.index(group) for group in groups}))
    return ranks


def _identity(files: _OpenFiles) -> str:
    """Return a digest of the identity of the files on this host, and of their sources."""
    hasher = xxhash.xxh3_64(f"{files.counts}\n".encode())
    for side, side_files in files.sides.items():
        for file in side_files:
            status = file.status()
            times = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            hasher.update(f"{side} {status.st_dev} {status.st_ino} {times}\n".encode())
    return hasher.hexdigest()


def _fingerprints(data: _HostData, files: _OpenFiles) -> Fingerprints:
    """Return the fingerprints of the sources of training data, of their documents, and of the validation data."""
    train, valid = [fingerprint(parts) for parts in files.split(data.digests["train"])], data.digests["valid"]
    borders = [fingerprint_of_sources(parts) if parts else None for parts in files.split(data.documents["train"])]
    return train, borders, fingerprint(valid) if valid else None


def _difference(reported: Mapping[int, _HostData]) -> DataError | None:
    """Return an error with the first host with other data than rank 0's and the first different file."""
    for rank, data in reported.items():
        for side, words in _SIDES.items():
            expected, digests = reported[0].digests[side], data.digests[side]
            if fingerprint(expected) == fingerprint(digests):
                continue
            same = [first == second for first, second in zip(expected, digests, strict=False)]
            number = same.index(False) if False in same else len(same)
            return DataError(
                f"Hosts do not have the same {words} data",
                where=f"host {data.host}, rank {rank}",
                expected=f"that of host {reported[0].host}, rank 0: {_describe(reported[0], side, number)}",
                found=_describe(data, side, number),
                fix="Give every host the same files. If a cached digest may be wrong, data.verify=full reads all "
                "tokens again.",
            )
        if data.counts != reported[0].counts:
            return _other_sources(reported[0], data, rank)
        if data.documents != reported[0].documents:
            return _other_documents(reported[0], data, rank)
    return None


def _other_sources(first: _HostData, data: _HostData, rank: int) -> DataError:
    """Return an error with the first source of a blend with other files on a host than on rank 0's."""
    number = [expected == count for expected, count in zip(first.counts, data.counts, strict=True)].index(False)

    def files(data: _HostData) -> str:
        begin = sum(data.counts[:number])
        paths = data.paths["train"][begin : begin + data.counts[number]]
        return paths[0] if len(paths) == 1 else f"{len(paths)} files, {paths[0]} to {paths[-1]}"

    return DataError(
        "Hosts do not have the same files in each source of training data",
        where=f"host {data.host}, rank {rank}, data.train[{number}]",
        expected=f"that of host {first.host}, rank 0: {files(first)}",
        found=files(data),
        fix="Give every host the same files under the same names.",
    )


def _other_documents(first: _HostData, data: _HostData, rank: int) -> DataError:
    """Return an error with the first index with other documents on a host than on rank 0's."""
    side = next(side for side in _SIDES if data.documents[side] != first.documents[side])
    number = [a == b for a, b in zip(first.documents[side], data.documents[side], strict=True)].index(False)
    return DataError(
        f"Hosts do not have the same documents in the {_SIDES[side]} data, though the same tokens",
        where=f"host {data.host}, rank {rank}",
        expected=f"the index of {first.paths[side][number]} on host {first.host}, rank 0: digest "
        f"{first.documents[side][number]} of its documents",
        found=f"digest {data.documents[side][number]} of {data.paths[side][number]}",
        fix="Give every host the same indexes, .idx or .index files.",
    )


def _describe(data: _HostData, side: str, number: int) -> str:
    """Return the fingerprint of a side, and the name, size and digest of a file of it."""
    digests = data.digests[side]
    text = f"fingerprint {fingerprint(digests)} of {len(digests)} {'file' if len(digests) == 1 else 'files'}"
    if number >= len(digests):
        return f"{text}, no file number {number + 1}"
    file = digests[number]
    return f"{text}, {data.paths[side][number]} with {file.token_bytes} bytes of {file.dtype}, digest {file.digest}"
