"""Reads Megatron-LM and Megatron-Core checkpoints, without either."""

from __future__ import annotations

from pathlib import Path

from reprise.errors import CheckpointError, MismatchError
from reprise.storage import is_dir, is_file
from trainer.interop.formats import Format, ImportOptions, few, require_trust
from trainer.interop.megatron import export
from trainer.interop.megatron.export import TRACKER
from trainer.interop.megatron.legacy import is_legacy, read_legacy
from trainer.interop.megatron.state import RELEASE, as_source
from trainer.interop.megatron.torch_dist import METADATA, read_torch_dist
from trainer.interop.source import StateSource


def read_source(path: Path, options: ImportOptions) -> StateSource:
    """Open a Megatron checkpoint.

    The saved arguments describe the model. Overrides supply missing fields.

    Args:
        path: An `iter_` folder, or its parent, for the iteration named in `latest_checkpointed_iteration.txt`.

    Raises:
        ConfigError: Pickles are not trusted.
        CheckpointError: Files are missing or damaged.
        MismatchError: The checkpoint holds another model, or was saved in an unsupported way.
    """
    folder = newest(path)
    require_trust(options, "Megatron", where=folder)
    return as_source((read_legacy if is_legacy(folder) else read_torch_dist)(folder, options), options)


def newest(path: Path) -> Path:
    """Return the folder for the tracker file's iteration, or `path` itself if it has no such file.

    Raises:
        CheckpointError: That folder does not exist.
        MismatchError: `path` holds no Megatron checkpoint.
    """
    tracker = path / TRACKER
    if not is_file(tracker):
        if not is_file(path / METADATA) and not is_legacy(path):
            raise MismatchError(
                "The folder holds no Megatron checkpoint",
                where=path,
                expected=f"{TRACKER}, or {METADATA} or mp_rank_00 of an iteration",
                found=few(child.name for child in path.iterdir()),
                fix=f"Pass the folder given to --save, or an iter_ folder in it; copy {METADATA} too, if it was left "
                "behind.",
            )
        return path
    text = tracker.read_bytes()[:100].decode("utf-8", "replace").strip()
    name = text if text == RELEASE else f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else None
    if name is None or not is_dir(path / name):
        raise CheckpointError(
            "The Megatron folder's newest iteration is missing",
            where=tracker,
            expected=f"a number or {RELEASE!r}, and its folder",
            found=repr(text),
            fix="Copy that iteration too, or pass another iteration's folder.",
        )
    return path / name


FORMAT = Format(
    "Megatron",
    "a Megatron-LM or Megatron-Core checkpoint (torch_dist, torch)",
    read_source,
    export.write,
    completes_model=True,
)
