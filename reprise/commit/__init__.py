"""Two-phase commit, by which ranks agree on a complete checkpoint."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.commit.attempt import Hosts as Hosts
    from reprise.commit.attempt import find_hosts as find_hosts
    from reprise.commit.replicas import check_replicas as check_replicas

_NAMES = {
    "commit.attempt": "Hosts find_hosts",
    "commit.replicas": "check_replicas",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
