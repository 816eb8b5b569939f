"""A run's mirror: a child process of rank 0 uploads the run's checkpoints into a store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from trainer.config.checkpoint import CheckpointSection
from trainer.launch.process_group import Cluster

if TYPE_CHECKING:
    from reprise.format import MirrorRule
    from reprise.stores import Mirror

_log = logging.getLogger(__name__)

_WAIT_SHARE_AFTER_SIGNAL = 0.1  # share of `mirror_wait_s`: a job told to stop has only seconds


def rule_of(section: CheckpointSection) -> MirrorRule | None:
    """Return the rule by which a configuration's mirror chooses checkpoints. None without a mirror."""
    if section.mirror is None:
        return None
    from reprise.stores import mirror_rule

    interval = section.mirror_interval * section.save_interval if section.mirror_interval > 1 else 0
    return mirror_rule(section.mirror, interval=interval, keep=section.mirror_keep)


@contextmanager
def mirrored(
    section: CheckpointSection, cluster: Cluster, *, is_stopped: Callable[[], bool], is_rewound: Callable[[], bool]
) -> Iterator[tuple[Mirror, ...]]:
    """Yield the run's mirror on rank 0, and none on the others. With a mirror, all ranks call it.

    After the block, which has finished all saves, wait for the mirror. After an error or a rewind, do not wait.

    Args:
        is_stopped: Returns whether a signal ends the run.
        is_rewound: Returns whether the run starts again at once.

    Raises:
        ConfigError: obstore is not installed. Every rank raises.
    """
    from reprise.stores import Mirror

    folder, rule = section.folder, rule_of(section)
    assert folder is not None
    assert rule is not None
    mirrors: tuple[Mirror, ...] = ()
    with cluster.channel.agreed("mirror/started"):
        if cluster.rank == 0:
            mirrors = (Mirror(folder, rule),)
    with ExitStack() as stack:
        for mirror in mirrors:
            stack.callback(mirror.end)
        yield mirrors
        if is_rewound():
            return
        wait_s = section.mirror_wait_s * (_WAIT_SHARE_AFTER_SIGNAL if is_stopped() else 1.0)
        names = [name for mirror in mirrors for name in mirror.finish(wait_s)]
    if names:
        by_hand = f"`reprise checkpoint mirror {folder} {rule.url} --once` uploads them, and so does the next start"
        _log.warning("not in %s yet: iteration %s. %s", rule.url, ", ".join(names), by_hand)
