"""The training command: `reprise train KEY=VALUE ...`, or `torchrun ... -m trainer KEY=VALUE ...` on several ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the command line configures it and return 0; on an error, exit with status 1 and a paragraph.

    Args:
        arguments: the words after `reprise train`; None reads those of the process, after `python -m trainer`.
    """
    try:
        from trainer.train_command import main as train

        return train(arguments)
    except KeyboardInterrupt:  # of the imports, which take longer than all that follows up to the first message
        print("Interrupted before the first iteration. Nothing was saved.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
