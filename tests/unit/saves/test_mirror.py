"""When a run waits for its mirror."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reprise.ranks import single_rank_channel
from reprise.stores import Mirror
from trainer.config.checkpoint import CheckpointSection
from trainer.saves.mirror import mirrored


@pytest.mark.parametrize(
    ("is_stopped", "is_rewound", "waits"), [(False, False, [50.0]), (True, False, [5.0]), (False, True, [])]
)
def test_a_run_waits_for_its_mirror_at_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, is_rewound: bool, waits: list[float]
) -> None:
    """A rewind goes on at once: a store that is down takes no time of the training."""
    section = CheckpointSection(save=str(tmp_path / "run"), mirror=f"file://{tmp_path}/store", mirror_wait_s=50.0)
    cluster: Any = SimpleNamespace(channel=single_rank_channel(), rank=0)
    waited = list[float]()

    def finish(_: Mirror, wait_s: float) -> list[str]:
        waited.append(wait_s)
        return []

    monkeypatch.setattr(Mirror, "finish", finish)
    with mirrored(section, cluster, is_stopped=lambda: is_stopped, is_rewound=lambda: is_rewound) as (mirror,):
        pass
    assert waited == waits
    assert mirror.process.poll() is not None
