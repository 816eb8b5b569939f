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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from operator import attrgetter
from pathlib import Path

import xxhash

from reprise.errors import DataError
from reprise.ranks import StoreChannel
from trainer.config.schema import Config
from trainer.data.corpus import Corpus, default_cache, prepare
from trainer.data.datatrove_file import open_datatrove_file
from trainer.data.digest_file import digest_of, identity
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
# Openers of files with an index; all others have the header of token files.
_OPENERS = {DataKind.megatron: open_indexed_file, DataKind.datatrove: open_datatrove_file}
_VALID = "data.valid"
# Of the tokens and of the borders of documents, by the key of a source or of the validation data.
Fingerprints = Mapping[str, tuple[str, str | None]]


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
    """The open files of a rank.

    Args:
        sides: by the key of a source or of the validation data; training data first.
        weights: of the sources by key.
        marks: the documents of `data.document_mask`; None without it.
    """

    sides: Mapping[str, Sequence[TokenFile]]
    weights: Mapping[str, Fraction]
    marks: DocumentMarks | None

    def __iter__(self) -> Iterator[tuple[str, TokenFile]]:
        """Yield each file behind its key."""
        return ((key, file) for key, files in self.sides.items() for file in files)


@dataclass(frozen=True, slots=True)
class _FileReport:
    """What a rank of a host reports of a file to rank 0.

    Args:
        key: of its source, or of the validation data.
        documents: the digest of the borders of its documents; empty where no sample depends on them.
    """

    key: str
    path: str
    digest: TokenDigest
    documents: str

    def __str__(self) -> str:
        """Return what must be equal on all hosts, behind the path."""
        borders = f" and {self.documents} of its documents' borders" if self.documents else ""
        digest = self.digest
        size = f"{digest.token_bytes} bytes of {digest.dtype}"
        return f"{self.path} with {size} in {self.key}, digest {digest.digest} of the tokens{borders}"


def open_data(config: Config, cluster: Cluster, *, is_evaluation: bool = False) -> RunData:
    """Open the files and check that all hosts have the same tokens. Collective.

    Args:
        is_evaluation: open the validation data alone, which then is the training data too.

    Raises:
        TrainerError: on every rank, if the data does not match the model or differs on a host; names host and file.
    """
    channel, report = cluster.channel.clone(_DATA_TIMEOUT_S), b""
    with channel.agreed("data"):  # rank 0 first alone, so that the others find the prepared files and the digests
        if cluster.rank == 0:
            files = _open(config, is_evaluation=is_evaluation)
            report = _encode(_reports(files, config))
    with channel.agreed("data/open"):
        if cluster.rank != 0:
            files = _open(config, is_evaluation=is_evaluation)
    host_ranks = _host_ranks(channel, cluster, files)
    with channel.agreed("data/digests"):
        if cluster.rank in host_ranks and not report:
            report = _encode(_reports(files, config))
    reports = channel.gather("data/hosts", report)

    def fingerprints() -> Fingerprints:
        hosts = {rank: _decode(report) for rank, report in enumerate(reports) if report}
        _refuse_difference(hosts)
        return _fingerprints(hosts[0][1])

    return _run_data(files, channel.from_first("data/fingerprints", fingerprints))


def open_data_alone(config: Config) -> RunData:
    """Return the data of a program without ranks.

    Raises:
        TrainerError: if the data does not match the model.
    """
    files = _open(config)
    return _run_data(files, _fingerprints(_reports(files, config)))


def _run_data(files: _OpenFiles, fingerprints: Fingerprints) -> RunData:
    """Return the data with the sources in order of their fingerprints, and weights that sum to 1.

    Raises:
        DataError: if two sources have the same tokens.
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
    """Return the folder of prepared data."""
    return Path(config.data.cache) if config.data.cache else default_cache(os.environ, Path.home())


def _open(config: Config, *, is_evaluation: bool = False) -> _OpenFiles:
    """Open the files of both sides, and prepare them if they do not exist."""
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


def _reports(files: _OpenFiles, config: Config) -> list[_FileReport]:
    """Return the digests of the files, after checking every token against the model's vocabulary."""
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
    """Return the name of a host and what it reports of its files."""
    host, tables = json.loads(data)
    return host, [_FileReport(**{**table, "digest": TokenDigest(**table["digest"])}) for table in tables]


def _host_ranks(channel: StoreChannel, cluster: Cluster, files: _OpenFiles) -> list[int]:
    """Return the first rank of each group of ranks with a common view of files on a host; rank 0 is among them."""
    host = (cluster.local_ranks or (cluster.rank,))[0]
    groups = channel.gather("data/groups", f"{host} {_identity(files)}".encode())
    ranks: list[int] = channel.from_first("data/host_ranks", lambda: sorted({groups.index(group) for group in groups}))
    return ranks


def _identity(files: _OpenFiles) -> str:
    """Return a digest of the identity of the files on this host, and of their sources."""
    hasher = xxhash.xxh3_64()
    for key, file in files:
        if isinstance(file, ModuleFile):
            view = str(file.digest)
        else:
            status = file.status()
            view = f"{status.st_dev} {status.st_ino} {identity(status)}"
        hasher.update(f"{key} {view}\n".encode())
    return hasher.hexdigest()


def _fingerprints(reports: Sequence[_FileReport]) -> Fingerprints:
    """Return the fingerprints of each source of training data and of the validation data, as far as there is any."""
    fingerprints = {}
    for key, group in itertools.groupby(reports, attrgetter("key")):
        files = list(group)
        borders = fingerprint_of_sources([file.documents for file in files]) if files[0].documents else None
        fingerprints[key] = fingerprint([file.digest for file in files]), borders
    return fingerprints


def _refuse_difference(hosts: Mapping[int, tuple[str, Sequence[_FileReport]]]) -> None:
    """Refuse other data on a host than on that of rank 0, naming the host and the first different file.

    Raises:
        DataError: a file has other tokens or documents, or belongs to another source.
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
