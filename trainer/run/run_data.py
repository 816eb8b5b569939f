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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path

from reprise.errors import DataError
from reprise.storage import Json
from trainer.config.schema import Config
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.digest_file import digest_of
from trainer.data.document_table import table_of
from trainer.data.documents import DocumentMarks, uses_index
from trainer.data.fingerprint import TokenDigest, fingerprint, fingerprint_of_sources
from trainer.data.indexed_file import open_indexed_file
from trainer.data.module_file import SAMPLES, ModuleFile
from trainer.data.section import TOKEN_KINDS, DataKind, SampleCut, sources_of
from trainer.data.text import open_encoder
from trainer.data.token_file import TokenFile, open_token_file, open_token_files
from trainer.launch.process_group import Cluster

_DATA_TIMEOUT_S = 24 * 3600.0
_VALID = "data.valid"
# Fingerprints of tokens and of document boundaries, by the key for a source or the validation data.
Fingerprints = Mapping[str, tuple[str, str | None]]
# A host's name, and for each file its source's key, path, token digest, and the digest of its document boundaries.
HostReport = tuple[str, Sequence[tuple[str, str, Json, str]]]


@dataclass(frozen=True, slots=True)
class Source:
    """A training data source, or the validation data, with its open files.

    Args:
        key: Its key in messages.
        weight: Its share of the samples. 0 for the validation data.
        fingerprint: Its tokens' fingerprint. Empty before all hosts agree on it.
        documents: Fingerprint of its document boundaries. None if no sample depends on them.
    """

    key: str
    files: Sequence[TokenFile]
    weight: Fraction
    fingerprint: str = ""
    documents: str | None = None


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
            sources, marks = _open(config, is_evaluation=is_evaluation)
            report = _report(sources, marks, config)
    with channel.agreed("data/open"):
        if cluster.rank != 0:
            sources, marks = _open(config, is_evaluation=is_evaluation)
            if cluster.rank in cluster.local_ranks[:1] or not cluster.local_ranks:  # a host's first rank
                report = _report(sources, marks, config)
    reports = channel.gather("data/hosts", report)
    fingerprints = channel.from_first("data/fingerprints", lambda: _fingerprints(reports, may_share=is_evaluation))
    return _run_data(sources, marks, fingerprints)


def _run_data(sources: Sequence[Source], marks: DocumentMarks | None, fingerprints: Fingerprints) -> RunData:
    """Return the data with its sources in fingerprint order, and weights summing to 1.

    Raises:
        DataError: Two sources have the same tokens.
    """
    total, members = sum(source.weight for source in sources), list[Source]()
    for source in sources:
        tokens, documents = fingerprints[source.key]
        members.append(replace(source, weight=source.weight / total, fingerprint=tokens, documents=documents))
    train = sorted((source for source in members if source.weight), key=attrgetter("fingerprint"))
    for first, second in itertools.pairwise(train):
        if first.fingerprint == second.fingerprint:
            raise DataError(
                "Two sources of a blend have the same tokens",
                where=f"{first.files[0].path} and {second.files[0].path}",
                found=f"fingerprint {first.fingerprint} of both",
                fix="Name one of them in data.train, with the sum of the weights.",
            )
    valid = next((source for source in members if not source.weight), None)
    if valid is None:
        return RunData(train, (), None, marks)
    return RunData(train, valid.files, valid.fingerprint, marks)


def data_cache(config: Config) -> Path:
    """Return the folder for prepared data."""
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config, *, is_evaluation: bool) -> tuple[list[Source], DocumentMarks | None]:
    """Open training and validation files, and prepare them if they do not exist. Return also how documents end."""
    cache, corpora, valid = data_cache(config), list[Corpus](), list[Path]()
    parts = list[tuple[str, Sequence[Path], Fraction]]()  # key, files and weight
    is_valid_alone = is_evaluation and config.data.kind in TOKEN_KINDS
    section = replace(config.data, train=None) if is_valid_alone else config.data
    for number, (source, weight) in enumerate(sources_of(section)):
        corpora.append(corpus := prepare(source, cache=cache))
        parts.append((f"data.train[{number}]", corpus.train, weight))
        valid += corpus.valid
    open_file = open_indexed_file if section.kind is DataKind.megatron else open_token_file
    if section.kind is DataKind.module:
        length, rows = config.train.seq_length, config.model.vocab_size
        open_file = partial(ModuleFile, factory=section.factory or "", seq_length=length, vocab_size=rows)
    if is_evaluation:
        parts = [("data.train[0]", valid, Fraction(1))]
    if config.train.eval_interval:
        parts.append((_VALID, valid, Fraction()))
    files = iter(open_token_files([path for _, paths, _ in parts for path in paths], open_file))
    sources = [Source(key, [*itertools.islice(files, len(paths))], weight) for key, paths, weight in parts]
    return sources, _marks(config, corpora[0]) if config.data.document_mask else None


def _marks(config: Config, corpus: Corpus) -> DocumentMarks:
    """Return how documents end: by `data.end_of_text`, the index, or the tokenizer.

    Raises:
        DataError: The tokenizer cannot be read, or the model lacks the token.
    """
    data, token = config.data, config.data.end_of_text
    if token is None and data.kind is DataKind.megatron:
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


def _report(sources: Sequence[Source], marks: DocumentMarks | None, config: Config) -> bytes:
    """Check every token against the model's vocabulary, and return this host's `HostReport` as JSON."""
    cache, rows = data_cache(config), list[object]()
    has_tables = uses_index(marks, per_document=config.data.samples is SampleCut.per_document)
    for key, file in ((source.key, file) for source in sources for file in source.files):
        documents = ""
        digest = file.digest if isinstance(file, ModuleFile) else digest_of(file, cache=cache)
        if digest.largest >= config.model.vocab_size:
            raise DataError(
                "A token is outside the model's vocabulary",
                where=file.path,
                expected=f"0 to {config.model.vocab_size - 1}",
                found=digest.largest,
                fix="Set model.vocab_size to the vocabulary size of the tokenizer that wrote the file.",
            )
        if has_tables:
            documents = table_of(file, config.train.seq_length).digest
        rows.append([key, str(file.path), asdict(digest), documents])
    return json.dumps([socket.gethostname(), rows]).encode()


def _fingerprints(reports: Sequence[bytes], *, may_share: bool) -> Fingerprints:
    """Return each source's fingerprints, by its key.

    Args:
        reports: Each rank's report. Empty for a rank that is not its host's first.
        may_share: Whether training data may be validation data.

    Raises:
        DataError: A host's data differs from rank 0's host, or a validation file is training data. The message names
            the first such file.
    """
    hosts: dict[int, HostReport] = {rank: json.loads(report) for rank, report in enumerate(reports) if report}
    first_host, first = hosts[0]
    for rank, (host, host_rows) in hosts.items():
        for expected, actual in itertools.zip_longest(first, host_rows):
            if None in (expected, actual) or (expected[0], *expected[2:]) != (actual[0], *actual[2:]):
                raise DataError(
                    "Hosts do not have the same data",
                    where=f"host {host}, rank {rank}",
                    expected=f"that of host {first_host}, rank 0: {_described(expected)}",
                    found=_described(actual),
                    fix="Give every host the same files under the same names, with the same index if they have one. If "
                    "a cached digest may be wrong, delete it: .NAME.digest beside the file, or in digests/ of "
                    "data.cache.",
                )
    rows = [(key, path, TokenDigest(**digest), documents) for key, path, digest, documents in first]
    trained = {digest: path for key, path, digest, _ in rows if key != _VALID and not may_share}
    for key, path, digest, _ in rows:
        if key == _VALID and digest.dtype != SAMPLES and digest in trained:
            raise DataError(
                "A file is in both the training data and the validation data",
                where=path,
                expected="no validation file in the training data",
                found=f"its tokens in {trained[digest]}",
                fix="Remove it from one of the two; the glob 'FOLDER/train_*.bin' matches only the training files.",
            )
    fingerprints = {}
    for key, group in itertools.groupby(rows, itemgetter(0)):
        _, _, digests, documents = zip(*group, strict=True)
        fingerprints[key] = fingerprint(digests), fingerprint_of_sources(documents) if documents[0] else None
    return fingerprints


def _described(row: tuple[str, str, Json, str] | None) -> str:
    """Describe a file by its path and everything that must be equal on all hosts."""
    if row is None:
        return "no further file"
    key, path, digest, documents = row
    borders = f" and {documents} of its document boundaries" if documents else ""
    size = f"{digest['token_bytes']} bytes of {digest['dtype']}"
    return f"{path} with {size} in {key}, digest {digest['digest']} of the tokens{borders}"
