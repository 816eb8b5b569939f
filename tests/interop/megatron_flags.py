"""Lists the flags of Megatron-LM in megatron_flags.txt: `python -m tests.interop.megatron_flags CHECKOUT`.

Nothing of Megatron-LM is imported. Its parser adds flags by name, and one for each field of some dataclasses
(`ArgumentGroupFactory` in `megatron/training/argument_utils.py`).
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).with_name("megatron_flags.txt")
PARSER = "megatron/training/arguments.py"
_FLAG = re.compile(r"--[a-z0-9][\w-]+")
SECTIONS = (
    "megatron/core/model_parallel_config.py",
    "megatron/core/transformer/transformer_config.py",
    "megatron/training/config/common_config.py",
    "megatron/training/config/resilience_config.py",
    "megatron/training/config/training_config.py",
)


def main(checkout: Path) -> None:
    """Write the flags of a checkout, a git folder."""
    parser = _tree(checkout, PARSER)
    found, excluded = set(_texts(parser)), set(_excluded(parser))
    for path in SECTIONS:
        for node in ast.walk(_tree(checkout, path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id not in excluded:
                found |= set(_flags(node.target.id, node.value))
    commit = _git(checkout, "rev-parse", "HEAD").strip()
    OUTPUT.write_text("\n".join([f"# Megatron-LM, commit {commit}", *sorted(found), ""]), encoding="utf-8")
    print(OUTPUT)


def known() -> set[str]:
    """Return the flags that are listed."""
    return {line for line in OUTPUT.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}


def _flags(name: str, value: ast.expr | None) -> Iterator[str]:
    """Yield the flags of one field of a dataclass."""
    named = list(_texts(value)) if value is not None else []
    flag = name.replace("_", "-")
    default = value.value if isinstance(value, ast.Constant) else None
    if isinstance(value, ast.Call):
        if any(word.arg == "init" for word in value.keywords):
            return  # computed, not given
        defaults = [word.value for word in value.keywords if word.arg == "default"]
        default = defaults[0].value if defaults and isinstance(defaults[0], ast.Constant) else None
    yield from named or ([f"--no-{flag}", f"--disable-{flag}"] if default is True else [f"--{flag}"])


def _excluded(parser: ast.Module) -> Iterator[str]:
    """Yield the fields of dataclasses that have no flag, or one of another form."""
    for node in ast.walk(parser):
        is_list = isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "exclude" for t in node.targets
        )
        if is_list or (isinstance(node, ast.keyword) and node.arg == "exclude"):
            for text in ast.walk(node.value):  # type: ignore[attr-defined]
                if isinstance(text, ast.Constant):
                    yield text.value


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a syntax tree that are flags."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _FLAG.fullmatch(node.value):
            yield node.value


def _tree(checkout: Path, path: str) -> ast.Module:
    return ast.parse(_git(checkout, "show", f"HEAD:{path}"))


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
