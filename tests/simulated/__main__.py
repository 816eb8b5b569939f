"""Runs a command with the simulated device in every process that it starts: `python -m tests.simulated COMMAND ...`.

torch loads the device as it loads that of any other package: by the entry point of an installed one, which a folder on
PYTHONPATH stands for, https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.simulated import autoload, register

# Configurations are checked before torch is imported.
_NAMED = f"import trainer.parallel.topology\ntrainer.parallel.topology.ACCELERATORS += ({register.NAME!r},)\n"
_ROOT = Path(__file__).resolve().parents[2]


def main(command: Sequence[str]) -> int:
    """Run the command and return its exit status; 2 without one."""
    if not command:
        print("usage: python -m tests.simulated COMMAND ...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="simulated-device-") as folder:
        return subprocess.run(command, env={**os.environ, **variables(Path(folder))}, check=False).returncode


def variables(folder: Path) -> dict[str, str]:
    """Build the device, and return the variables of a process that is to have it, with what it reads in a folder.

    Raises:
        subprocess.CalledProcessError: if the compiler fails.
    """
    package = folder / f"{register.NAME}_device-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {register.NAME}-device\nVersion: 1\n")
    (package / "entry_points.txt").write_text(f"[torch.backends]\n{register.NAME} = {autoload.__name__}:begin\n")
    (folder / "sitecustomize.py").write_text(_NAMED)
    path = os.pathsep.join([str(folder), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, autoload.LIBRARY: str(register.build(_ROOT / "build"))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
