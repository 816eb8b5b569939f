"""The command `reprise`: puts the application, which is the trainer with its tools, on the path and runs it.

An installed library has the application in a folder of its own: site-packages has no package `trainer` or `models`. In
a checkout, also an editable install, it lies beside this package.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

_LIBRARY = Path(__file__).resolve().parent


def main() -> int:
    """Run the subcommand of the command line, and return the exit status."""
    installed = _LIBRARY / "_application"
    # First: PYTHONPATH and the working folder may have packages of the user with the same names.
    sys.path.insert(0, str(installed if installed.is_dir() else _LIBRARY.parent))
    status: int = import_module("trainer.commands.main").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
