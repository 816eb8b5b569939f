"""What a run starts from, as rank 0 decides it for all ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise.errors import CheckpointError
from reprise.format import FRESH, LINEAGE, STATE, Branch, Journal, Lineage
from reprise.ranks import StoreChannel, single_rank_channel
from tests.fakes import run_ranks
from tests.harness import TINY, built, compose, filled
from tests.messages import refused, says
from tests.unit.reprise.format.test_document import rewrite
from trainer.config.schema import Config
from trainer.launch.process_group import Cluster
from trainer.launch.relaunch import Launch
from trainer.saves.targets import build_saves
from trainer.start.decide import Origin, Start, choose, decide
from trainer.start.journal import note_saved
from trainer.start.source import Checkpoints
from trainer.training.loop import train

NEW, FIRST, AGAIN = Launch(), Launch(("a", "b")), Launch(("c", "b"), ("c", "b"))
OTHER = Launch(("x",), ("x",))


def config_in(run: Path, *overrides: str) -> Config:
    return compose(["model=gpt2_tiny", *TINY, f"run.dir={run}", "schedule.lr_warmup_iters=1", *overrides])


def cluster_of(channel: StoreChannel, launch: Launch = NEW) -> Cluster:
    return Cluster(channel.rank, channel.world_size, torch.device("cpu"), 1, channel, "test", launch=launch)


def started(config: Config, channel: StoreChannel | None = None, launch: Launch = NEW) -> Start:
    cluster = cluster_of(channel or single_rank_channel(), launch)
    with build_saves(config, cluster) as saves:
        return decide(config, cluster, saves)


def trained(run: Path, *overrides: str, launch: Launch = NEW) -> Path:
    """Train a run in this process, and return its folder of checkpoints."""
    config = config_in(run, "train.train_iters=2", "checkpoint.async_save=false", *overrides)
    result = filled(built(config, cluster_of(single_rank_channel(), launch)))
    with result.saves:
        train(result)
    return run / "checkpoints"


ANEW = "checkpoint.load=none"
RUN = Lineage((Branch("a", FRESH),))
AFRESH = Lineage((*RUN.branches, Branch("b", FRESH)))
REWOUND = Lineage((*RUN.branches, Branch("b", 4)))
LOAD, TUNE, STEP = "checkpoint.load=/other", "checkpoint.finetune=true", "checkpoint.ckpt_step=4"
NO_SAVES, MIRROR = "checkpoint.save=null", "checkpoint.mirror=s3://b/run"


# What a run's journal says, and which of its checkpoints are there.
RUNS = {
    "nothing": (Journal(saved=FRESH), ()),
    "a start": (Journal(RUN, FRESH), ()),
    "saves": (Journal(RUN, 8), (6, 8)),
    "iteration 0": (Journal(RUN, 0), (0,)),
    "imported weights": (Journal(RUN, 8), (0, 8)),
    "lost saves": (Journal(RUN, 8), ()),
    "lost saves of a rewound run": (Journal(REWOUND, 4), ()),
    "a lost first save": (Journal(RUN, 0), ()),
    "a fresh start": (Journal(AFRESH, FRESH), ()),
    "a fresh start's save": (Journal(AFRESH, FRESH), (2,)),
    "a fresh start's lost saves": (Journal(AFRESH, 2), ()),
}
OUTSIDE = {"is_inside": False, "is_restarted": False}
INSIDE, RESTART = OUTSIDE | {"is_inside": True}, OUTSIDE | {"is_restarted": True}
AGAIN_LINE, OWN_LINE = "saved nothing: it starts over", "began at /other and resumes from its own"
NEVER, LOST = "checkpoint.ckpt_step.", "checkpoint.load=none"


@pytest.mark.parametrize(
    ("run", "command", "place", "origin", "line"),
    [
        ("nothing", "", OUTSIDE, Origin.initial, ""),
        ("nothing", ANEW, OUTSIDE, Origin.initial, ""),
        ("nothing", LOAD, OUTSIDE, Origin.named, ""),
        ("nothing", STEP, OUTSIDE, None, NEVER),
        ("a start", "", OUTSIDE, Origin.initial, AGAIN_LINE),
        ("saves", "", OUTSIDE, Origin.newest, ""),
        ("saves", STEP, OUTSIDE, Origin.newest, ""),
        ("saves", ANEW, OUTSIDE, Origin.initial, "sets aside 2 checkpoints of this run, the newest of iteration 8"),
        ("saves", ANEW, RESTART, Origin.own, "this launch was restarted"),
        ("saves", LOAD, OUTSIDE, Origin.own, OWN_LINE),
        ("saves", f"{LOAD} {TUNE}", OUTSIDE, Origin.own, OWN_LINE),
        ("iteration 0", "", OUTSIDE, Origin.newest, ""),
        ("iteration 0", f"{LOAD} {TUNE}", INSIDE, Origin.named, ""),
        ("imported weights", f"{LOAD} {TUNE}", INSIDE, Origin.own, OWN_LINE),
        ("imported weights", LOAD, INSIDE, Origin.named, ""),
        ("lost saves", "", OUTSIDE, None, LOST),
        ("lost saves", STEP, OUTSIDE, None, NEVER),
        ("lost saves", LOAD, OUTSIDE, Origin.named, ""),
        ("lost saves", ANEW, OUTSIDE, Origin.initial, ""),
        ("lost saves", NO_SAVES, OUTSIDE, None, "checkpoint.save is null"),
        ("lost saves", MIRROR, OUTSIDE, None, "checkpoint.load=s3://b/run"),
        ("lost saves of a rewound run", "", OUTSIDE, None, "iteration 4 as"),
        ("a lost first save", "", OUTSIDE, None, "iteration 0 as"),
        ("a fresh start", "", OUTSIDE, Origin.initial, AGAIN_LINE),
        ("a fresh start", LOAD, OUTSIDE, Origin.named, ""),
        ("a fresh start", STEP, OUTSIDE, None, NEVER),
        ("a fresh start's save", "", OUTSIDE, Origin.newest, ""),
        ("a fresh start's lost saves", "", OUTSIDE, None, LOST),
    ],
)
def test_journal_checkpoints_and_command_decide(
    run: str, command: str, place: dict[str, bool], origin: Origin | None, line: str
) -> None:
    journal, committed = RUNS[run]
    config = config_in(Path("run"), *command.split())
    if origin is None:
        with refused(CheckpointError, line):
            choose(journal, committed, config, **place)
        return
    found, text = choose(journal, committed, config, **place)
    assert found is origin
    assert line in text
    assert bool(line) == bool(text)


def journal_in(run: Path) -> Journal:
    return Journal.from_bytes((run / "run.json").read_bytes(), where=run)


def test_a_journal_has_the_last_commit_and_loses_those_given_up(tmp_path: Path) -> None:
    run, interval = tmp_path / "run", "checkpoint.save_interval=1"
    trained(run, interval)
    first = journal_in(run)
    assert (first.saved, len(first.lineage.branches)) == (2, 1)
    result = filled(
        built(config_in(run, "checkpoint.ckpt_step=1", "train.train_iters=2"), cluster_of(single_rank_channel()))
    )
    with result.saves:  # which end
        pass
    assert (journal_in(run).saved, len(journal_in(run).lineage.branches)) == (1, 2)
    note_saved(run, first.lineage.record(), 9)  # of a job that the run has left behind
    assert journal_in(run).saved == 1
    lineage = journal_in(run).lineage
    note_saved(run, lineage.record(), 9)
    assert journal_in(run).saved == 9
    (run / "run.json").write_text("damaged")
    note_saved(run, lineage.record(), 10)
    assert journal_in(run) == Journal(lineage, 10)


def test_settings_of_a_beginning_end_with_the_own_checkpoint(tmp_path: Path) -> None:
    other = trained(tmp_path / "other")
    beginning = (f"checkpoint.load={other}", "checkpoint.finetune=true", "checkpoint.ckpt_step=2")
    start = started(config_in(tmp_path / "run", *beginning))
    assert isinstance(start.source, Checkpoints)
    assert (start.source.source.path, start.source.source.iteration) == (other, 2)
    assert start.section.finetune
    folder = trained(tmp_path / "run", *beginning)
    start = started(config_in(tmp_path / "run", *beginning))
    assert isinstance(start.source, Checkpoints)
    assert (start.source.source.path, start.source.source.iteration) == (folder, None)
    assert start.is_own
    assert not start.section.finetune


def test_a_command_sets_where_a_run_begins_once_a_launch(tmp_path: Path) -> None:
    """A launch that saved nothing begins as its command says, and so does another launch."""

    def resumes(launch: Launch, command: str = ANEW) -> bool:
        source = started(config_in(tmp_path / "run", command), launch=launch).source
        return isinstance(source, Checkpoints) and source.source.iteration is None

    trained(tmp_path / "run")
    assert not resumes(AGAIN)
    folder = trained(tmp_path / "run", ANEW, launch=FIRST)
    assert resumes(AGAIN)
    assert resumes(AGAIN, "checkpoint.ckpt_step=1")
    assert not any(map(resumes, (NEW, FIRST, Launch(("b",)), OTHER)))
    trained(tmp_path / "run", ANEW, "train.train_iters=4", "schedule.lr_decay_iters=2", launch=AGAIN)
    assert (folder / "iter_0000002").is_dir()
    assert resumes(Launch((), ("a",)))  # a restart keeps the names of the launch and adds its own
    assert resumes(Launch((), ("c",)))
    trained(tmp_path / "run", "train.train_iters=6", "schedule.lr_decay_iters=2", launch=OTHER)
    assert resumes(AGAIN)
    trained(tmp_path / "run", ANEW, launch=OTHER)
    assert not resumes(AGAIN)


@pytest.mark.parametrize(
    ("lineage", "command", "is_refused"),
    [(Lineage(), ANEW, True), (RUN, "", True), (RUN, ANEW, False), (AFRESH, "", False)],
    ids=["a new run", "nothing saved", "nothing saved, anew", "begun anew"],
)
def test_a_start_over_needs_an_empty_mirror(tmp_path: Path, lineage: Lineage, command: str, is_refused: bool) -> None:
    """A host's record may be all that is left of a run whose folders are lost."""
    store, run = trained(tmp_path / "other"), tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_bytes(Journal(lineage, FRESH).to_bytes())
    config = config_in(run, f"checkpoint.mirror=file://{store}", *command.split())
    if is_refused:
        with refused(CheckpointError, "iteration 2 in the mirror"):
            started(config)
    else:
        assert not started(config).is_own


@pytest.mark.parametrize("text", ["of version 0.2", "damaged", None])
def test_a_journal_without_saves_is_completed_by_the_log(tmp_path: Path, text: str | None) -> None:
    run = tmp_path / "run"
    folder = trained(run, "checkpoint.save_interval=1")
    (run / "metrics.jsonl").write_text('{"iteration": 2, "loss": 1.0}\n{"iteration": 2, "event": "save"}\n')
    data = Journal(journal_in(run).lineage).to_bytes() if text == "of version 0.2" else (text or "").encode()
    (run / "run.json").write_bytes(data)
    if text is None:
        (run / "run.json").unlink()
    assert started(config_in(run)).is_own
    shutil.rmtree(folder)
    with refused(CheckpointError, "iteration 2 as"):
        started(config_in(run))
    assert not started(config_in(run, ANEW)).is_own


@pytest.mark.parametrize("saved", [FRESH, None], ids=["a note", "a note of version 0.2"])
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_killed_fresh_start_is_made_again(tmp_path: Path, is_killed: bool, saved: int | None) -> None:
    """It has recorded its branch, and the checkpoints and the log that it gives up are still there."""
    run = tmp_path / "run"
    trained(run, "checkpoint.save_interval=1")
    (run / "metrics.jsonl").write_text('{"iteration": 2, "event": "save"}\n')
    lineage = journal_in(run).lineage
    if is_killed:
        lineage = replace(lineage, branches=(*lineage.branches, AFRESH.branches[1]))
    (run / "run.json").write_bytes(Journal(lineage, saved).to_bytes())
    assert started(config_in(run)).is_own == (not is_killed)


def test_a_malformed_lineage_holds_no_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    newest = trained(run, "checkpoint.save_interval=1") / "iter_0000002"
    rewrite(newest, STATE, lambda data: json.dumps({**json.loads(data), LINEAGE: {"branches": 5}}).encode())
    (run / "run.json").write_bytes(Journal(journal_in(run).lineage, FRESH).to_bytes())
    config = config_in(run, "train.train_iters=2")
    assert started(config).is_own
    result = filled(built(config, cluster_of(single_rank_channel())))
    with result.saves:
        assert result.state.progress.iteration == 1


def test_a_start_over_leaves_the_local_checkpoints_uncounted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = (f"checkpoint.local.dir={tmp_path}/host", "checkpoint.local.save_interval=1")
    trained(tmp_path / "run", *local)
    caplog.clear()
    started(config_in(tmp_path / "run", *local, ANEW))
    assert "sets aside 1 checkpoint of this run" in caplog.text


def test_a_host_s_record_outlives_its_newest_checkpoint(tmp_path: Path) -> None:
    local = (f"checkpoint.local.dir={tmp_path}/host", "checkpoint.local.save_interval=1", "checkpoint.save=null")
    trained(tmp_path / "run", *local)
    lineage = journal_in(tmp_path / "host").lineage
    rewound = replace(lineage, branches=(*lineage.branches, Branch("z", 1)))  # by a start that saved nothing
    (tmp_path / "host/run.json").write_bytes(Journal(rewound).to_bytes())
    shutil.copy(tmp_path / "host/run.json", tmp_path / "run")  # whose own is lost
    assert started(config_in(tmp_path / "run", *local)).journal.lineage == rewound


def test_no_rank_starts_if_rank_0_cannot(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", "checkpoint.ckpt_step=5")
    outcomes = run_ranks(2, lambda channel: started(config, channel))
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 2
    says(str(outcomes[0]))
