"""What a run starts from, as rank 0 decides it for all ranks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.errors import CheckpointError, MismatchError
from reprise.format import FRESH, Branch, Journal, Lineage
from reprise.ranks import StoreChannel, single_rank_channel
from reprise.storage import FILE_SYSTEM
from tests.fakes import run_ranks
from tests.harness import TINY, built, compose, filled
from tests.messages import refused, says
from trainer.config.checkpoint import CheckpointSection
from trainer.config.schema import Config
from trainer.interop.start import load_pretrained
from trainer.launch.process_group import Cluster
from trainer.launch.relaunch import Launch
from trainer.saves.targets import build_saves
from trainer.start.decide import Origin, Past, Start, choose, decide
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
    with build_saves(config, cluster, FILE_SYSTEM) as saves:
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


def past(lineage: Lineage = RUN, saved: int = FRESH, committed: tuple[int, ...] = (), **rest: Any) -> Past:
    return Past(lineage, saved, committed, source=Path("/other"), **rest)


WHAT_STANDS = {
    "nothing": past(Lineage()),
    "a start": past(),
    "saves": past(saved=8, committed=(6, 8)),
    "iteration 0": past(saved=0, committed=(0,), is_inside=True),
    "its own weights": past(saved=8, committed=(0, 8), is_inside=True),
    "lost saves": past(saved=8, trained=9, logged=8),
    "lost saves of a rewound run": past(REWOUND, saved=4),
    "a lost first save": past(saved=0),
    "a lost save without its note": past(trained=9, logged=8),
    "no save": past(trained=3),
    "saves set aside": past(AFRESH, trained=9, logged=8),
    "a fresh start's save": past(AFRESH, committed=(2,)),
    "a fresh start's lost saves": past(AFRESH, saved=2, trained=3, logged=2),
    "a restart": past(saved=8, is_restarted=True),
}
AGAIN_LINE, OWN_LINE = "the run starts over", "resumes from its own"
NEVER, LOST = "checkpoint.ckpt_step.", "run.json"


@pytest.mark.parametrize(
    ("what", "command", "origin", "line"),
    [
        ("nothing", "", Origin.initial, ""),
        ("nothing", ANEW, Origin.initial, ""),
        ("nothing", LOAD, Origin.named, ""),
        ("nothing", STEP, None, NEVER),
        ("a start", "", Origin.initial, ""),
        ("saves", "", Origin.newest, ""),
        ("saves", STEP, Origin.newest, ""),
        ("saves", ANEW, Origin.initial, "sets aside 2 checkpoints of this run, the newest of iteration 8"),
        ("saves", LOAD, Origin.own, OWN_LINE),
        ("saves", f"{LOAD} {TUNE}", Origin.own, OWN_LINE),
        ("iteration 0", "", Origin.newest, ""),
        ("iteration 0", f"{LOAD} {TUNE}", Origin.named, ""),
        ("its own weights", f"{LOAD} {TUNE}", Origin.own, OWN_LINE),
        ("its own weights", LOAD, Origin.named, ""),
        ("lost saves", "", None, LOST),
        ("lost saves", STEP, None, NEVER),
        ("lost saves", LOAD, Origin.named, ""),
        ("lost saves", ANEW, Origin.initial, ""),
        ("lost saves", NO_SAVES, None, "checkpoint.save is null"),
        ("lost saves", MIRROR, None, "checkpoint.load=s3://b/run"),
        ("lost saves of a rewound run", "", None, "iteration 4 as"),
        ("a lost first save", "", None, "iteration 0 as"),
        ("a lost save without its note", "", None, "iteration 8 as"),
        ("no save", "", Origin.initial, "iteration 3, before its first save"),
        ("saves set aside", "", Origin.initial, AGAIN_LINE),
        ("saves set aside", LOAD, Origin.named, AGAIN_LINE),
        ("saves set aside", STEP, None, NEVER),
        ("a fresh start's save", "", Origin.newest, ""),
        ("a fresh start's lost saves", "", None, LOST),
        ("a restart", ANEW, Origin.own, "this launch was restarted"),
    ],
)
def test_what_stands_and_the_command_decide(what: str, command: str, origin: Origin | None, line: str) -> None:
    config = config_in(Path("run"), *command.split())
    if origin is None:
        with refused(CheckpointError, line):
            choose(WHAT_STANDS[what], config)
        return
    decision = choose(WHAT_STANDS[what], config)
    assert decision.origin is origin
    assert line in decision.line
    assert bool(line) == bool(decision.line)


@pytest.mark.parametrize(
    ("what", "command", "is_claimed"),
    [
        ("nothing", "", True),
        ("nothing", ANEW, True),
        ("nothing", LOAD, True),
        ("a start", "", True),
        ("a start", ANEW, False),
        ("a start", LOAD, False),
        ("saves", "", False),
        ("saves set aside", "", False),
        ("a restart", "", False),
    ],
)
def test_a_new_run_needs_an_empty_mirror(what: str, command: str, is_claimed: bool) -> None:
    assert choose(WHAT_STANDS[what], config_in(Path("run"), *command.split())).is_new == is_claimed


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
    result.saves.close()
    assert (journal_in(run).saved, len(journal_in(run).lineage.branches)) == (1, 2)
    note_saved(run, first.lineage.record(), FILE_SYSTEM, 9)  # of a job that the run has left behind
    assert journal_in(run).saved == 1
    lineage = journal_in(run).lineage
    note_saved(run, lineage.record(), FILE_SYSTEM, 9)
    assert journal_in(run).saved == 9
    (run / "run.json").write_text("damaged")
    note_saved(run, lineage.record(), FILE_SYSTEM, 10)
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
    ("saved", "lineage", "command", "what"),
    [
        (True, RUN, "", "newest"),
        (True, AFRESH, "", "anew"),
        (False, RUN, "", "refused"),
        (False, AFRESH, "", "anew"),
        (False, AFRESH, ANEW, "anew"),
    ],
)
def test_a_folder_of_version_0_2_is_judged_by_its_log(
    tmp_path: Path, saved: bool, lineage: Lineage, command: str, what: str
) -> None:
    """Its `run.json` has no newest save. A start over that was killed before it saved begins again."""
    run = tmp_path / "run"
    folder = trained(run, "checkpoint.save_interval=1")
    first = journal_in(run).lineage
    branches = (*first.branches, *lineage.branches[1:])
    (run / "metrics.jsonl").write_text('{"iteration": 2, "loss": 1.0}\n{"iteration": 2, "event": "save"}\n')
    (run / "run.json").write_bytes(Journal(replace(first, branches=branches)).to_bytes())
    if not saved:
        for path in folder.iterdir():
            path.unlink() if path.is_file() else shutil.rmtree(path)
    config = config_in(run, *command.split())
    if what == "refused":
        with refused(CheckpointError, "metrics.jsonl"):
            started(config)
    else:
        assert started(config).is_own == (what == "newest")


def test_a_tracker_alone_tells_of_lost_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = trained(run, "checkpoint.save_interval=1")
    (run / "run.json").write_bytes(Journal(journal_in(run).lineage).to_bytes())
    for path in filter(Path.is_dir, list(folder.iterdir())):
        shutil.rmtree(path)
    with refused(CheckpointError, "no iter_ folder"):
        started(config_in(run))


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
    (tmp_path / "run/run.json").unlink()
    assert started(config_in(tmp_path / "run", *local, "checkpoint.local.adopt=true")).journal.lineage == rewound


def test_no_rank_starts_if_rank_0_cannot(tmp_path: Path) -> None:
    config = config_in(tmp_path / "run", "checkpoint.ckpt_step=5")
    outcomes = run_ranks(2, lambda channel: started(config, channel))
    assert [type(outcome) for outcome in outcomes] == [CheckpointError] * 2
    says(str(outcomes[0]))


def trainer_output(path: Path, *names: str) -> Path:
    """Write what transformers' Trainer leaves in an output folder: `names` are its model folders, "" itself."""
    for name in names:
        (path / name).mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "trainer_state.json"):
            (path / name / file).write_text("{}")
    return path


@pytest.mark.parametrize("more", [["checkpoint.finetune=true"], []])
def test_an_output_folder_of_the_trainer_names_its_newest(tmp_path: Path, more: list[str]) -> None:
    output = trainer_output(tmp_path / "output", "checkpoint-9", "checkpoint-20")
    with refused(CheckpointError, "checkpoint-9, checkpoint-20") as caught:
        started(config_in(tmp_path / "run", f"checkpoint.load={output}", *more))
    assert caught.value.fix == f"Pass the newest, {output}/checkpoint-20."


def test_a_state_of_the_trainer_is_called_another_program_s(tmp_path: Path) -> None:
    output = trainer_output(tmp_path / "output", "", "checkpoint-20")
    with refused(MismatchError, "checkpoint.finetune=true", "checkpoint-20 beside it") as caught:
        load_pretrained(
            output,
            [],
            config_in(tmp_path / "run").model,
            cluster_of(single_rank_channel()),
            CheckpointSection(),
            seed=1,
        )
    assert "no trainer_state.json" not in str(caught.value.found)
