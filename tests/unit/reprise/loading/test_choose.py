"""What a path to load from means: one iteration, or a run whose newest is taken, in a folder or a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from reprise import latest, load, load_state_dict, save
from reprise.errors import CheckpointError, MismatchError, TrainerError
from reprise.format.lineage import FRESH, LINEAGE, Branch, Lineage
from reprise.format.names import FORMAT, MANIFEST, STATE
from reprise.loading.choose import Chooser, LoadSource, LoadTerms
from reprise.storage.files import Files
from reprise.storage.folder import is_iteration_name
from reprise.stores import store
from tests.fakes import flip_bit, lone_contents, save_parts
from tests.messages import refused


def pick(path: Path, iteration: int | None = None, **source: object) -> Path:
    return Chooser(LoadSource(path, iteration, **source), Files(), lambda _: None).pick()  # type: ignore[arg-type]


def test_an_iteration_folder_is_told_by_its_whole_name() -> None:
    iterations = ("iter_0000010", "iter_10000000", "iter_0000010.superseded-1", "iter_0000010.superseded-12")
    others = ("iter_000010", "iter_0000010.superseded-", "iter_0000010.superseded", "iter_0000010.backup")
    others += ("iter_0000010\n", ".iter_0000010.n-1.partial", "iter_", "iter_search_7", "")
    assert [name for name in (*iterations, *others) if is_iteration_name(name)] == [*iterations]


def filled(value: int) -> nn.Module:
    """Return a model of several threads' blocks with this value."""
    model = nn.Linear(300, 300)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


@pytest.mark.parametrize("scheme", ["", "file://"], ids=["folder", "store"])
def test_the_newest_whole_checkpoint_is_loaded(tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    run, model = f"{scheme}{tmp_path}/iter_search_7", filled(9)
    folder = tmp_path / "iter_search_7"
    paths = {n: save(folder, filled(n), iteration=n, state={"epoch": -n}) for n in range(9, 14)}
    (folder / ".iter_0000014.a.partial").mkdir()

    def assert_loads(expected: int, place: str = run, **options: int | bool) -> None:
        assert load(place, model, **options) == {"epoch": -expected, "iteration": expected}  # type: ignore[arg-type]
        assert all(bool((parameter == expected).all()) for parameter in model.parameters())

    assert str(latest(run)) == f"{run}/iter_0000013"
    assert_loads(13, missing_ok=True)
    assert_loads(10, iteration=10)
    assert_loads(10, f"{run}/iter_0000010", missing_ok=True)
    assert load_state_dict(run, {"model": dict(model.state_dict())}, iteration=11) == {"iteration": 11}
    with refused(CheckpointError, "one of 9, 10, 11, 12, 13"):
        load(run, model, iteration=14)
    (paths[13] / MANIFEST).unlink()
    flip_bit(paths[12] / STATE, 5)
    flip_bit(paths[11] / "model.safetensors")
    flip_bit(paths[10] / "model.safetensors", 5000)
    assert_loads(9)
    assert "iter_0000012 is skipped" in caplog.text
    with refused(CheckpointError, STATE):
        load(run, model, iteration=12)  # one that is named is never skipped
    paths[9].rename(folder / "best")
    assert_loads(9, f"{run}/best")
    with refused(CheckpointError, *(path.name for path in list(paths.values())[1:4])):
        load(run, model, missing_ok=True)
    assert not scheme or store.CHILD.process is None  # a failed load leaves no process


@pytest.mark.parametrize("name", ["iter_0000010.superseded-2", "iter_0000010.backup"])
def test_a_folder_with_a_manifest_is_an_iteration_by_any_name(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, nn.Linear(2, 2), iteration=10).rename(tmp_path / name)
    assert pick(path) == path
    with refused(CheckpointError, "10"):
        pick(path, 10)


def test_a_superseded_folder_without_a_manifest_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000010.superseded-2"
    path.mkdir()
    with refused(CheckpointError, str(path), MANIFEST):
        pick(path)


TERMS = LoadTerms("--from", "--step", "begin anew")


def test_advice_names_what_the_caller_has_set(tmp_path: Path) -> None:
    one = save(tmp_path / "run", nn.Linear(2, 2), iteration=3)
    (tmp_path / "empty").mkdir()
    for source, words in (
        (LoadSource(tmp_path / "none", terms=TERMS), ["--from"]),
        (LoadSource(tmp_path / "empty", terms=TERMS), ["--from"]),
        (LoadSource(tmp_path / "run", 4, TERMS), ["--step"]),
        (LoadSource(one, 4, TERMS), ["--step", "--from"]),
        (LoadSource(tmp_path / "none"), ["path"]),
    ):
        with refused(CheckpointError, *words):
            Chooser(source, Files(), lambda _: None).pick()


def test_the_reason_of_each_checkpoint_is_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (1, 2):
        path = save(tmp_path, nn.Linear(2, 2), iteration=iteration)
        (path / (MANIFEST if iteration == 1 else "model.safetensors")).unlink()
    with refused(TrainerError, "iter_0000001: ", MANIFEST, "iter_0000002: ", "model.safetensors", "begin anew"):
        pick(tmp_path, terms=TERMS)
    assert [record.message.split(" is skipped: ")[0] for record in caplog.records] == ["iter_0000002", "iter_0000001"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_load_may_find_no_checkpoint(tmp_path: Path, is_there: bool) -> None:
    folder, model = tmp_path / "checkpoints", filled(1)
    if is_there:
        folder.mkdir()
    assert latest(folder) is None
    assert load(folder, model, missing_ok=True) == {"iteration": 0}
    assert load_state_dict(folder, {"model": dict(model.state_dict())}, missing_ok=True) == {"iteration": 0}
    assert bool((model.weight == 1).all())
    (tmp_path / "file").touch()
    for path, missing_ok in ((folder, False), (tmp_path / "file", True)):
        with refused(CheckpointError, str(path)):
            load(path, model, missing_ok=missing_ok)


@pytest.mark.parametrize("name", [".metadata", "metadata.pkl", "step-3/.metadata"])
@pytest.mark.parametrize("missing_ok", [False, True])
def test_a_folder_of_another_program_is_named(tmp_path: Path, name: str, missing_ok: bool) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    if missing_ok:  # the table's name alone tells nothing
        assert load(tmp_path, nn.Linear(2, 2), missing_ok=True) == {"iteration": 0}
    for file in ("__0_0.distcp", "model_0.pt"):
        (tmp_path / name).with_name(file).touch()
    with refused(CheckpointError, f"reprise convert import dcp {(tmp_path / name).parent} "):
        load(tmp_path, nn.Linear(2, 2), missing_ok=missing_ok)


RUN = Lineage((Branch("a", FRESH),))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder with three iterations of a run."""
    for iteration in (2, 4, 6):
        state = {STATE: {"format": FORMAT, "iteration": iteration, LINEAGE: RUN.record()}}
        save_parts(tmp_path, iteration, lambda _, state=state: lone_contents({"w": torch.ones(3)}, state))
    return tmp_path


def test_a_branch_that_was_given_up_is_skipped(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = Lineage((*RUN.branches, Branch("b", 4)))
    assert pick(run, lineage=now) == run / "iter_0000004"
    assert "iter_0000006 is skipped" in caplog.text
    with refused(CheckpointError, "iter_0000006"):
        pick(run, 6, lineage=now)
    with refused(CheckpointError, "run.json"):
        pick(run, lineage=Lineage((*RUN.branches, Branch("b", FRESH))))


def test_a_checkpoint_of_another_run_stops_the_start(run: Path) -> None:
    with refused(MismatchError, "run x", "run a", "run.json"):
        pick(run, lineage=Lineage((Branch("x", FRESH),)))
