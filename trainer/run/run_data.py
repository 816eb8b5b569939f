"""Opens a run's token files on every rank, and ends the run if two hosts have different tokens.

A rank on each host computes its files' digests. All of this runs before the state is built, with its own timeout,
because reading the tokens may take longer than `train.distributed_timeout_minutes`. Meanwhile, a missing heartbeat
reports a rank's death.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path

from reprise.errors import DataError
from reprise.storage import Json
from trainer.config.schema import Config
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.digest_file import digest_of
from trainer.data.document_table import table_of
from trainer.data.documents import DocumentMarks, uses_index
from trainer.data.fingerprint import TokenDigest, check_tokens, fingerprint, fingerprint_of_sources
from trainer.data.indexed_file import open_indexed_file
from trainer.data.module_file import ModuleFile
from trainer.data.section import INDEXED_KINDS, TOKEN_KINDS, DataKind, DigestSource, SampleCut, sources_of
from trainer.data.sources import refuse_shared
from trainer.data.text import open_encoder
from trainer.data.token_file import TokenFile, open_token_file, open_token_files
from trainer.launch.process_group import Cluster

_DATA_TIMEOUT_S = 24 * 3600.0
# Openers for files with an index. All others have a token file header.
_OPENERS = {DataKind.megatron: open_indexed_file, DataKind.datatrove: open_datatrove_file}
_VALID = "data.valid"
# Fingerprints of tokens and of document boundaries, by the key for a source or the validation data.
Fingerprints = Mapping[str, tuple[str, str | None]]


@dataclass(frozen=True, slots=True)
class Source:
    """A training data source: its open files, their fingerprint, and its weight.

    Args:
        documents: Fingerprint of its document boundaries. None if no sample depends on them.
    """

    files: Sequence[TokenFile]
    fingerprint: str
    weight: Fraction
    documents: str | None


@dataclass(frozen=True, slots=True)
class RunData:
    """A run's open token files, with the same tokens on every rank.

    Args:
        train: Training data sources, in fingerprint order.
        valid: Validation files. Empty if the run never evaluates.
        valid_fingerprint: The validation data's fingerprint. None if the run never evaluates.
        marks: The documents for `data.document_mask`. None without it.
    """

    train: Sequence[Source]
    valid: Sequence[TokenFile]
    valid_fingerprint: str | None
    marks: DocumentMarks | None = None

    def record(self, config: Config) -> Json:
        """Return the `data` record for a run's checkpoints: its fingerprints, and what its samples depend on.

        A padded sample's micro-batch size is part of the data: a micro-batch's loss is the mean over its targets.
        """
        record: Json = {"fingerprint": fingerprint_of_sources([source.fingerprint for source in self.train])}
        if len(self.train) > 1:
            record["weights"] = {source.fingerprint: str(source.weight) for source in self.train}
        if self.marks is not None:
            record["document_mask"] = "index" if self.marks.end_of_text is None else self.marks.end_of_text
        if documents := [source.documents for source in self.train if source.documents is not None]:
            record["documents"] = fingerprint_of_sources(documents)
        if config.data.samples is not SampleCut.across_documents:
            record |= {"samples": config.data.samples.value, "micro_batch_size": config.train.micro_batch_size}
        return record | ({"valid_fingerprint": self.valid_fingerprint} if self.valid_fingerprint else {})


@dataclass(frozen=True, slots=True)
class _OpenFiles:
    """A rank's open files.

    Args:
        sides: Files by the key for a source or the validation data. Training data comes first.
        weights: The sources' weights by key.
        marks: The documents for `data.document_mask`. None without it.
    """

    sides: Mapping[str, Sequence[TokenFile]]
    weights: Mapping[str, Fraction]
    marks: DocumentMarks | None

    def __iter__(self) -> Iterator[tuple[str, TokenFile]]:
        """Yield each file after its key."""
        return ((key, file) for key, files in self.sides.items() for file in files)


@dataclass(frozen=True, slots=True)
class _FileReport:
    """A rank's report about a file on its host, for rank 0.

    Args:
        key: The key for its source, or for the validation data.
        documents: Digest of its document boundaries. Empty if no sample depends on them.
    """

    key: str
    path: str
    digest: TokenDigest
    documents: str

    def __str__(self) -> str:
        """Return the path, followed by everything that must be equal on all hosts."""
        borders = f" and {self.documents} of its document boundaries" if self.documents else ""
        digest = self.digest
        size = f"{digest.token_bytes} bytes of {digest.dtype}"
        return f"{self.path} with {size} in {self.key}, digest {digest.digest} of the tokens{borders}"


def open_data(config: Config, cluster: Cluster, *, is_evaluation: bool = False) -> RunData:
    """Open the files, and check that all hosts have the same tokens. Collective.

    Args:
        is_evaluation: Open only the validation data, which then is the training data too.

    Raises:
        TrainerError: The data does not match the model or differs between hosts. The message names host and file. Every
            rank raises.
    """
    channel, report = cluster.channel.clone(_DATA_TIMEOUT_S), b""
    with channel.agreed("data"):  # rank 0 goes first, so the others find prepared files and digests
        if cluster.rank == 0:
            files = _open(config, is_evaluation=is_evaluation)
            report = _encode(_reports(files, config))
    with channel.agreed("data/open"):
        if cluster.rank != 0:
            files = _open(config, is_evaluation=is_evaluation)
    with channel.agreed("data/digests"):
        if cluster.rank in cluster.local_ranks[:1] or not cluster.local_ranks:  # a host's first rank
            report = report or _encode(_reports(files, config))
    reports = channel.gather("data/hosts", report)

    def fingerprints() -> Fingerprints:
        hosts = {rank: _decode(report) for rank, report in enumerate(reports) if report}
        _refuse_difference(hosts)
        return _fingerprints(hosts[0][1])

    return _run_data(files, channel.from_first("data/fingerprints", fingerprints))


def open_data_alone(config: Config) -> RunData:
    """Return the data for a program without ranks.

    Raises:
        TrainerError: The data does not match the model.
    """
    files = _open(config)
    return _run_data(files, _fingerprints(_reports(files, config)))


def _run_data(files: _OpenFiles, fingerprints: Fingerprints) -> RunData:
    """Return the data with its sources in fingerprint order, and weights summing to 1.

    Raises:
        DataError: Two sources have the same tokens.
    """
    total, sources = sum(files.weights.values()), list[Source]()
    for key, weight in files.weights.items():
        tokens, documents = fingerprints[key]
        sources.append(Source(files.sides[key], tokens, weight / total, documents))
    sources.sort(key=attrgetter("fingerprint"))
    for first, second in itertools.pairwise(sources):
        if first.fingerprint == second.fingerprint:
            raise DataError(
                "Two sources of a blend have the same tokens",
                where=f"{first.files[0].path} and {second.files[0].path}",
                found=f"fingerprint {first.fingerprint} of both",
                fix="Name one of them in data.train, with the sum of the weights.",
            )
    valid, _ = fingerprints.get(_VALID, (None, None))
    return RunData(sources, files.sides[_VALID], valid, files.marks)


def data_cache(config: Config) -> Path:
    """Return the folder for prepared data."""
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config, *, is_evaluation: bool = False) -> _OpenFiles:
    """Open training and validation files, and prepare them if they do not exist."""
    cache, weights, paths, valid = data_cache(config), dict[str, Fraction](), dict[str, Sequence[Path]](), list[Path]()
    corpora = list[Corpus]()
    is_valid_alone = is_evaluation and config.data.kind in TOKEN_KINDS
    section = replace(config.data, train=None) if is_valid_alone else config.data
    for number, source in enumerate(sources_of(section)):
        corpora.append(corpus := prepare(source.section, cache=cache))
        _check_vocabulary(corpus, config.model.vocab_size)
        key = f"data.train[{number}]"
        weights[key], paths[key] = source.weight, corpus.train
        valid += corpus.valid
    if is_evaluation:
        weights, paths = {"data.train[0]": Fraction(1)}, {"data.train[0]": valid}
    elif section.kind is not DataKind.module:
        refuse_shared([*itertools.chain(*paths.values())], valid)
    paths[_VALID] = valid if config.train.eval_interval else []
    open_file = _OPENERS.get(config.data.kind, open_token_file)
    if section.kind is DataKind.module:
        length, rows = config.train.seq_length, config.model.vocab_size
        open_file = partial(ModuleFile, factory=section.factory or "", seq_length=length, vocab_size=rows)
    queue = iter(open_token_files([*itertools.chain(*paths.values())], open_file))
    sides = {key: list(itertools.islice(queue, len(members))) for key, members in paths.items()}
    return _OpenFiles(sides, weights, _marks(config, corpora[0]) if config.data.document_mask else None)


def _marks(config: Config, corpus: Corpus) -> DocumentMarks:
    """Return how documents end: by `data.end_of_text`, the index, or the tokenizer.

    Raises:
        DataError: The tokenizer cannot be read, or the model lacks the token.
    """
    data, token = config.data, config.data.end_of_text
    if token is None and data.kind in INDEXED_KINDS:
        return DocumentMarks(None)
    if token is None:
        token = open_encoder(data.tokenizer).end_of_text if data.kind in TOKEN_KINDS else corpus.end_of_text
    if token is None or token >= config.model.vocab_size:
        raise DataError(
            "The end-of-document token is not in the model's vocabulary",
            where="data.end_of_text",
            expected=f"0 to {config.model.vocab_size - 1}",
            found=token,
        )
    return DocumentMarks(token)


def _check_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    if corpus.vocab_size is not None and corpus.vocab_size > vocab_size:
        raise DataError(
            "The data has a larger vocabulary than the model",
            expected=f"model.vocab_size of at least {corpus.vocab_size}",
            found=vocab_size,
            fix=f"Set model.vocab_size={corpus.vocab_size}, or choose other data.",
        )


def _reports(files: _OpenFiles, config: Config) -> list[_FileReport]:
    """Check every token against the model's vocabulary, and return the files' digests."""
    cache, read_again, reports = data_cache(config), config.data.verify is DigestSource.full, list[_FileReport]()
    has_tables = uses_index(files.marks, per_document=config.data.samples is SampleCut.per_document)
    for key, file in files:
        documents = ""
        if isinstance(file, ModuleFile):
            digest = file.digest
        else:
            digest = digest_of(file, cache=cache, read_again=read_again)
        if digest.largest >= config.model.vocab_size:
            check_tokens(file, config.model.vocab_size)
        if has_tables:
            length = config.train.seq_length
            documents = table_of(file, seq_length=length, cache=cache, read_again=read_again).digest
        reports.append(_FileReport(key, str(file.path), digest, documents))
    return reports


def _encode(reports: Sequence[_FileReport]) -> bytes:
    return json.dumps([socket.gethostname(), [asdict(report) for report in reports]]).encode()


def _decode(data: bytes) -> tuple[str, list[_FileReport]]:
    """Return a host's name and its file reports."""
    host, tables = json.loads(data)
    return host, [_FileReport(**{**table, "digest": TokenDigest(**table["digest"])}) for table in tables]


def _fingerprints(reports: Sequence[_FileReport]) -> Fingerprints:
    """Return each training source's fingerprints, and the validation data's if there is any."""
    fingerprints = {}
    for key, group in itertools.groupby(reports, attrgetter("key")):
        files = list(group)
        borders = fingerprint_of_sources([file.documents for file in files]) if files[0].documents else None
        fingerprints[key] = fingerprint([file.digest for file in files]), borders
    return fingerprints


def _refuse_difference(hosts: Mapping[int, tuple[str, Sequence[_FileReport]]]) -> None:
    """Refuse a host whose data differs from rank 0's host, naming it and the first different file.

    Raises:
        DataError: A file has other tokens or documents, or belongs to another source.
    """
    first_host, first = hosts[0]
    for rank, (host, reports) in hosts.items():
        for expected, actual in itertools.zip_longest(first, reports):
            contents = [file and (file.key, file.digest, file.documents) for file in (expected, actual)]
            if contents[0] != contents[1]:
                raise DataError(
                    "Hosts do not have the same data",
                    where=f"host {host}, rank {rank}",
                    expected=f"that of host {first_host}, rank 0: {expected or 'no further file'}",
                    found=actual or "no further file",
                    fix="Give every host the same files under the same names, with the same index if they have one. If "
                    "a cached digest may be wrong, data.verify=full reads all tokens again.",
                )
