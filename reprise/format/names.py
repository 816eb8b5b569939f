"""Names of the files in a checkpoint, and of the format."""

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
HOST = "host.json"
ADAPTERS = "adapter_model.safetensors"
STATE = "trainer_state.json"
INTERIM = "interim"  # the member of STATE that tells of an interruption where no save was due
STILL_MIRRORED = ".upload-goes-on"  # an object at the URL of a run, whose mirror may still upload checkpoints
OPTIMIZER_DROPPED = "optimizer_dropped"  # the member of STATE of a checkpoint whose optimizer's state was dropped
FORMAT = "reprise/1"
MANIFEST_FORMAT = "reprise-manifest/1"
# Files for other programs, which hold no state of the run: without them a checkpoint still loads.
ACCESSORIES = frozenset({"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
