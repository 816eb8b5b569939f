"""What the documents name exists, and what they must name is there."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from trainer.config.checkpoint import FLAGS, Allowed, CheckpointSection
from trainer.record.resume_rules import RULES, Verdict

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "tests" / "README.md",
    ROOT / "examples" / "README.md",
]
TRANSLATIONS = [path for path in sorted((ROOT / "docs" / "zh").glob("*.md")) if path.name != "index.md"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_test_that_a_document_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    folders = "reprise|tests|trainer|models|scripts|configs|docs|examples"
    named = re.findall(rf"\b((?:{folders})/[\w./-]+\.(?:py|yaml|md|png))(?:::(\w+))?", text)
    for name, test in named:
        assert (ROOT / name).exists(), name
        assert not test or f"def {test}(" in (ROOT / name).read_text(encoding="utf-8"), f"{name}::{test}"
    for target in re.findall(r"\]\(((?!http|#)[^)]+)\)", text):
        assert (path.parent / target.split("#")[0]).exists(), target
        # The site has the pages below docs alone; a link to another page would fail `make docs`.
        assert path.parent.name != "docs" or not re.match(r"\.\./.*\.md", target), target


def test_the_versions_of_other_programs_are_those_installed() -> None:
    text = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
    named = {
        name: versions.split(" and ") for name, versions in re.findall(r"^\| ([\w-]+) \| ([\d. and]+) \|", text, re.M)
    }
    pinned = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "Makefile"))
    assert named == {name: re.findall(rf"\b{name}==([\d.]+)", pinned) for name in named}
    assert named.keys() == {"transformers", "accelerate", "peft", "deepspeed", "megatron-core", "torch-checkpointing"}


def test_the_versions_of_the_engines_are_those_installed() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", text, re.M)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [name for name, _ in named] == ["datasets", "datatrove", "ray", "lightning-fabric", "pytorch-lightning"]
    assert {f"{name}=={version}" for name, version in named} <= set(pins)


def test_every_pinned_package_takes_the_oldest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pins = dict(pin.split("==") for pin in (ROOT / "constraints.txt").read_text(encoding="utf-8").split())
    packages = [package for package in distributions() if pins.get(package.name) == package.version]
    required = {package.name: package.metadata["Requires-Python"] or "" for package in packages}
    assert len(required) > 50
    assert {name: versions for name, versions in required.items() if oldest not in SpecifierSet(versions)} == {}


def test_the_readme_s_example_of_an_own_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    (block,) = [block for block in blocks if "reprise" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})  # noqa: S102 - our own document
    assert capsys.readouterr().out.strip() in block
    assert (tmp_path / "my_checkpoints" / "iter_0000001" / "manifest.json").exists()


def code_blocks(text: str) -> list[str]:
    """Return the fenced blocks of a page, without those of the site's own directives."""
    return [block for block in re.findall(r"^```.*?^```$", text, flags=re.M | re.S) if not block.startswith("```{")]


@pytest.mark.parametrize("path", TRANSLATIONS, ids=lambda path: path.name)
def test_a_translation_is_of_the_present_page_and_has_its_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    name, digest = re.match(r"<!-- (\S+) ([0-9a-f]{16}) -->", text).groups()
    page = (path.parent / name).read_text(encoding="utf-8")
    assert code_blocks(text) == code_blocks(page)
    # Where this fails, the page has changed: bring the translation up to date, then write the digest that is expected.
    assert digest == sha256(page.encode()).hexdigest()[:16]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_checkpoint_option_that_a_document_names_exists(path: Path) -> None:
    known = {field.name for field in fields(CheckpointSection)}
    named = set(re.findall(r"(?<![\w./])checkpoint\.(\w+)", path.read_text(encoding="utf-8")))
    assert named - known == set()


def test_the_contract_has_every_rule_with_its_verdict_and_flag() -> None:
    text = (ROOT / "docs" / "resume_contract.md").read_text(encoding="utf-8")
    rows = {
        field: row
        for row in re.findall(r"^\| (`[\w.`, ]+`) \| (refused|logged)(.*) \| *(.*?) *\|$", text, flags=re.M)
        for field in re.findall(r"`([\w.]+)`", row[0])
    }
    assert set(rows) == {rule.field for rule in RULES}
    for rule in RULES:
        _, word, rest, flag = rows[rule.field]
        if isinstance(rule.verdict, Allowed):
            assert (word + rest).startswith("refused without the flag"), rule.field
            assert flag == f"`checkpoint.{FLAGS[rule.verdict]}`"
        else:
            assert word == rule.verdict.value, rule.field
            assert flag == ("none" if rule.verdict is Verdict.REFUSED else "")
