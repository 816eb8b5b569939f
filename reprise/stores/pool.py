"""What a mirror asks of the other hosts where each has a part of a checkpoint only. `reprise.local` has the answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

from reprise.stores.upload import LocalSource


class Pool(Protocol):
    """The hosts of a run that upload their parts of a checkpoint together, seen from one of them.

    Attributes:
        wake: set by an order of host 0.
    """

    wake: threading.Event

    @property
    def chosen(self) -> str:
        """Return the name of the checkpoint that host 0 has chosen last; empty if there is none."""

    @property
    def is_over(self) -> bool:
        """Return whether host 0 has uploaded all, and needs this host no more."""

    def hold(self, name: str, digest: str) -> bool:
        """Keep a checkpoint on every host, in place of the one before; return whether the hosts have all of it.

        Args:
            digest: of its manifest.

        Raises:
            CheckpointError: if pieces of it are on no host.
            OSError: if a host does not answer, and no other has its pieces.
        """

    def release(self) -> None:
        """Keep no checkpoint on any host."""

    def source(self, path: Path) -> LocalSource:
        """Return the whole files of a local checkpoint.

        Raises:
            FileNotFoundError: if it is gone.
        """

    def end(self) -> None:
        """Let go of all, once this host needs no other and no other needs it."""
