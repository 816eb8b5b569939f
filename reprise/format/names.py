"""Names of the files in a checkpoint, and of the format."""

from collections.abc import Collection

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
HOST = "host.json"
ADAPTERS = "adapter_model.safetensors"
STATE = "trainer_state.json"
INTERIM = "interim"  # the member of STATE that tells of an interruption where no save was due
STILL_MIRRORED = ".upload-goes-on"  # an object at the URL of a run, whose mirror may still upload checkpoints
OPTIMIZER_DROPPED = "optimizer_dropped"  # the member of STATE of a checkpoint whose optimizer's state was dropped
FORMAT = "reprise/1"
OPTIMIZER_FILES = "optimizer/"  # the folder of the optimizer's state, before the names of its files
MANIFEST_FORMAT = "reprise-manifest/1"
# Files for other programs, which hold no state of the run: without them a checkpoint still loads.
ACCESSORIES = frozenset({"tokenizer.json", "tokenizer_config.json", "generation_config.json"})


def is_lightened(names: Collection[str]) -> bool:
    """Return whether the optimizer's state was dropped from a folder with these names, of files or at its top.

    Its folder goes after the marker is there: with both, the drop was cut off.
    """
    return OPTIMIZER_DROPPED in names and not any(f"{name}/".startswith(OPTIMIZER_FILES) for name in names)
