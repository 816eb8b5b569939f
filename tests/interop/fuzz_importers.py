"""Imports damaged and hostile checkpoints of every other program.

`python -m tests.interop.fuzz_importers --cases 2000 --seed 0` runs the cases of a seed and prints a summary.

A case is a folder that the layouts of the tests or our own exports have written, with one change. It is imported in a
process of its own. The import ends with all moments, or with one message; nothing in the files runs, and memory and
time are bounded by the size of the files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from tests.harness import compose
from tests.interop import deepspeed_layout, megatron_layout, torch_dist_layout
from tests.interop.hostile_files import mutate
from tests.interop.megatron_layout import Way
from tests.interop.test_deepspeed import state_of as deepspeed_state
from tests.interop.test_nanogpt import Version, save, stepped
from tests.interop.test_torch_dist import ALONE, ENDS, overrides_of, state_of
from tests.interop.torch_dist_layout import Form
from trainer.commands import convert
from trainer.interop.output import write_checkpoint

MORE_BYTES = 300 << 20  # beside twice the files
CPU_SECONDS, DEADLINE_S = 5.0, 120.0
_MOST_OUTPUT = 64 << 10
FAMILY = "gpt2"


@dataclass(frozen=True)
class Target:
    """A checkpoint to damage.

    Args:
        kind: the format, as on the command line.
        source: the path to import, in its folder.
        overrides: the configuration.
        has_moments: whether an import must bring them.
    """

    kind: str
    folder: Path
    source: str
    overrides: tuple[str, ...]
    has_moments: bool = True


@dataclass(frozen=True)
class Result:
    """What a case came to; `problem` is None if it is as it should be."""

    target: str
    change: str
    outcome: str
    problem: str | None
    cpu_s: float
    more_bytes: int


def targets(folder: Path) -> dict[str, Target]:
    """Write a checkpoint of each form and return it by name."""
    source, ours, bf16 = state_of(FAMILY), tuple(overrides_of(FAMILY)), torch.bfloat16
    alone = (*ALONE, *ENDS)
    wider = "model.intermediate_size=96"  # as llm.c's models are
    checkpoint = write_checkpoint(state_of(FAMILY, 1, wider), folder / "ours", compose([*ours, wider]))
    found = dict[str, Target]()

    def add(name: str, kind: str, path: Path, overrides: tuple[str, ...] = ours, *, has_moments: bool = True) -> None:
        root = folder / name
        found[name] = Target(kind, root, str(path.relative_to(root)), overrides, has_moments)

    for kind, name in {"hf": "", "llmc": "model.bin", "dcp": "", "megatron": ""}.items():
        out = folder / f"export {kind}" / (name or "out")
        out.parent.mkdir()
        _quietly(["export", kind, str(checkpoint), str(out)])
        add(f"export {kind}", kind, out, alone, has_moments=kind in ("dcp", "megatron"))
    forms = {
        "fully": (Way(tp=2, rows=264), Form(prefix="module.")),
        "object": (Way(), Form(has_file=False)),
        "plain": (Way(dtype=bf16), Form("plain", is_stacked=False)),
        "flat": (Way(tp=2, dp=2, rows=264), Form("flat", "module.")),
        "buckets": (Way(pp=2, dp=2), Form("buckets")),
        "buckets, object": (Way(tp=2, dp=2, rows=264), Form("buckets", has_file=False)),
    }
    for name, (way, form) in forms.items():
        torch_dist_layout.write(folder / f"torch_dist {name}", source, way, form)
        add(f"torch_dist {name}", "megatron", folder / f"torch_dist {name}", alone)
    ways = {
        "coalesced": Way(tp=2, rows=264),
        "list": Way(pp=2, form="list", bucket=3000),
        "data ranks": Way(dp=2, form="data ranks"),
        "numbered": Way(is_distributed=False, dtype=bf16),
        "older": Way(names="older", version=0.0, form="older"),
    }
    for name, way in ways.items():
        megatron_layout.write(folder / f"legacy {name}", source, way)
        add(f"legacy {name}", "megatron", folder / f"legacy {name}", alone)
    megatron_layout.write_deepspeed(folder / "megatron-deepspeed", source, Way(pp=2, dp=2, names="mds"))
    add("megatron-deepspeed", "deepspeed", folder / "megatron-deepspeed", alone)
    state = deepspeed_state(source)
    for stage, way in {0: deepspeed_layout.Way(0, 1, is_named=True), 2: None, 3: None}.items():
        deepspeed_layout.write(folder / f"deepspeed {stage}", state, way or deepspeed_layout.Way(stage, 2))
        add(f"deepspeed {stage}", "deepspeed", folder / f"deepspeed {stage}")
    save(folder / "nanogpt" / "ckpt.pt", *stepped(Version()), Version())
    add("nanogpt", "nanogpt", folder / "nanogpt", (*ALONE,))
    shutil.rmtree(folder / "ours")
    for target in found.values():  # in this process: a fork has the configurations
        copy = folder / "imported"
        with contextlib.redirect_stderr(io.StringIO()):
            _quietly(["import", target.kind, str(target.folder / target.source), str(copy), *_asked(target)])
        shutil.rmtree(copy)
    return found


def _asked(target: Target) -> list[str]:
    return ["--trust-pickle", *target.overrides]


def _quietly(arguments: Sequence[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        assert _import(arguments) == 0, arguments


def _import(arguments: Sequence[str]) -> int:
    """Run the command with configurations that are composed once, which takes longer than to import."""
    convert.compose = compose
    return convert.main(arguments)


def run_case(name: str, target: Target, change: Callable[[Path, Path], str], folder: Path) -> Result:
    """Change a copy of a target and import it in a process of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    copy, canary, output = folder / "in", folder / "canary", folder / "output"
    shutil.copytree(target.folder, copy)
    changed = change(copy, canary)
    size = sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    command = ["import", target.kind, str(copy / target.source), str(folder / "out"), *_asked(target)]
    status, usage, more = _in_child(command, output)
    text = output.read_text(errors="replace")
    cpu, problem = usage.ru_utime + usage.ru_stime, None
    outcome = {convert.FINE: "imported", convert.IMPOSSIBLE: "refused"}.get(status, f"status {status}")
    messages = [line for line in text.splitlines() if line.startswith("reprise convert: ") and "Error: " in line]
    if canary.exists():
        problem = "something ran"
    elif outcome == "imported":
        if target.has_moments and "weights and moments" not in text:
            problem = "the moments were lost without a word"
    elif outcome != "refused" or "Traceback" in text:
        problem = f"no refusal: {text[-1500:]}"
    elif len(messages) != 1:
        problem = f"{len(messages)} messages: {text[-500:]}"
    if problem is None and len(text) > _MOST_OUTPUT:
        problem = f"{len(text)} characters of output"
    if problem is None and more > 2 * size + MORE_BYTES:
        problem = f"{more >> 20} MB of memory for {size} B"
    if problem is None and cpu > CPU_SECONDS:
        problem = f"{cpu:.1f} s"
    return Result(name, changed, outcome, problem, cpu, more)


def _in_child(arguments: Sequence[str], output: Path) -> tuple[int, resource.struct_rusage, int]:
    """Run an import in a fork; return its status, its usage, and the memory that it took beside that of this process.

    It is killed after `DEADLINE_S`, or four times `CPU_SECONDS` of computing.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 99
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(4 * CPU_SECONDS),) * 2)
            resource.setrlimit(resource.RLIMIT_AS, (_of_this("VmSize") + (4 << 30),) * 2)
            descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = _of_this("VmRSS")
            status = _import(arguments)
            os.write(writing, str(_of_this("VmHWM") - before).encode())
        except BaseException:  # noqa: BLE001 - whatever it is, it is what the case is about
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], DEADLINE_S)
    if not ready:
        os.kill(child, signal.SIGKILL)
    more = os.read(reading, 100)
    os.close(reading)
    _, status, usage = os.wait4(child, 0)
    return os.waitstatus_to_exitcode(status), usage, int(more or 0)


def _of_this(name: str) -> int:
    """Return an entry of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def fuzz(found: Mapping[str, Target], seed: int, cases: range, folder: Path) -> Iterator[tuple[int, Result]]:
    """Yield the result of each case; a case is the same at every call with the same seed."""
    names = sorted(found)
    for number in cases:
        random = Random(f"{seed}/{number}")
        name = names[number % len(names)]
        yield number, run_case(name, found[name], lambda copy, canary, r=random: mutate(r, copy, canary), folder)  # type: ignore[misc]


def main() -> int:
    """Run cases and print a summary; the status is 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    problems, outcomes, most = 0, Counter[str](), [0.0, 0]
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "seeds").mkdir()
        found = targets(Path(place) / "seeds")
        for name, target in found.items():
            result = run_case(name, target, lambda *_: "nothing", Path(place) / "case")
            assert (result.outcome, result.problem) == ("imported", None), (
                name,
                (Path(place) / "case" / "output").read_text(),
            )
        for number, result in fuzz(
            found, asked.seed, range(asked.first, asked.first + asked.cases), Path(place) / "case"
        ):
            outcomes[f"{result.change}: {result.outcome}"] += 1
            most = [max(most[0], result.cpu_s), max(most[1], result.more_bytes)]
            if result.problem is not None:
                problems += 1
                print(
                    f"case {number} of seed {asked.seed}, {result.target}, {result.change}: {result.problem}",
                    flush=True,
                )
    for outcome, count in sorted(outcomes.items()):
        print(f"{outcome}: {count}")
    print(
        f"{asked.cases} cases over {len(found)} targets, seed {asked.seed}: {problems} problems; "
        f"at most {most[0]:.1f} s and {most[1] / 1e6:.0f} MB"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
