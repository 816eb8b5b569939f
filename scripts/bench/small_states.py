"""A state of four tensors of 64 bytes, saved by several ranks in turn with torch's DCP, each time into a new folder."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from reprise import load_state_dict, save_state_dict
from scripts.bench.harness import Figures, report, seconds_of, take_turns

_WARM_UP = 2  # rounds that are not counted: imports, connections, the first plan
_TENSORS, _ELEMENTS = 4, 16
OURS, DCP = "ours", "DCP"

Call = Callable[[Path, dict[str, Any]], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subject."""
    parser.add_argument("--ranks", type=int, default=4, help="ranks that save together (%(default)d)")


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the table."""
    dist.init_process_group("gloo")
    sides = {
        OURS: partial(_side, folder, lambda path, state: save_state_dict(path, state, iteration=1), load_state_dict),
        DCP: partial(
            _side,
            folder,
            lambda path, state: state_dict_saver.save(state, checkpoint_id=path),
            lambda path, state: state_dict_loader.load(state, checkpoint_id=path),
        ),
    }
    rows = take_turns(sides, options.rounds, warm_up=_WARM_UP)
    dist.destroy_process_group()
    return report(rows, DCP)


def _side(parent: Path, save: Call, load: Call) -> Figures:
    state = {f"tensor{index}": torch.full((_ELEMENTS,), float(index)) for index in range(_TENSORS)}
    folder = parent / str(next(_FOLDERS))
    if dist.get_rank() == 0:
        folder.mkdir()
        os.sync()
    figures = {"save, ms": 1e3 * seconds_of(lambda: save(folder, state))}
    return figures | {"load, ms": 1e3 * seconds_of(lambda: load(folder, state))}


_FOLDERS = count()
