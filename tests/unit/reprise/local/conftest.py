"""Saved checkpoints of two hosts, for the tests of their mirrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.local_folders import save_on_two_hosts, save_shared


@pytest.fixture(scope="session")
def saved_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two hosts, without and with copies, and with a shared folder, of the same two iterations."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        for copies in range(2):
            save_on_two_hosts(folder / f"copies{copies}", 1, 2, copies=copies)
    save_shared(folder / "shared", 1, 2)
    return folder


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
