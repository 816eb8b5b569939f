"""Where the bytes of logical tensors lie: boxes of tensors, files of tensors, the part of each rank."""

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
from reprise.saving.plan import Holding, pieces_of

__all__ = [
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
    "absolute",
    "build_layout",
    "cut",
    "extent",
    "image",
    "in_bytes",
    "intersect",
    "model_index",
    "pieces_of",
    "relative",
    "whole",
]
