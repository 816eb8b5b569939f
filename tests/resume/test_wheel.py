"""The wheel works where there is no checkout, beside modules of the user with the names of the trainer's own.

Each environment has the wheel and the libraries that the wheel requires, and no other library of this environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import reprise
from tests import ROOT
from tests.harness import DEADLINE_S

FEW = ["train.train_iters=2", "train.eval_interval=0", "checkpoint.save_interval=1", "data.cache=cache"]
TRAIN = ["train", "experiment=demo", *FEW]

# A program in a folder with modules of its user: all of them are his, and the library saves and loads.
PROGRAM = """
from pathlib import Path

import torch

import configs
import models.net
import reprise
import trainer

here = Path(__file__).parent
assert Path(trainer.__file__) == here / "trainer.py"
assert Path(models.net.__file__).parent == here / "models"
assert list(configs.__path__) == [str(here / "configs")]
model = models.net.model()
optimizer = torch.optim.AdamW(model.parameters())
reprise.save("checkpoints", model, optimizer, iteration=1, state={"epoch": 3})
print(reprise.load("checkpoints", model, optimizer))
"""


def call(
    words: Sequence[str | Path], folder: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with nothing of this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    environment |= variables or {}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built in a checkout in which an earlier version was built."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("reprise", "trainer", "models", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "models", source / "build/lib/models")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = call([*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, source], folder)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of `pip install torch-reprise`."""
    return install(wheel, tmp_path_factory.mktemp("plain"), extra="")


@pytest.fixture(scope="module")
def training(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of `pip install 'torch-reprise[train]'`."""
    return install(wheel, tmp_path_factory.mktemp("training"), extra="train")


def install(wheel: Path, folder: Path, *, extra: str) -> Path:
    """Make an environment of the wheel, and of links to the libraries that it requires."""
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", folder / "bin/python"]
    installed = call([*pip, "install", "--no-deps", "--no-index", wheel], folder)
    assert installed.returncode == 0, installed.stderr
    packages = site_packages(folder)
    (distribution,) = metadata.distributions(path=[str(packages)])
    link_requirements(distribution, extra, packages)
    return folder


def link_requirements(distribution: metadata.Distribution, extra: str, packages: Path) -> None:
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        library = metadata.distribution(requirement.name)
        tops = {file.parts[0] for file in library.files or ()} - {"..", "__pycache__"}
        if all((packages / top).exists() for top in tops):
            continue
        for top in tops:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(library.locate_file(top)))
        link_requirements(library, "", packages)


def site_packages(environment: Path) -> Path:
    (packages,) = environment.glob("lib/python*/site-packages")
    return packages


def run(environment: Path, folder: Path, *words: str, variables: dict[str, str] | None = None) -> str:
    """Call the installed command and return the text that it prints."""
    ended = call([environment / "bin/reprise", *words], folder, variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(params=["models is a package", "models is a folder"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of a user with modules `trainer`, `models` and `configs`."""
    folder = tmp_path / "project"
    for name in ("models", "configs"):
        (folder / name).mkdir(parents=True)
    (folder / "trainer.py").touch()
    (folder / "models/net.py").write_text("import torch\n\n\ndef model():\n    return torch.nn.Linear(4, 1)\n")
    (folder / "configs/train.yaml").write_text("lr: 1\n")
    (folder / "program.py").write_text(PROGRAM)
    if request.param == "models is a package":
        (folder / "models/__init__.py").touch()
    return folder


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        names = [line.split(",")[0] for line in archive.read(record).decode().splitlines()]
    assert {name.split("/")[0] for name in names} == {"reprise", record.split("/")[0]}
    assert record.startswith(f"torch_reprise-{reprise.__version__}.")


def test_the_wheel_holds_the_application_whole(plain: Path) -> None:
    application = site_packages(plain) / "reprise/_application"
    for folder, suffix in (("trainer", "py"), ("models", "py"), ("configs", "yaml")):
        shipped = {path.relative_to(ROOT) for path in (ROOT / folder).rglob(f"*.{suffix}")}
        assert {path.relative_to(application) for path in (application / folder).rglob(f"*.{suffix}")} == shipped
    assert (site_packages(plain) / "reprise/py.typed").exists()
    (license_file,) = site_packages(plain).glob("torch_reprise-*.dist-info/licenses/LICENSE")
    assert "Apache License" in license_file.read_text()


def test_the_library_leaves_a_users_modules_alone(plain: Path, project: Path) -> None:
    ended = call([plain / "bin/python", "program.py"], project)
    assert ended.stdout == "{'epoch': 3, 'iteration': 1}\n", ended.stderr
    assert "whole" in run(plain, project, "checkpoint", "verify", "checkpoints")


def test_a_plain_install_inspects_and_says_what_training_needs(plain: Path, tmp_path: Path) -> None:
    for words in (["train", "experiment=demo"], ["convert", "export", "dcp", "a", "b"], ["prepare-data", "a"]):
        ended = call([plain / "bin/reprise", *words], tmp_path)
        assert ended.returncode == 2
        (line,) = ended.stderr.splitlines()
        assert line.endswith("pip install hydra-core")
    assert run(plain, tmp_path, "--version") == f"reprise {reprise.__version__}\n"
    assert "GB/s" in run(plain, tmp_path, "doctor", ".")
    assert "train.seed" in run(plain, tmp_path, "options", "train.seed")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_trains_beside_a_users_modules(training: Path, project: Path) -> None:
    assert "iteration" in run(training, project, *TRAIN, variables={"PYTHONPATH": str(project)})
    assert (project / "runs/default/checkpoints/iter_0000002/manifest.json").exists()
    ended = call([training / "bin/python", "-m", "reprise", *TRAIN, "run.name=second"], project)
    assert ended.returncode == 0, ended.stderr
    assert (project / "runs/second/checkpoints/iter_0000002/manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("project", ["models is a folder"], indirect=True)
def test_torchrun_starts_ranks_without_a_checkout(training: Path, project: Path) -> None:
    path = f"{training / 'bin'}{os.pathsep}{os.environ['PATH']}"
    torchrun = [training / "bin/python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "--no-python", "reprise", *TRAIN, "parallel=zero3"]
    ended = call(words, project, {"PATH": path, "PYTHONPATH": str(project)})
    assert ended.returncode == 0, ended.stderr
    assert "whole" in run(training, project, "checkpoint", "verify", "runs/default")
