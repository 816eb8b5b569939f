"""Hostile checkpoints of other programs: refused in one message, within memory and time that their size bounds."""

from __future__ import annotations

import os
import pickle
import resource
import select
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from reprise.errors import TrainerError
from tests.interop.hostile_files import PAYLOADS, bomb, mutate, nested, rewrite_pickle, with_value
from tests.interop.states import opened, read_all, replace_file, state_of
from tests.interop.test_contract import LAYOUTS

MORE_BYTES = 300 << 20  # beside twice the files
CPU_SECONDS, DEADLINE_S = 5.0, 120.0
Edit = Callable[[Path], object]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has no others
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a layout, and writes it once."""
    root = tmp_path_factory.mktemp("seeds")

    def seed(name: str) -> Path:
        if not (root / name).exists():
            path = LAYOUTS[name].write(root / name, state_of(LAYOUTS[name].family))
            read_all(opened(LAYOUTS[name].kind, path, LAYOUTS[name].overrides))  # a fork has what this needs
        return root / name

    return seed


def outcome(name: str, seed: Path, edit: Edit, folder: Path) -> str:
    """Change a copy of a layout and read it in a process of its own; return `read`, `refused`, or what is wrong."""
    layout = LAYOUTS[name]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(seed, folder)
    edit(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    path = folder / "model.bin" if layout.kind == "llmc" else folder
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "read"
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (int(4 * CPU_SECONDS),) * 2)
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
            before = _of_this("VmRSS")
            read_all(opened(layout.kind, path, layout.overrides))
        except TrainerError as error:
            said = "refused" if len(str(error)) < 64 << 10 else "a long message"
        except BaseException:  # noqa: BLE001 - whatever it is, it is what the case is about
            said = traceback.format_exc()[-1500:]
        finally:
            more = _of_this("VmHWM") - before
            os.write(writing, (said if more <= 2 * size + MORE_BYTES else f"{more >> 20} MB of {size} B").encode())
            os._exit(0)
    os.close(writing)
    if not select.select([reading], [], [], DEADLINE_S)[0]:
        os.kill(child, signal.SIGKILL)
    said = os.read(reading, 4096).decode() or "killed"
    os.close(reading)
    _, _, usage = os.wait4(child, 0)
    return said if usage.ru_utime + usage.ru_stime <= CPU_SECONDS else f"{usage.ru_utime + usage.ru_stime:.1f} s"


def _of_this(name: str) -> int:
    """Return an entry of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Edit:
    def edit(folder: Path) -> None:
        path = next(folder.rglob(name))
        path.write_bytes(change(path.read_bytes()))

    return edit


def in_pickle(name: str, key: str, payload: bytes) -> Edit:
    """Return a change that adds an entry to the first file of a name."""
    return rewritten(name, lambda data: rewrite_pickle(data, lambda pickled: with_value(pickled, key, payload)))


def with_argument(name: str, argument: str) -> Edit:
    """Return a change of an argument of the program, in every file of a name, to a huge number."""

    def edit(folder: Path) -> None:
        for path in folder.rglob(name):
            replace_file(path, lambda table: "args" in table and setattr(table["args"], argument, 10**9))

    return edit


def with_long_name(data: bytes) -> bytes:
    """Return DCP's metadata that names files which no file system could have."""
    metadata = pickle.loads(data)  # noqa: S301 - written a moment ago
    for info in metadata.storage_data.values():
        info.relative_path = "a" * 100_000
    return pickle.dumps(metadata)


CASES: dict[str, tuple[str, Edit]] = {
    "a text of 2 ** 40": ("ranks", in_pickle("model_optim_rng.pt", "a", PAYLOADS["text"])),
    "a key of 2 ** 40": ("fully", in_pickle("common.pt", "a", PAYLOADS["key of 2 ** 40"])),
    "an iteration of 2 ** 28": ("fully", in_pickle("common.pt", "iteration", nested(28))),
    "layers": ("ranks", with_argument("model_optim_rng.pt", "num_layers")),
    "ranks": ("ranks", with_argument("model_optim_rng.pt", "tensor_model_parallel_size")),
    "stages": ("stages", with_argument("*model_states.pt", "pipeline_model_parallel_size")),
    "a packed pickle": ("nanogpt", rewritten("ckpt.pt", lambda data: bomb(data, 400 << 20))),
    "a long name": ("fully", rewritten(".metadata", with_long_name)),
    "a long tag": ("zero 2", rewritten("latest", lambda _: b"9" * 5000)),
    "no moments": ("zero 0", in_pickle("mp_rank_00_model_states.pt", "optimizer", b"N")),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "a packed pickle" else case for case in CASES]
)
def test_a_hostile_file_is_refused_within_bounds(seeds: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    name, edit = CASES[case]
    assert outcome(name, seeds(name), edit, tmp_path / "case") == "refused"


@pytest.mark.parametrize(
    "count", [10, pytest.param(100, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.nightly)]
)
def test_damaged_checkpoints_are_refused_or_read(seeds: Callable[[str], Path], tmp_path: Path, count: int) -> None:
    names, problems = sorted(LAYOUTS), []
    for number in range(count):
        random = Random(f"{count}/{number}")
        name, done = random.choice(names), list[str]()
        said = outcome(
            name, seeds(name), lambda folder, r=random, d=done: d.append(mutate(r, folder)), tmp_path / "case"
        )
        problems += [] if said in ("read", "refused") else [(number, name, done, said)]
    assert problems == []
