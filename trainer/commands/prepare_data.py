"""Make token files of text, JSON lines, Parquet or raw tokens: `reprise prepare-data INPUT... --output FOLDER`.

Texts and JSON lines may be compressed with gzip or Zstandard, which the first bytes of a file tell.

The folder appears whole or not at all, and its files do not depend on the number of processes. The last line of the
output holds the overrides for the trainer's command line. The exit status is 0, 2 where it cannot be done, or 130 where
it was interrupted.
"""

from __future__ import annotations

import argparse
import glob
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from reprise.errors import ConfigError, TrainerError, count_of
from trainer.commands.arguments import local_path, positive
from trainer.config.overrides import text_value
from trainer.data.blocks import RAW_FORMS, TextForm
from trainer.data.prepared import FILE_TOKENS, Prepared, PrepareOptions, Progress, Side, write_prepared
from trainer.data.section import DataKind
from trainer.data.sources import TextSource, text_sources
from trainer.data.text import BYTES

FINE, IMPOSSIBLE = 0, 2
INTERRUPTED = 128 + signal.SIGINT  # as shells have it
KIND = DataKind.token_file.value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, print a summary and return the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="reprise prepare-data: %(message)s", stream=sys.stderr)
    try:
        with ExitStack() as bars:
            prepared = _prepare(options, partial(_begin_bar, bars))
    except TrainerError as error:
        print(f"reprise prepare-data: {type(error).__name__}: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        print("reprise prepare-data: interrupted, nothing is left", file=sys.stderr)
        return INTERRUPTED
    for side in prepared.sides:
        documents = f"{count_of(side.documents, 'document', form=',')}, " if side.documents else ""
        tokens = count_of(side.tokens, "token", form=",")
        print(f"{side.name}: {documents}{tokens}, {count_of(len(side.files), 'file')}")
    if not prepared.has_text:
        print(f"no tokenizer is named: token {prepared.end_of_text}, the largest, is taken for the end of text")
    print(" ".join(map(shlex.quote, overrides(prepared))))
    return FINE


def overrides(prepared: Prepared) -> list[str]:
    """Return the command-line overrides for a run to read the folder."""
    end = prepared.end_of_text
    paths = [f"data.{side.name}={_pattern(side)}" for side in prepared.sides]
    tokens = [f"model.vocab_size={prepared.vocab_size}", f"model.bos_token_id={end}", f"model.eos_token_id={end}"]
    tokenizer = "bytes" if prepared.tokenizer is None else text_value(str(prepared.tokenizer))
    return [
        f"data={prepared.kind.value}",
        *paths,
        *([f"data.tokenizer={tokenizer}"] if prepared.has_text else []),
        *tokens,
    ]


def _pattern(side: Side) -> str:
    first = side.files[0]
    if len(side.files) == 1:
        return text_value(str(first))
    return text_value(f"{glob.escape(str(first.parent))}/{side.name}_*.bin")


def _begin_bar(bars: ExitStack, title: str, total_bytes: int | None) -> Callable[[int], object]:
    """Show a progress bar for the current step, in place of the last, on a terminal only."""
    bars.close()
    bar: tqdm[NoReturn] = tqdm(total=total_bytes, desc=title, unit="B", unit_scale=True, disable=None, leave=False)
    bars.enter_context(bar)
    return lambda read_bytes: bar.update(read_bytes)


def _prepare(options: argparse.Namespace, progress: Progress) -> Prepared:
    takes_bytes, tokenizer, train = options.tokenizer == [BYTES], None, 0
    match options.tokenizer:
        case None | ["bytes"]:
            pass
        case ["train-bpe", number] if number.isdecimal():
            train = int(number)
        case [path] if path != "train-bpe":
            tokenizer = Path(path).expanduser()
        case words:
            raise ConfigError(
                "--tokenizer has another form",
                expected="bytes, a tokenizer.json, or train-bpe N",
                found=" ".join(words),
            )
    if options.valid and not options.raw:
        raise ConfigError("--valid goes with --raw only", fix="Hold out a part of the texts with --valid-fraction.")
    if options.raw and (options.form or options.valid_fraction or train or options.format != KIND):
        raise ConfigError(
            "--raw takes tokens, no texts",
            expected="--valid and --tokenizer PATH, and no --form, --format, --valid-fraction or train-bpe",
        )
    inputs, held_out = (_sources(patterns, is_raw=bool(options.raw)) for patterns in (options.inputs, options.valid))
    form = options.raw or options.form
    prepare_options = PrepareOptions(
        form=None if form is None else TextForm(form),
        key=options.key,
        tokenizer=tokenizer,
        train_vocab_size=train,
        valid_fraction=options.valid_fraction,
        held_out=held_out,
        file_tokens=options.file_tokens,
        kind=DataKind(options.format),
        takes_bytes=takes_bytes,
    )
    # Bytes take longer to pass between processes than to encode.
    is_slow = not options.raw and (tokenizer is not None or train > 0)
    workers = options.workers or (len(os.sched_getaffinity(0)) if is_slow else 1)
    return write_prepared(
        options.output, inputs, prepare_options, workers=workers, replace=options.force, progress=progress
    )


def _sources(patterns: Sequence[str], *, is_raw: bool) -> list[TextSource]:
    """Return the files of patterns, in their order; arrays of tokens in the order of their paths."""
    groups = [text_sources(pattern) for pattern in patterns]
    return [source for group in groups for source in (sorted(group, key=attrgetter("path")) if is_raw else group)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reprise prepare-data", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files or quoted globs, read in this order")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="the folder to make")
    parser.add_argument(
        "--tokenizer",
        nargs="+",
        metavar="WORD",
        help="bytes (the default; written out, it takes files that are not text), a tokenizer.json, or train-bpe N: "
        "train one of N tokens on the training documents",
    )
    parser.add_argument(
        "--form",
        choices=[form.value for form in TextForm if form not in RAW_FORMS],
        help="of all inputs but Parquet, which has documents; by default jsonl for a file named .jsonl or .ndjson, or "
        "with JSON objects as its first lines, else text",
    )
    parser.add_argument(
        "--format",
        choices=[kind.value for kind in (DataKind.token_file, DataKind.megatron)],
        default=KIND,
        help="of the files to write: token files, or pairs of .bin and .idx as Megatron-LM has them",
    )
    parser.add_argument(
        "--raw",
        choices=[form.value for form in RAW_FORMS],
        help="the inputs are arrays of tokens of this dtype without a header, as nanoGPT's",
    )
    parser.add_argument("--valid", nargs="+", default=[], metavar="INPUT", help="arrays for validation; with --raw")
    parser.add_argument("--key", default="text", help="of the text in a JSON line, or its column in Parquet")
    parser.add_argument("--valid-fraction", type=float, default=0.0, metavar="F", help="share that is held out")
    parser.add_argument("--file-tokens", type=int, default=FILE_TOKENS, metavar="N", help="most tokens of a file")
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes; by default one for each core, and one alone for bytes",
    )
    parser.add_argument("--force", action="store_true", help="replace a folder that an earlier call has made")
    return parser


if __name__ == "__main__":
    sys.exit(main())
