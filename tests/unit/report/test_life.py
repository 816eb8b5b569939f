from __future__ import annotations

import json
from pathlib import Path

from tests.reported_runs import event, steady_run, twice_killed_run, write
from tests.unit.reprise.management.test_listing import save
from trainer.report.charts import MARKS
from trainer.report.history import read_history
from trainer.report.life import life_of, progress_lines


def test_a_life_has_kills_resumes_and_saves_in_order(tmp_path: Path) -> None:
    events = life_of(read_history(twice_killed_run(tmp_path)))
    assert [(event.kind, event.iteration) for event in events if event.kind != "evaluation"] == [
        ("launch", 0), ("save", 100), ("save", 200), ("kill", 260),
        ("launch", 200), ("save", 300), ("kill", 340),
        ("launch", 300), ("save", 400), ("save", 500), ("end", 500),
    ]  # fmt: skip
    launches = [event.text for event in events if event.kind == "launch"]
    assert launches[0] == "launch 1 on 1 rank, started in 30.0 s, from the beginning"
    assert launches[1] == "launch 2 on 2 ranks dp=2, started in 30.0 s, resumed from iteration 200, 60 iterations back"
    saves = {event.text for event in events if event.kind.startswith("save")}
    assert saves == {"2,000.0 MB by rank 0, 8.00 s, blocked 0.500 s"}
    assert events[-1].text.startswith("finished after ")


def test_a_save_that_the_folder_has_is_kept(tmp_path: Path) -> None:
    run = steady_run(tmp_path, [1.0] * 4)
    with (run / "metrics.jsonl").open("a") as log:
        log.writelines(f"{json.dumps(event('save', number, 9.0))}\n" for number in (1, 2, 3))
    write(run / "metrics.abandoned-1.jsonl", [event("save", 2, 8.0)])
    save(run / "checkpoints", 2)
    save(run / "checkpoints/weights", 3)
    events = [(event.kind, event.iteration) for event in life_of(read_history(run))]
    assert [pair for pair in events if pair[0].startswith("save")] == [
        ("save", 2), ("save", 1), ("save kept", 2), ("save", 3),
    ]  # fmt: skip


def test_iterations_that_a_kill_took_are_a_course_of_their_own(tmp_path: Path) -> None:
    lines = progress_lines(read_history(twice_killed_run(tmp_path)), most=10)
    assert [(y[0], y[-1], is_given_up) for _, y, is_given_up in lines] == [
        (1, 200, False), (201, 300, False), (301, 500, False), (201, 260, True), (301, 340, True),
    ]  # fmt: skip


def test_events_of_a_branch_given_up_stand_where_they_were(tmp_path: Path) -> None:
    spike = event("spike", 2, 9.0, figure="loss", value=9.5, limit=3.0)
    lost = [event(name, 2, 9.0, written_bytes=10) for name in ("save", "weights_save", "local_save")] + [spike]
    write(steady_run(tmp_path, [1.0]) / "metrics.abandoned-1.jsonl", lost)
    found = {event.kind: event for event in life_of(read_history(tmp_path))}
    assert {"save", "weights save", "local save", "spike", "kill"} == found.keys() & MARKS.keys()
    assert found["save"].iteration == 2
    assert (found["spike"].iteration, found["spike"].text) == (2, "loss 9.5")
