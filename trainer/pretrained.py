"""Begins a run with the weights of a transformers folder, on any topology. What lies there is told in `hf`."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.checkpoint.agreement import check_replicas
from trainer.checkpoint.files import Files
from trainer.checkpoint.loader import LoadReport
from trainer.checkpoint.progress_line import ProgressLine
from trainer.config import CheckpointSection
from trainer.errors import MismatchError, TrainerError
from trainer.hf.folder import CONFIG, left_behind, open_folder, stored_places
from trainer.hf.load import check_tied, fill
from trainer.hf.model import differences
from trainer.launch import Cluster
from trainer.state import TrainerState

_log = logging.getLogger(__name__)


def load_pretrained(path: Path, state: TrainerState, cluster: Cluster, section: CheckpointSection) -> LoadReport:
    """Fill the parameters from the folder at `path`, cast to float32; moments stay as they are. A call of all ranks.

    Each rank reads what its boxes need and no more. What else a trainer has saved in the folder is named in the log.

    Raises:
        TrainerError: on every rank; before anything is filled, if the folder does not hold the configured model.
    """
    problem: TrainerError | None = None
    live, said = list(state.shards(with_optimizer=False)), list[str]()
    try:
        _require_finetune(path, section)
        folder = open_folder(path, Files())
        said = differences(folder.model, state.config, where=path / CONFIG)
        said += left_behind(path)
        places = stored_places(folder, state.config)
        if cluster.rank == 0:
            check_tied(folder, state.config)
    except TrainerError as error:
        problem = error
    cluster.board.agree("pretrained/open", problem)
    for text in said if cluster.rank == 0 else ():
        _log.warning(text)
    try:
        line = ProgressLine(f"loading {path}", sum(tensor.local.nbytes for tensor in live))
        report = fill(folder, places, live, progress=line.add)
    except TrainerError as error:
        problem = error
    cluster.board.agree("pretrained/fill", problem)
    check_replicas(live, cluster.board, "pretrained/replicas")
    return report


def _require_finetune(path: Path, section: CheckpointSection) -> None:
    if not section.finetune:
        raise MismatchError(
            "The folder holds weights of transformers, and no run to go on with",
            where=path,
            found="no trainer_state.json",
            fix="To start at iteration 0 from its weights set checkpoint.finetune=true.",
        )
    if section.ckpt_step is not None:
        raise MismatchError(
            "An iteration is asked of a folder that has none",
            where=path,
            found=f"checkpoint.ckpt_step={section.ckpt_step}",
            fix="Leave checkpoint.ckpt_step out.",
        )
