"""The launch log, `launches.jsonl`: a line at each launch's start, and another if the launch ends by itself.

A launch without an end line was killed or is still running.
"""

from __future__ import annotations

from enum import Enum

LAUNCHES = "launches.jsonl"


class LaunchOutcome(Enum):
    """How a launch ended. After `rewound`, another launch follows in the same process."""

    finished = "finished"
    stopped = "stopped"
    rewound = "rewound"
    failed = "failed"
