"""What a run shows on a terminal: a bar at the foot, and above it the lines that it writes elsewhere."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import reprise.storage.progress_line
import trainer.__main__
from tests.harness import TINY, call_on_ranks, run_ok

OVERRIDES = ["model=gpt2_tiny", *TINY, "train.train_iters=6", "train.eval_interval=3", "checkpoint.save_interval=2"]
COLUMNS = 160


def run_on_terminal(folder: Path, overrides: list[str]) -> tuple[int, str]:
    """Run the trainer on a terminal of its own; return the exit status and all that was sent to the screen."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    arguments = [os.ttyname(slave), f"run.dir={folder}", *overrides]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(_read_all, master)
        try:
            ended = call_on_ranks(_train_on_terminal, arguments, folder=folder, ranks=1)
        finally:
            os.close(slave)
        shown = sent.result()
    os.close(master)
    return ended.statuses[0] or 0, shown.decode()


def _train_on_terminal(arguments: list[str]) -> None:
    """Run the trainer's command on the terminal that the first argument names.

    It says a line about every block that is saved, from the thread that writes, instead of one in five seconds.
    """
    terminal = os.open(arguments[0], os.O_RDWR | os.O_NOCTTY)
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    reprise.storage.progress_line.EVERY_S = 0.0
    sys.argv = ["trainer", *arguments[1:]]
    trainer.__main__.main()


def _read_all(master: int) -> bytes:
    sent = bytearray()
    while data := _read(master):
        sent += data
    return bytes(sent)


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # how Linux says that nobody has the other end open any more
        return b""


def screen(sent: str) -> list[str]:
    """Return the lines as a reader sees them in the end: what is written over is gone."""
    lines, row, column = [list[str]()], 0, 0
    for part in re.findall(r"\x1b\[[\d;]*[A-Za-z]|.", sent, flags=re.S):
        if part == "\n":
            row += 1
            lines += [[]] if row == len(lines) else []
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row -= 1
        else:
            assert len(part) == 1, f"an escape sequence that this screen does not know: {part!r}"
            line = lines[row]
            line += [" "] * (column + 1 - len(line))
            line[column] = part
            column += 1
    return ["".join(line).rstrip() for line in lines]


def lines_of(lines: list[str]) -> list[str]:
    """Return what lines say of losses: times differ, the bits do not."""
    first = re.compile(r"(step +\d+/6 \| (?:train|valid) loss [\d.]+).*")
    return [match[1] for match in map(first.fullmatch, lines) if match]


def test_a_terminal_shows_a_bar_and_above_it_every_line_whole(tmp_path: Path) -> None:
    plain = run_ok(tmp_path / "plain", OVERRIDES).text
    assert "\r" not in plain
    run_ok(tmp_path / "run", [*OVERRIDES, "train.exit_interval=2"])
    status, sent = run_on_terminal(tmp_path / "run", OVERRIDES)
    assert status == 0, sent
    bars = re.findall(r"\r(\d)/6 \|[^|]{30}\| loss \d\.\d{4} \| \d+ tok/s \| eta [\d:?]+", sent)
    assert set(bars) == {"3", "4", "5", "6"}
    shown = screen(sent)
    assert [line for line in shown if "eta" in line] == []
    assert lines_of(shown) == lines_of(plain.splitlines())[2:]
    assert len(lines_of(shown)) == 6
    saving = [line for line in shown if "saving iteration" in line]
    assert saving
    assert all(re.fullmatch(r"saving iteration \d: \d+% of [\d.]+ GB, [\d.]+ GB/s", line) for line in saving)
    assert sum(line.startswith("saved iteration") for line in shown) == 2


def test_an_error_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    status, sent = run_on_terminal(tmp_path / "run", [*OVERRIDES, "optimizer.lr=1e30", "schedule.lr_warmup_iters=0"])
    assert status == 1, sent
    assert any(line.startswith("NonFiniteError: Loss or gradients") for line in screen(sent))
    assert [line for line in screen(sent) if "eta" in line] == []
