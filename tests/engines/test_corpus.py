"""A corpus by datatrove, killed in the middle and gone on with: tokens and order are those of `prepare-data`."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from reprise.errors import DataError
from tests.bpe import train_bpe
from tests.engines.programs import example, kill, needs, run_ok, started, wait_until
from trainer.data.blocks import TextForm
from trainer.data.indexed_file import open_indexed_file
from trainer.data.prepared import Prepared, PrepareOptions, write_prepared
from trainer.data.section import DataKind
from trainer.data.sources import text_sources

FILES, DOCUMENTS = 5, 5000
LARGE = 1  # its tokens do not fit into a pipe
HELD = (LARGE, 3)  # the tasks that the two workers are at when they are killed
COMPLETED = (0, 2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of documents as JSON lines."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(FILES):
        words = rng.integers(0, 1000, (DOCUMENTS if number == LARGE else 50, 8)).tolist()
        lines = [json.dumps({"text": " ".join(map(str, row)) + " äö"}) for row in words]
        (folder / f"part_{number}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def prepared(texts: Path) -> Prepared:
    """Return what `prepare-data` makes of the files, with a tokenizer of their own."""
    tokenizer = texts.parent / "tokenizer.json"
    tokenizer.write_bytes(train_bpe((line for path in sorted(texts.iterdir()) for line in path.open()), 400))
    options = PrepareOptions(TextForm.jsonl, tokenizer=tokenizer, kind=DataKind.megatron)
    return write_prepared(texts.parent / "prepared", text_sources(f"{texts}/*"), options, workers=1)


def kill_in_the_middle(command: list[str], tokens: Path, log: Path) -> None:
    """Kill a corpus while a worker writes the tokens of a task, another begins a task, and others are complete.

    The files of the two are pipes: the first worker waits for room in its pipe, the second for a reader.
    """
    tokens.mkdir()
    held = {number: tokens / f"{number:05d}_tokens.bin" for number in HELD}
    for path in held.values():
        os.mkfifo(path)
    pipe, read = os.open(held[LARGE], os.O_RDONLY | os.O_NONBLOCK), bytearray()

    def is_in_the_middle() -> bool:
        with contextlib.suppress(BlockingIOError):
            read.extend(os.read(pipe, 1000) if not read else b"")
        completed = [tokens.with_name(f"{tokens.name}.logs") / f"completions/{number:05d}" for number in COMPLETED]
        return bool(read) and all(path.exists() for path in completed)

    with started(command, log) as program:
        wait_until(is_in_the_middle, program, log)
        kill(program)
    os.close(pipe)
    for path in held.values():
        path.unlink()
    held[LARGE].write_bytes(read)  # what such a worker leaves in a file
    with pytest.raises(DataError, match=r"\.idx"):
        open_indexed_file(held[LARGE])


@pytest.mark.slow
@needs("datatrove", "orjson", "ray")
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_corpus_is_that_of_prepare_data(tmp_path: Path, texts: Path, prepared: Prepared, engine: str) -> None:
    assert prepared.tokenizer is not None
    tokens = tmp_path / "tokens"
    command = example("corpus", texts, prepared.tokenizer, tokens, engine)
    kill_in_the_middle(command, tokens, tmp_path / "killed.log")
    completed = [tokens / f"{number:05d}_tokens.bin" for number in COMPLETED]
    times = [path.stat().st_mtime_ns for path in completed]
    printed = run_ok(command, tmp_path / "resumed.log")
    assert f"data=megatron 'data.train={tokens}/*.bin'" in printed
    assert [path.stat().st_mtime_ns for path in completed] == times  # they are not made again

    files = [open_indexed_file(path) for path in sorted(tokens.glob("*.bin"))]
    assert len(files) == FILES
    (expected,) = (open_indexed_file(path) for path in prepared.folder.glob("*.bin"))
    assert np.array_equal(np.concatenate([file.read() for file in files]), expected.read())
    assert expected.documents is not None
    borders, end = [np.zeros(1, np.int64)], 0
    for file in files:
        assert file.documents is not None
        borders.append(file.documents.borders(0, file.documents.count)[1:] + end)
        end += file.count
    assert np.array_equal(np.concatenate(borders), expected.documents.borders(0, expected.documents.count))
