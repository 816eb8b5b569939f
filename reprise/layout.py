"""Where the bytes of tensors lie: boxes of tensors, files of tensors, the part and the digests of each rank."""

from reprise.format.box import Box, Image, absolute, cut, extent, image, in_bytes, intersect, relative, whole
from reprise.format.layout import (
    DEFAULT_FILE_BYTES,
    DTYPE_NAMES,
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

__all__ = [
    "BLOCK_BYTES",
    "DEFAULT_FILE_BYTES",
    "DTYPE_NAMES",
    "Box",
    "FileLayout",
    "Holding",
    "Image",
    "Layout",
    "Place",
    "TensorKind",
    "TensorSpec",
    "WrittenPiece",
    "absolute",
    "build_layout",
    "cut",
    "digest_of",
    "extent",
    "image",
    "in_bytes",
    "intersect",
    "model_index",
    "pieces_of",
    "relative",
    "whole",
]
