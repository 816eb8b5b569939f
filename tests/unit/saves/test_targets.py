"""The targets of a run: which are due at which moment, and which iteration its command names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reprise.errors import CheckpointError
from reprise.ranks import single_rank_channel
from reprise.saving import SaveReport
from tests.harness import compose
from trainer.config.checkpoint import CheckpointSection, LocalSection
from trainer.saves.targets import Moment, Saves, SaveTarget, build_saves, named_iteration

# A policy of every second iteration: is iteration 4, and is iteration 3, due in the shared, local and weights folder?
_DUE = {
    Moment.loaded: ("slw", ""),
    Moment.evaluated: ("slw", ""),
    Moment.trained: ("slw", ""),
    Moment.requested: ("slw", "sl"),
    Moment.stopped: ("lw", "l"),
    Moment.finished: ("slw", "sl"),
}


def _saves(tmp_path: Path, kinds: str) -> Saves:
    """Return saves of the kinds `s`, `l` and `w`: the shared folder, local ones, the weights."""
    overrides = ["model=gpt2_tiny", "checkpoint.local.flush_on_exit=false"]
    overrides += [
        f"checkpoint.save={tmp_path}" if "s" in kinds else "checkpoint.save=null",
        "checkpoint.save_interval=2",
    ]
    overrides += [f"checkpoint.local.dir={tmp_path / 'local'}", "checkpoint.local.save_interval=2"] * ("l" in kinds)
    overrides += ["checkpoint.save_weights_interval=2"] * ("w" in kinds)
    cluster: Any = SimpleNamespace(channel=single_rank_channel(), nonce="n", local_ranks=())
    return build_saves(compose(overrides), cluster)


def _letters(targets: Iterable[SaveTarget]) -> list[str]:
    letters = {"save": "s", "local_save": "l", "weights_save": "w"}
    return [letters[target.event] for target in targets]


@pytest.mark.parametrize("moment", Moment)
def test_local_checkpoints_come_first_and_spare_the_shared(tmp_path: Path, moment: Moment) -> None:
    saves = _saves(tmp_path, "slw")
    expected = [sorted(kinds, key="lsw".index) for kinds in _DUE[moment]]
    assert [_letters(saves.due(iteration, moment)) for iteration in (4, 3)] == expected


@pytest.mark.parametrize("moment", Moment)
def test_shared_checkpoints_alone_are_saved_at_every_end(tmp_path: Path, moment: Moment) -> None:
    saves = _saves(tmp_path, "s")
    always = moment in (Moment.requested, Moment.stopped, Moment.finished)
    assert _letters(saves.due(3, moment)) == (["s"] if always else [])
    assert _letters(saves.due(4, moment)) == ([] if moment is Moment.loaded else ["s"])


@pytest.mark.parametrize("kinds", ["s", "sl", "slw", "l", "sw"])
def test_failures_count_where_checkpoints_outlive_the_run(tmp_path: Path, kinds: str) -> None:
    saves = _saves(tmp_path, kinds)
    assert "".join(_letters(saves.targets)) == kinds
    for target in saves.targets:
        target.saver.results.add(SaveReport(1, tmp_path, 0, 0.0, error=CheckpointError(target.event)))
    assert saves.main.failed_saves == 1
    assert str(saves.main.last_error) == ("save." if "s" in kinds else "local_save.")


def test_an_error_of_one_target_leaves_no_other_open(tmp_path: Path) -> None:
    closed: list[str] = []

    def close() -> None:
        closed.append("close")
        raise CheckpointError("The disk is gone")

    saves = _saves(tmp_path, "slw")
    for target in saves.targets:
        target.saver.close = close  # type: ignore[method-assign]
        target.saver.abandon = lambda: closed.append("abandon")  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="The disk is gone"), saves:
        pass
    assert closed == ["close"] * 3
    with pytest.raises(ZeroDivisionError), saves:
        1 // 0  # noqa: B018 - a defect
    assert closed[3:] == ["abandon"] * 3


def test_a_run_that_saves_nothing_has_no_target() -> None:
    saves = Saves(())
    assert saves.due(4, Moment.finished) == []
    assert (saves.main.failed_saves, saves.main.last_error) == (0, None)
    assert saves.host_folders is None
    assert not saves.is_saving


@pytest.mark.parametrize(
    ("load", "ckpt_step", "expected"),
    [
        ("auto", None, None),
        ("auto", 4, 4),
        ("none", None, None),
        ("RUN", 4, 4),
        ("RUN/checkpoints", 4, 4),
        ("RUN/checkpoints", None, None),
        ("RUN/checkpoints/../checkpoints/iter_0000006", None, 6),
        ("RUN/checkpoints/iter_0000006.superseded-1", None, None),
        ("OTHER/checkpoints", 4, None),
        ("OTHER/checkpoints/iter_0000006", None, None),
    ],
)
def test_a_command_names_an_iteration_of_its_own_folder(
    tmp_path: Path, load: str, ckpt_step: int | None, expected: int | None
) -> None:
    for name in ("run", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    load = load.replace("RUN", str(tmp_path / "run")).replace("OTHER", str(tmp_path / "other"))
    section = CheckpointSection(save=str(tmp_path / "run/checkpoints"), load=load, ckpt_step=ckpt_step)
    assert named_iteration(section) == expected


def test_local_folders_alone_have_named_iterations_too() -> None:
    local = LocalSection(dir="/dev/shm/run")
    assert named_iteration(CheckpointSection(save=None, local=local, ckpt_step=4)) == 4
    assert named_iteration(CheckpointSection(save=None, ckpt_step=4)) is None


def test_a_start_at_iteration_0_goes_on_from_no_iteration(tmp_path: Path) -> None:
    load = str(tmp_path / "checkpoints")
    assert named_iteration(CheckpointSection(save=load, load=load, ckpt_step=4, finetune=True)) is None
