"""The tensors of a model and an optimizer in this process: their names, their shards, their memory."""

from reprise.tensors.file_aligned import zeros_like_files
from reprise.tensors.live import (
    Contents,
    Grid,
    LiveTensor,
    Marks,
    Stored,
    free_gathered_parameters,
    is_dtensor,
    is_fsdp_module,
    live_tensors,
    local_of,
    memory_marks,
    parameter_names,
    placed_box,
    with_memory,
)
from reprise.tensors.memory import map_memory, memory_of
