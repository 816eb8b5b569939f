"""The command `reprise compare-loss`, from a checkout."""

import sys

from trainer.commands.compare_loss import main

if __name__ == "__main__":
    sys.exit(main())
