"""Loops of other engines: killed on two workers and gone on with on one, each has the bits of an unbroken run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.programs import example, figures, held_example, kill, needs, run_ok, started, wait_until
from tests.harness import tensor_files

ITERATIONS, KILLED_AFTER = 12, 7
LAST = f"iter_{ITERATIONS:07d}"
PACKAGES = {
    "fabric_loop": ["lightning_fabric"],
    "lightning_trainer": ["pytorch_lightning"],
    "ray_train": ["ray", "pandas"],  # pandas comes with ray[train]
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(*packages)) for name, packages in PACKAGES.items()])
def test_a_killed_loop_goes_on_with_half_of_its_workers(tmp_path: Path, name: str) -> None:
    unbroken, killed, resumed = (tmp_path / f"{word}.log" for word in ("unbroken", "killed", "resumed"))
    folder = tmp_path / "killed"
    run_ok(example(name, tmp_path / "unbroken", 2), unbroken)
    assert list(figures(unbroken)) == list(range(1, ITERATIONS + 1))

    with started(held_example(name, KILLED_AFTER, folder, 2), killed) as program:
        wait_until(lambda: KILLED_AFTER in figures(killed) and any(folder.glob("iter_*")), program, killed)
        kill(program)
    assert max(figures(killed)) == KILLED_AFTER
    assert figures(killed).items() <= figures(unbroken).items()

    run_ok(example(name, folder, 1), resumed)
    # After the newest checkpoint: that of iteration 6 may have been under way.
    assert min(figures(resumed)) in (3, 5, 7)
    assert figures(killed) | figures(resumed) == figures(unbroken)
    assert figures(resumed).items() <= figures(unbroken).items()
    assert tensor_files(folder / LAST) == tensor_files(tmp_path / "unbroken" / LAST)
