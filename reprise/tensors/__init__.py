"""A model's and its optimizer's live tensors, and their memory."""

from reprise.tensors.dtypes import stored_dtype as stored_dtype
from reprise.tensors.dtypes import torch_dtype as torch_dtype
from reprise.tensors.file_aligned import zeros_like_files as zeros_like_files
from reprise.tensors.file_form import bytes_of as bytes_of
from reprise.tensors.live import Contents as Contents
from reprise.tensors.live import Grid as Grid
from reprise.tensors.live import LiveTensor as LiveTensor
from reprise.tensors.live import Marks as Marks
from reprise.tensors.live import Stored as Stored
from reprise.tensors.live import canonical_name as canonical_name
from reprise.tensors.live import free_gathered_parameters as free_gathered_parameters
from reprise.tensors.live import is_dtensor as is_dtensor
from reprise.tensors.live import is_fsdp_module as is_fsdp_module
from reprise.tensors.live import live_tensors as live_tensors
from reprise.tensors.live import local_of as local_of
from reprise.tensors.live import memory_holder as memory_holder
from reprise.tensors.live import memory_marks as memory_marks
from reprise.tensors.live import parameter_names as parameter_names
from reprise.tensors.live import placed_box as placed_box
from reprise.tensors.live import with_memory as with_memory
from reprise.tensors.memory import map_memory as map_memory
