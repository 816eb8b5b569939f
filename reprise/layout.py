"""Where the bytes of tensors lie: boxes of tensors, files of tensors, the part and the digests of each rank."""

from reprise.format.box import Box, Image, absolute, cut, extent, image, in_bytes, intersect, relative, whole
from reprise.format.dtype import StoredDtype
from reprise.format.layout import (
    DEFAULT_FILE_BYTES,
    FileLayout,
    Layout,
    Place,
    TensorKind,
    TensorSpec,
    build_layout,
    model_index,
)
from reprise.format.manifest import BLOCK_BYTES, WrittenPiece, digest_of
from reprise.saving.plan import Holding, pieces_of
from reprise.tensors.dtypes import stored_dtype, torch_dtype
