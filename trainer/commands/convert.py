"""Import and export other programs' checkpoints: `reprise convert import|export FORMAT ...`.

Needs no GPU and no process group. The exit status is 0, or 2 if the command fails.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from reprise.loading import Chooser, LoadSource
from reprise.stores import files_of
from trainer.commands.arguments import any_path, local_path
from trainer.commands.frame import FINE, add_command, framed
from trainer.config.compose import compose
from trainer.config.saved import model_values
from trainer.data.tokenizer_beside import with_tokenizer
from trainer.interop.formats import ExportOptions, Format, ImportOptions
from trainer.interop.megatron.refuse import refuse_megatron
from trainer.interop.output import write_checkpoint, write_log
from trainer.interop.pointers import refuse_pointers
from trainer.interop.table import FORMATS

MEGATRON = "megatron"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, where overrides may stand anywhere."""
    options, words = parser.parse_known_args(arguments)
    options.overrides = [*getattr(options, "overrides", []), *words]
    if unrecognized := [word for word in words if word.startswith("-") or "=" not in word]:
        parser.error(f"unrecognized arguments: {' '.join(unrecognized)}")
    if options.overrides and options.call is export_checkpoint:
        parser.error("an export takes no overrides")
    return options


def _convert(options: argparse.Namespace) -> int:
    logging.getLogger("trainer.interop").setLevel(logging.INFO)
    status: int = options.call(options)
    return status


def import_checkpoint(options: argparse.Namespace) -> int:
    """Convert another program's checkpoint to a Reprise checkpoint."""
    form = FORMATS[options.format]
    if options.format != MEGATRON:
        refuse_megatron(options.source)
    refuse_pointers(options.source)
    trust_pickle, weights_only, words = options.trust_pickle, options.weights_only, options.overrides
    import_options = ImportOptions(compose(words), trust_pickle, weights_only, words)
    source = form.read(options.source, import_options)
    overrides = [word for word in options.overrides if not (form.completes_model and word.startswith("model="))]
    has_experiment = any(word.startswith("experiment=") for word in overrides)
    settings = {} if has_experiment else source.settings
    adapters = asdict(source.model.lora) if source.model.is_adapted else {}
    values = {**model_values(source.model), **{f"model.lora.{key}": value for key, value in adapters.items()}}
    config = compose(overrides, {**values, **settings})
    config.data.tokenizer = with_tokenizer(config.data, source.tokenizer)
    stated = [*settings, *options.overrides]
    path = write_checkpoint(source, options.folder, config, consumed_samples=options.consumed_samples, stated=stated)
    if source.log:
        write_log(source.log, options.folder)
    print(f"{path}: iteration {source.iteration}, {'weights and moments' if source.has_optimizer else 'weights'}")
    return FINE


def export_checkpoint(options: argparse.Namespace) -> int:
    """Convert a Reprise checkpoint to another program's format."""
    form = FORMATS[options.format]
    assert form.write is not None
    checkpoint = Chooser(LoadSource.named(options.checkpoint), files_of(options.checkpoint)).open()
    form.write(
        checkpoint, options.out, ExportOptions(DTYPES[options.dtype], options.tokenizer, options.merge, options.ema)
    )
    print(f"{options.out}: iteration {checkpoint.iteration} of {checkpoint.path}")
    return FINE


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    importing, exporting = (
        add_command(commands.add_parser, name, call).add_subparsers(required=True, metavar="FORMAT", dest="format")
        for name, call in (("import", import_checkpoint), ("export", export_checkpoint))
    )
    for name, form in FORMATS.items():
        _add_import_arguments(importing.add_parser(name, help=form.summary, description=form.summary))
        if form.write is not None:
            _add_export_arguments(exporting.add_parser(name, help=form.summary, description=form.summary), form)


def _add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=local_path, metavar="SOURCE", help="checkpoint written by the other program")
    parser.add_argument("folder", type=local_path, metavar="FOLDER", help="the new run's checkpoint folder")
    parser.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help="the new run's configuration")
    parser.add_argument("--consumed-samples", type=int, metavar="N", help="samples already trained on")
    parser.add_argument(
        "--trust-pickle", action="store_true", help="read pickles, without importing their classes or running code"
    )
    parser.add_argument("--weights-only", action="store_true", help="leave out the optimizer state: iteration 0")


def _add_export_arguments(parser: argparse.ArgumentParser, form: Format) -> None:
    parser.set_defaults(dtype="float32", tokenizer=None, merge=None, ema=False)
    parser.add_argument(
        "checkpoint", type=any_path, metavar="CHECKPOINT", help="an iter_ folder, or a run for its newest; or a URL"
    )
    parser.add_argument("out", type=local_path, metavar="OUT", help="path to write to, which must not exist yet")
    if form.has_dtypes:
        parser.add_argument("--dtype", choices=DTYPES, help="the dtype of the written tensors (%(default)s)")
        parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a file or folder of tokenizer files to add")
    if form.merges:
        parser.add_argument("--ema", action="store_true", help="export the moving averages instead of the weights")
        parser.add_argument(
            "--merge", type=local_path, metavar="BASE", help="add the checkpoint's adapters to these weights"
        )


main = framed(_convert, _add_commands, parse=_parse)
