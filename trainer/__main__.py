"""Runs the training command: `reprise train KEY=VALUE ...`, or per rank `torchrun ... -m trainer KEY=VALUE ...`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with the configuration on the command line and return 0. On an error, exit with status 1 and a paragraph.

    Args:
        arguments: The words after `reprise train`. None reads the process's, after `python -m trainer`.
    """
    try:
        from trainer.launch.start_times import StartTimes, importing

        times = StartTimes()
        with importing():
            from trainer.train_command import main as train
        return train(arguments, times)
    except KeyboardInterrupt:  # importing takes longer than everything else before the first message
        print("Interrupted before the first iteration. Nothing was saved.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
