"""The command `reprise compare-speed`, from a checkout."""

import sys

from trainer.commands.compare_speed import main

if __name__ == "__main__":
    sys.exit(main())
