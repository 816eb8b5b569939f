"""Write docs/generated/options.md from the configuration's schema, and the tables of its megatron_flags.md from theirs.

The command is `python -m scripts.make_options`.
"""

from __future__ import annotations

from trainer.config.megatron_flags import DIFFERENCE, table
from trainer.config.options import CONFIGS, Row, groups, sections

OUTPUT = CONFIGS.parent / "docs" / "generated" / "options.md"
FLAGS = OUTPUT.with_name("megatron_flags.md")

_HEAD = """\
# Options

<!-- Written by python -m scripts.make_options from the schema. -->

Which keys does the configuration have? `reprise options KEY` describes a key, a section or a prefix.

A key is set as `SECTION.KEY=VALUE`, a group of keys by a file's name, as in
`reprise train parallel=zero3 checkpoint.save=null`. Keys win over `experiment=`, and that over other groups. `--cfg
job` prints the configuration of a command line.

A value is text, a number, `true`, `false`, `null`, a list `[a, b]` or a mapping `{a: 1}`, in
[Hydra's grammar](https://hydra.cc/docs/advanced/override_grammar/basic/). A text key takes what was typed, such as
`run.name=1.50` or `data.path=语料/*`; quotes keep a list or a mapping a text: `"run.name='[1]'"`. `${KEY}` is the
value of another key (`tests/unit/config/test_overrides.py`).

A default shows the type; of choices it is in bold.

## Groups

| group | choices |
|---|---|
"""
_BORDER = "|---|---|---|"
_TABLE = f"| key | default | meaning |\n{_BORDER}\n"


def main() -> None:
    """Write the pages and name their files."""
    OUTPUT.write_text(page(), encoding="utf-8")
    FLAGS.write_text(with_flags(FLAGS.read_text(encoding="utf-8")), encoding="utf-8")
    print(OUTPUT, FLAGS, sep="\n")


def page() -> str:
    """Return the page that the schema and the files of configs/ describe."""
    parts = [_HEAD + "".join(f"| `{group}=` | {', '.join(names)} |\n" for group, names in groups())]
    for section in sections():
        parts.append(f"## {section.name}\n\n{section.summary}\n\n{_TABLE}{''.join(map(_line, section.rows))}")
    return "\n".join(parts)


def with_flags(text: str) -> str:
    """Return the page of Megatron-LM's flags with the table of each section."""
    parts = text.split("\n## ")
    for number, part in enumerate(parts):
        rows = table().get(part.partition("\n")[0], [])
        text_lines = [line for line in part.split("\n") if not line.startswith("| `--")]
        border = text_lines.index(_BORDER) + 1 if rows else 0
        parts[number] = "\n".join([*text_lines[:border], *map(_flag_line, rows), *text_lines[border:]])
    return "\n## ".join(parts)


def _flag_line(row: dict[str, str]) -> str:
    flags = [flag for flag in row if flag != DIFFERENCE]
    keys = dict.fromkeys(key for flag in flags for key in row[flag].split())
    cells = [", ".join(f"`{name}`" for name in names) or "none" for names in (flags, keys)]
    return f"| {' | '.join(cells)} | {row.get(DIFFERENCE, '')} |".replace("|  |", "| |")


def _line(row: Row) -> str:
    meaning = row.meaning[0].upper() + row.meaning[1:] if row.meaning[0].isalpha() else row.meaning
    cells = (f"`{row.key}`", _default(row), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(row: Row) -> str:
    """Return the default of a key in a form that shows its type."""
    if row.default.startswith("by"):
        return f"{row.kind}, {row.default}"
    if row.kind.startswith("`"):
        return ", ".join(f"**{choice}**" if choice == row.default else choice for choice in row.kind.split(", "))
    if row.default == "below":
        return row.kind
    if row.default == "`null`":
        return f"{row.default}, {row.kind}"
    if row.default == "`[]`":
        return f"`[]`, {row.kind.removeprefix('list of ')}"
    alternative = row.kind.partition(" or ")[2]
    return f"{row.default} or {alternative}" if alternative else row.default


if __name__ == "__main__":
    main()
