"""Stored dtypes, without torch: listing, verifying and uploading never import it."""

from __future__ import annotations

from enum import Enum


class StoredDtype(Enum):
    """A dtype stored unchanged. Members are named as in safetensors (safetensors/src/tensor.rs).

    Attributes:
        label: Torch's name, such as `bfloat16`.
        itemsize: Item size in bytes.
    """

    F64 = "float64", 8
    F32 = "float32", 4
    F16 = "float16", 2
    BF16 = "bfloat16", 2
    I64 = "int64", 8
    I32 = "int32", 4
    I16 = "int16", 2
    I8 = "int8", 1
    U64 = "uint64", 8
    U32 = "uint32", 4
    U16 = "uint16", 2
    U8 = "uint8", 1
    BOOL = "bool", 1
    F8_E4M3 = "float8_e4m3fn", 1
    F8_E5M2 = "float8_e5m2", 1

    def __init__(self, label: str, itemsize: int) -> None:
        self.label, self.itemsize = label, itemsize

    def __str__(self) -> str:
        return self.label
