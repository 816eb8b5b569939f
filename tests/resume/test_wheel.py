"""The wheel works where there is no checkout: the command, its tools and the configurations come from it alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import ROOT


def call(words: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, with nothing of this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment into which the wheel is installed; the libraries are those of the environment of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("trainer", "models", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    found = folder / "environment"
    venv.create(found, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    built = call([*pip, "wheel", "--no-build-isolation", *offline, "--wheel-dir", folder, source], folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    installed = call([*pip, "--python", found / "bin" / "python", "install", *offline, wheel], folder)
    assert installed.returncode == 0, installed.stderr
    (packages,) = found.glob("lib/python*/site-packages")
    # Python reads no .pth file of a folder that a .pth file names, so the checkout of an editable install stays out.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def reprise(environment: Path, folder: Path, *words: str) -> str:
    """Call the installed command and return the text that it prints."""
    ended = call([environment / "bin" / "reprise", *words], folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_wheel_holds_the_packages_and_every_configuration(environment: Path, tmp_path: Path) -> None:
    (packages,) = environment.glob("lib/python*/site-packages")
    found = call([environment / "bin" / "python", "-c", "import trainer; print(trainer.__file__)"], tmp_path)
    assert Path(found.stdout.strip()) == packages / "trainer" / "__init__.py", found.stderr
    shipped = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {path.relative_to(packages) for path in (packages / "configs").rglob("*.yaml")} == shipped
    assert (packages / "trainer" / "py.typed").exists()
    assert (packages / "models" / "py.typed").exists()
    (licence,) = packages.glob("reprise-*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()


def test_an_installed_command_trains_saves_and_inspects(environment: Path, tmp_path: Path) -> None:
    few = ["train.train_iters=2", "train.eval_interval=0", "checkpoint.save_interval=1", "data.cache=cache"]
    reprise(environment, tmp_path, "train", "experiment=demo", *few)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "runs"]
    run = "runs/default"
    assert "iter_0000002" in reprise(environment, tmp_path, "checkpoint", "ls", run)
    assert "whole" in reprise(environment, tmp_path, "checkpoint", "verify", run)


def test_an_installed_command_checks_the_machine_and_its_version(environment: Path, tmp_path: Path) -> None:
    assert "O_DIRECT" in reprise(environment, tmp_path, "doctor", ".")
    assert reprise(environment, tmp_path, "--version").startswith("reprise ")
    assert list(tmp_path.iterdir()) == []
