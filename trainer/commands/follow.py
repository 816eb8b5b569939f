"""Run a command on every checkpoint of a run: `reprise follow RUN [options] [-- COMMAND {}]`.

Without a command, `reprise evaluate` computes the validation loss. `{}` in the command stands for the checkpoint's
folder or URL. The checkpoint is held meanwhile, so retention does not delete it. When a command has ended, its
checkpoint gets a line in `follow.jsonl`, in the run's folder, or in the current folder if RUN is a mirrored run's URL.
The exit status is 0, also after SIGINT or SIGTERM; 1 if a command failed or a checkpoint could not be opened; 2 if the
run cannot be followed.
"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from collections.abc import Sequence

from reprise.stores import is_stored
from trainer.commands.arguments import any_path, natural, positive
from trainer.commands.frame import BAD, FINE, framed
from trainer.follow.follower import PLACE, Follower
from trainer.metrics.log_file import VALID_LOSS

_EVALUATE = [sys.executable, "-m", "reprise", "evaluate", PLACE]
_FOLDER_S, _STORE_S = 2.0, 30.0  # polling intervals


def follow(options: argparse.Namespace) -> int:
    """Follow a run and return the exit status."""
    logging.getLogger("trainer.follow").setLevel(logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    follower = Follower(
        options.run,
        options.command,
        every=options.every,
        first=options.first,
        weights=options.weights,
        metric=options.json_metric,
    )
    poll_s = _STORE_S if is_stored(options.run) else _FOLDER_S
    try:
        return FINE if follower.follow(name=options.name, once=options.once, poll_s=poll_s) else BAD
    except KeyboardInterrupt:
        return FINE


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options, and the command after `--`."""
    words = [*arguments, "--"]
    separator = words.index("--")
    options = parser.parse_args(words[:separator])
    options.command = words[separator + 1 : -1]
    if separator == len(arguments):
        options.command, options.json_metric = _EVALUATE, options.json_metric or VALID_LOSS
    if not any(PLACE in word for word in options.command):
        parser.error(f"expected a command with {PLACE} for the checkpoint's folder: -- COMMAND {PLACE}")
    return options


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", text):
        raise argparse.ArgumentTypeError("must be letters, digits, - and _")
    return text


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"reprise follow RUN [options] [-- COMMAND {PLACE}]"
    parser.add_argument("run", type=any_path, metavar="RUN", help="the run's folder or URL, which may not exist yet")
    parser.add_argument("--every", type=positive, default=1, metavar="N", help="only multiples of N (%(default)s)")
    parser.add_argument(
        "--from", type=natural, default=0, dest="first", metavar="N", help="only from iteration N (%(default)s)"
    )
    parser.add_argument(
        "--weights", action="store_true", help="follow the weights-only saves instead of the checkpoints"
    )
    parser.add_argument(
        "--json-metric", metavar="NAME", help="store this number from the output's last JSON line, for compare-loss"
    )
    parser.add_argument(
        "--name", type=_name, help="write a separate log, follow.NAME.jsonl, to run beside other followers"
    )
    parser.add_argument("--once", action="store_true", help="exit after the existing checkpoints")


main = framed(follow, _add_arguments, parse=_parse)
