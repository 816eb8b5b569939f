"""The convertible formats, by their command-line names."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.interop import deepspeed, llmc, nanogpt
from trainer.interop.dcp import source as dcp
from trainer.interop.formats import Format
from trainer.interop.hf import convert as hf
from trainer.interop.hf import trainer
from trainer.interop.megatron import source as megatron

FORMATS: Mapping[str, Format] = {
    "hf": hf.FORMAT,
    "trainer": trainer.FORMAT,
    "llmc": llmc.FORMAT,
    "nanogpt": nanogpt.FORMAT,
    "dcp": dcp.FORMAT,
    "deepspeed": deepspeed.FORMAT,
    "megatron": megatron.FORMAT,
}
