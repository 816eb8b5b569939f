"""The formats that can be converted, by the names that the command knows them by."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.convert import dcp, deepspeed, hf, llmc
from trainer.convert.formats import Format

FORMATS: Mapping[str, Format] = {
    "hf": hf.FORMAT,
    "llmc": llmc.FORMAT,
    "dcp": dcp.FORMAT,
    "deepspeed": deepspeed.FORMAT,
}
