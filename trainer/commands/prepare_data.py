"""Make token files from text, JSON lines, Parquet or raw tokens: `reprise prepare-data INPUT... --output FOLDER`.

Text and JSON lines may be compressed with gzip or Zstandard, which is detected from the file's first bytes.

The folder appears complete or not at all, and its files do not depend on the process count. The output's last line
holds the overrides for the trainer's command line. The exit status is 0, 2 if the command fails, or 130 if interrupted.
"""

from __future__ import annotations

import argparse
import glob
import os
import shlex
from pathlib import Path

import numpy as np

from reprise.errors import ConfigError, count_of
from trainer.commands.arguments import local_path, positive, share
from trainer.commands.frame import FINE, framed
from trainer.config.overrides import text_value
from trainer.data.blocks import TextForm
from trainer.data.prepared import FILE_TOKENS, Prepared, PrepareOptions, write_prepared
from trainer.data.section import DataKind
from trainer.data.sources import text_sources
from trainer.data.text import BYTES

KIND = DataKind.token_file.value
_FORMS, _DTYPES = ("text", "jsonl"), ("uint16", "uint32")


def prepare(options: argparse.Namespace) -> int:
    """Write the files, and print a summary."""
    prepared = _prepare(options)
    for side in prepared.sides:
        documents = f"{count_of(side.documents, 'document', form=',')}, " if side.documents else ""
        tokens = count_of(side.tokens, "token", form=",")
        print(f"{side.name}: {documents}{tokens}, {count_of(side.files, 'file')}")
    if prepared.tokenizer is None:
        print(f"no --tokenizer, so the largest token, {prepared.end_of_text}, is used as the end-of-text token")
    print(" ".join(map(shlex.quote, overrides(prepared, options.format))))
    return FINE


def overrides(prepared: Prepared, kind: str) -> list[str]:
    """Return the command-line overrides with which a run reads the folder."""
    end, folder = prepared.end_of_text, glob.escape(str(prepared.folder))
    paths = [f"data.{side.name}={text_value(f'{folder}/{side.name}_*.bin')}" for side in prepared.sides]
    tokens = [f"model.vocab_size={prepared.vocab_size}", f"model.bos_token_id={end}", f"model.eos_token_id={end}"]
    tokenizer = prepared.tokenizer
    return [
        f"data={kind}",
        *paths,
        *([] if tokenizer is None else [f"data.tokenizer={text_value(str(tokenizer))}"]),
        *tokens,
    ]


def _prepare(options: argparse.Namespace) -> Prepared:
    name = options.tokenizer
    tokenizer = name if name in (None, BYTES) else Path(name).expanduser()
    if options.valid and not options.raw:
        raise ConfigError("--valid needs --raw", fix="To hold out some of the texts, use --valid-fraction.")
    if options.raw and (options.form or options.valid_fraction or options.format != KIND):
        raise ConfigError(
            "--raw reads tokens, not texts",
            expected="--valid and --tokenizer PATH, and no --form, --format or --valid-fraction",
        )
    inputs, held_out = (
        [source for pattern in patterns for source in text_sources(pattern)]
        for patterns in (options.inputs, options.valid)
    )
    prepare_options = PrepareOptions(
        form=TextForm(options.form) if options.form else None,
        key=options.key,
        tokenizer=tokenizer,
        valid_fraction=options.valid_fraction,
        held_out=held_out,
        file_tokens=options.file_tokens,
        kind=DataKind(options.format),
        array=np.dtype(options.raw).newbyteorder("<") if options.raw else None,
    )
    # Passing bytes between processes takes longer than encoding them.
    is_slow = not options.raw and isinstance(tokenizer, Path)
    workers = options.workers or (len(os.sched_getaffinity(0)) if is_slow else 1)
    return write_prepared(options.output, inputs, prepare_options, workers=workers)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files or quoted globs, read in this order")
    parser.add_argument("--output", type=local_path, required=True, metavar="FOLDER", help="the folder to create")
    parser.add_argument("--tokenizer", metavar="FILE", help="bytes (the default), or a tokenizer.json")
    parser.add_argument(
        "--form",
        choices=_FORMS,
        help="the form of all inputs except Parquet; by default jsonl for a file named .json, .jsonl or .ndjson, "
        "else text",
    )
    parser.add_argument(
        "--format",
        choices=[kind.value for kind in (DataKind.token_file, DataKind.megatron)],
        default=KIND,
        help="the output format: token files, or pairs of .bin and .idx as in Megatron-LM",
    )
    parser.add_argument(
        "--raw",
        choices=_DTYPES,
        help="the inputs are token arrays in this dtype without a header, as nanoGPT's",
    )
    parser.add_argument("--valid", nargs="+", default=[], metavar="INPUT", help="validation arrays, with --raw")
    parser.add_argument("--key", default="text", help="the text's key in a JSON line, or its column in Parquet")
    parser.add_argument(
        "--valid-fraction", type=share, default=0.0, metavar="F", help="the share to hold out for validation"
    )
    parser.add_argument(
        "--file-tokens", type=positive, default=FILE_TOKENS, metavar="N", help="maximum number of tokens per file"
    )
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="processes; by default one per core, or a single process for bytes",
    )


main = framed(prepare, _add_arguments)
