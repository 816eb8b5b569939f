"""Imports transformers model folders as weights at iteration 0, and exports a checkpoint's weights.

Starting a run from such a folder needs no conversion: `checkpoint.load` accepts it. transformers can also open a
checkpoint directly. An export is smaller, because it omits optimizer state.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from models.adapters import model_documents
from reprise.errors import CheckpointError
from reprise.format import DEFAULT_FILE_BYTES, INDEX, build_layout, model_index
from reprise.loading import Checkpoint
from reprise.storage import Json, is_dir, is_file, json_file
from reprise.tensors import stored_dtype
from trainer.data.text import TOKENIZER, open_tokenizer, read_tokenizer
from trainer.data.tokenizer_beside import TOKENIZER_FILES, tokenizer_files_in
from trainer.data.tokenizer_files import require_rows
from trainer.interop.formats import ExportOptions, Format, ImportOptions
from trainer.interop.hf.config import CONFIG
from trainer.interop.hf.folder import open_folder, other_files_notes, weights_source
from trainer.interop.merge import merged
from trainer.interop.new_output import new_output
from trainer.interop.source import StateSource, of_checkpoint
from trainer.interop.tensor_files import write_tensor_files
from trainer.run.state import checkpoint_specs

_log = logging.getLogger(__name__)

FILE_BYTES = DEFAULT_FILE_BYTES


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a folder written by `save_pretrained`. The log names a trainer's other files in it.

    Raises:
        CheckpointError: The path is not such a folder, or is damaged.
        MismatchError: The model is not supported.
    """
    del options  # a folder is complete
    source = weights_source(open_folder(path))
    for line in other_files_notes(path):
        _log.warning(line)
    return source


def write(checkpoint: Checkpoint, out: Path, options: ExportOptions) -> None:
    """Write the weights as a transformers folder, cast to the requested dtype.

    With `merge`, adapters are added to their base. Without it, they are written as a PEFT folder. The tokenizer comes
    from the options or, by default, from the checkpoint.

    Raises:
        CheckpointError: `out` exists, the checkpoint is damaged, a number is beyond the dtype, or the file system
            fails.
        MismatchError: The checkpoint has no adapters to merge, or they were trained on another base.
    """
    if options.merge is None:
        source = of_checkpoint(checkpoint, averages=options.averages, takes_adapters=True)
    else:
        source = merged(checkpoint, options.merge, averages=options.averages)
    with new_output(out, options.files) as partial:
        fill_folder(partial, source, options)


def fill_folder(folder: Path, source: StateSource, options: ExportOptions) -> None:
    """Create a folder with the weights, configuration and tokenizer. See `write`."""
    files, dtype = options.files, stored_dtype(options.dtype, where=folder)
    specs = [replace(spec, dtype=dtype) for spec in checkpoint_specs(source.model, None)]
    layout = build_layout(specs, file_bytes=FILE_BYTES)
    documents: dict[str, Json] = model_documents(source.model)
    if CONFIG in documents:
        documents[CONFIG] = {**documents[CONFIG], "dtype": str(options.dtype).removeprefix("torch.")}
    if len(layout.files) > 1:
        documents[INDEX] = model_index(layout)
    tokenizer = source.tokenizer if options.tokenizer is None else _tokenizer_files(options.tokenizer)
    if options.tokenizer is not None and TOKENIZER in tokenizer:
        require_rows(open_tokenizer(tokenizer[TOKENIZER]), tokenizer[TOKENIZER], source.model.vocab_size)
    files.make_folder(folder)
    write_tensor_files(folder, files, layout, source.read)
    for name, document in documents.items():
        files.write_whole(folder / name, json_file.to_bytes(document))
    for name, path in tokenizer.items():
        files.write_whole(folder / name, read_tokenizer(path))


def _tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the tokenizer files to copy, by new name. A file with another name becomes `tokenizer.json`."""
    if is_dir(path):
        paths = tokenizer_files_in(path)
    else:
        name = path.name if path.name in TOKENIZER_FILES else TOKENIZER_FILES[0]
        paths = {name: path} if is_file(path) else {}
    if not paths:
        raise CheckpointError("The tokenizer is missing", where=path, expected=" or ".join(TOKENIZER_FILES))
    return paths


FORMAT = Format(
    "transformers", "a transformers model folder (safetensors)", read_source, write, has_dtypes=True, merges=True
)
