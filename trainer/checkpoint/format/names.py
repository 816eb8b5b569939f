"""Names of the files in a checkpoint, and of the format."""

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
HOST = "host.json"
ADAPTERS = "adapter_model.safetensors"
STATE = "trainer_state.json"
FORMAT = "reprise/1"
