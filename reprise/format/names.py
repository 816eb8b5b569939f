"""File names in a checkpoint, and the format's names."""

from collections.abc import Collection

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
HOST = "host.json"
ADAPTERS = "adapter_model.safetensors"
STATE = "trainer_state.json"
INTERIM = "interim"  # the STATE member that marks an interruption where no save was due
STILL_MIRRORED = ".upload-goes-on"  # an object at a run's URL while its mirror may still upload
OPTIMIZER_DROPPED = "optimizer_dropped"  # the STATE member of a checkpoint without its optimizer state
FORMAT = "reprise/1"
OPTIMIZER_FILES = "optimizer/"  # the optimizer state's folder, before its file names
MANIFEST_FORMAT = "reprise-manifest/1"
# Files for other programs. They hold no run state: without them a checkpoint still loads.
ACCESSORIES = frozenset({"tokenizer.json", "tokenizer_config.json", "generation_config.json"})


def is_lightened(names: Collection[str]) -> bool:
    """Return whether a folder with these names, of files or at its top, had its optimizer state dropped.

    The state's folder goes after the marker is written. If both are there, the drop was interrupted.
    """
    return OPTIMIZER_DROPPED in names and not any(f"{name}/".startswith(OPTIMIZER_FILES) for name in names)
