"""Composes a command's configuration from its overrides, with Hydra.

Only this module and `overrides` use Hydra, through its public API.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from reprise.errors import ConfigError
from reprise.storage import SMALL_BYTES, Files, is_dir, read_regular
from reprise.stores import location
from trainer.config.megatron_flags import refuse_flags
from trainer.config.options import CONFIGS, choices_in, keys, null_mappings
from trainer.config.overrides import escape, is_other_text, quote, readable
from trainer.config.saved import flattened
from trainer.config.schema import Config
from trainer.config.suggest import closest
from trainer.config.values import from_environment, path_problems
from trainer.data.byte_level import END_OF_TEXT_ID
from trainer.data.section import TOKEN_KINDS

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Lines to omit from Hydra's errors: keys cannot be appended, and Hydra's folders do not concern the user.
_OMITTED_LINES = ("reference_type", "object_type", "To append to your config", "Config search path:", "provider=")

_LIKE_A_KEY = 0.75  # minimum similarity between an option and a key

# Starts the last line in a run's config.yaml. YAML indents values, so no value line starts like this.
_ENVIRONMENT = "# from environment variables: "

_MOST_KEYS = 10  # in a message
_HELP = """\
usage: reprise train KEY=VALUE ...

Train a model, or continue the run of the same name. `reprise options` explains every key.
== Configuration groups ==
Compose your configuration from those groups (group=option)

{groups}

== Config ==
Override anything in the config (foo.bar=value)

{config}
`--cfg job` prints the configuration that the command line composes, `--config-dir` adds a folder of YAML files.
"""

ConfigStore.instance().store(name="schema", node=Config)


@cache
def _scheme() -> str:
    """Register a folder scheme under which Hydra reads values as written, and return its name.

    A number or boolean whose normal form differs stays a text, and the schema converts it by its key's type: ``1.50``
    is a name under some keys, and a number under others.
    """
    plugins, scheme = Plugins.instance(), "text"
    sources: list[Any] = plugins.discover(ConfigSource)
    (file_source,) = (source for source in sources if source.scheme() == "file")

    def load_config(source: ConfigSource, config_path: str) -> ConfigResult:
        result: ConfigResult = file_source.load_config(source, config_path)
        path = Path(source.path, f"{config_path.removesuffix('.yaml')}.yaml")
        texts = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
        result.config = OmegaConf.create(_as_written(OmegaConf.to_container(result.config), texts))
        return result

    plugins.register(
        type("TextSource", (file_source,), {"scheme": staticmethod(lambda: scheme), "load_config": load_config})
    )
    return scheme


def _as_written(value: Any, text: Any) -> Any:
    """Return a YAML value with the file's own text wherever the normal form would differ."""
    if isinstance(value, dict) and isinstance(text, dict):
        texts = {str(key): member for key, member in text.items()}
        return {key: _as_written(member, texts.get(str(key))) for key, member in value.items()}
    if isinstance(value, list) and isinstance(text, list):
        return [_as_written(*pair) for pair in zip(value, text, strict=True)]
    return text if isinstance(text, str) and is_other_text(value, text) else value


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command's overrides, and the configuration files they apply to.

    Args:
        overrides: The command's overrides.
        folder: The configuration folder.
        name: The main file's name in that folder, without suffix.
        folders: Additional folders with groups.
        words: The command's words as typed.
    """

    overrides: tuple[str, ...]
    folder: Path = CONFIGS
    name: str = "train"
    folders: tuple[Path, ...] = ()
    words: tuple[str, ...] = ()

    def compose(self) -> DictConfig:
        """Return the configuration, with its interpolations unresolved.

        Raises:
            ConfigError: An override is malformed, a key is unknown, or a value has the wrong type.
        """
        _refuse_hydra_keys(self.overrides)
        return _reported(lambda: self._composed(self.overrides), self.overrides, self._problems)

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration. Values below a null mapping are set last, because Hydra cannot merge there."""
        null_keys = tuple(f"{name}." for name, _ in null_mappings())
        below = [word for word in overrides if f"{word.lstrip('+').partition('=')[0]}.".startswith(null_keys)]
        later = [parsed for parsed in OverridesParser.create().parse_overrides(below) if not parsed.is_sweep_override()]
        lines = [parsed.input_line for parsed in later]
        words = [word for word in overrides if word not in lines]
        if self.folders:
            words.append(f"hydra.searchpath=[{','.join(quote(f'{_scheme()}://{path}') for path in self.folders)}]")
        with hydra.initialize_config_dir(str(self.folder), version_base="1.3"):
            raw = hydra.compose(self.name, overrides=words)
        for parsed in later:
            _set(raw, parsed.key_or_group, parsed.value())
        return raw

    def _problems(self) -> list[str]:
        """Return each override's problem, composed separately on top of the command's valid groups."""
        names, problems, groups = {name for name, _ in self._groups()}, list[str](), list[str]()
        for word in sorted(self.overrides, key=lambda word: word.partition("=")[0] not in names):
            try:
                _reported(partial(self._composed, [*groups, word]), [word])
            except ConfigError as error:
                problems.append(f"{error.found} {error.fix or ''}".rstrip())
            else:
                groups += [word] if word.partition("=")[0] in names else []
        return list(dict.fromkeys(problems))

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Yield the groups in all folders, with their choices."""
        groups: dict[str, list[str]] = {}
        for folder in (self.folder, *self.folders):
            for group, names in choices_in(folder).items():
                groups.setdefault(group, []).extend(names)
        yield from ((name, choices) for name, choices in groups.items() if choices)

    def help(self) -> str:
        """Return the `--help` text."""
        lines = "\n".join(f"{name}: {', '.join(choices)}" for name, choices in self._groups())
        return _HELP.format(groups=lines, config=OmegaConf.to_yaml(self.compose()))


def read_command(words: Sequence[str]) -> CommandLine | None:
    """Parse a `reprise train` command line. Return None after printing a requested text, such as `--help`.

    Raises:
        ConfigError: A word is a flag instead of an override, or the overrides cannot be composed.
        SystemExit: Another option is unknown.
    """
    refuse_flags(words)
    parser = argparse.ArgumentParser("reprise train", usage="reprise train KEY=VALUE ...", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
    parser.add_argument("--config-name", "-cn", default="train")
    parser.add_argument("--config-path", "-cp", type=Path, default=CONFIGS)
    parser.add_argument("--multirun", "-m", action="store_true")
    options, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        _refuse_options(unknown)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.multirun:
        raise ConfigError(
            "A command runs one configuration",
            found="--multirun",
            fix="Start a separate command per configuration, each with its own run.name.",
        )
    if missing := [str(path) for path in (options.config_path, *options.config_dir) if not is_dir(path)]:
        raise ConfigError("A configuration folder does not exist", found=", ".join(missing))
    folders = tuple(path.resolve() for path in options.config_dir)
    overrides = tuple(readable(options.overrides))
    command = CommandLine(overrides, options.config_path.resolve(), options.config_name, folders, tuple(words))
    if not (options.help or options.cfg):
        return command
    try:
        print(command.help() if options.help else _yaml(command.compose(), options.package, options.resolve))
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stdout = None
    return None


def _yaml(raw: DictConfig, package: str | None, resolves: bool) -> str:
    """Return the configuration, or a section, as YAML.

    Raises:
        ConfigError: An interpolation cannot be resolved, or the section is unknown.
    """

    def text() -> str:
        node = raw if package is None else OmegaConf.select(raw, package, throw_on_missing=True)
        return OmegaConf.to_yaml(node, resolve=resolves)

    return _reported(text, ())


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without interpolations.

    Args:
        config: The configuration.
        text: The configuration as YAML, with `environment_keys` in a final comment.
        environment_keys: Dotted keys whose values come from environment variables.
        words: The command's words. None without a command.
    """

    config: Config
    text: str
    environment_keys: frozenset[str]
    words: tuple[str, ...] | None = None


def unlike(text: str, first: str, *, rank: int) -> ConfigError:
    """Return the error for a rank whose configuration differs from rank 0's, given both as YAML. It names the keys."""
    here, there = (flattened(yaml.safe_load(each)) for each in (text, first))
    names = sorted(key for key in {*here, *there} if key not in here or key not in there or here[key] != there[key])
    more = f" and {len(names) - _MOST_KEYS} more" if len(names) > _MOST_KEYS else ""
    keys = f"other values of {', '.join(names[:_MOST_KEYS])}{more}" if names else None
    fix = "Enter the same command, with the same environment variables, on every host."
    return ConfigError("The configuration differs from rank 0's", where=f"rank {rank}", found=keys, fix=fix)


def compose(overrides: Sequence[str]) -> Config:
    """Compose the configuration from overrides, without validation.

    Raises:
        ConfigError: An override is malformed, a key is unknown, or a value cannot be resolved.
    """
    return resolve(CommandLine(tuple(readable(overrides))).compose()).config


def compose_values(values: Mapping[str, object], overrides: Sequence[str] = ()) -> Config:
    """Compose the configuration from values by dotted key, which overrides replace. See `compose`."""
    command = CommandLine(tuple(readable(overrides)))
    raw, named_keys = command.compose(), _keys_of(command)
    _reported(lambda: _update(raw, {key: values[key] for key in values if not _is_named(key, named_keys)}), ())
    return resolve(raw).config


def _refuse_options(words: Sequence[str]) -> None:
    """Refuse an unknown option with a name similar to a key's. argparse refuses the others."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys())}
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        suggestion = closest(name.replace("-", "_"), by_name, cutoff=_LIKE_A_KEY)
        if word.startswith("--") and suggestion is not None:
            raise ConfigError(
                "An option is unknown: settings have the form SECTION.KEY=VALUE",
                found=word,
                fix=f"Did you mean {by_name[suggestion]}={value or 'VALUE'}?",
            )


def over_saved(command: CommandLine, files: Files) -> DictConfig:
    """Compose a command's configuration over the loaded checkpoint's, unless the command names a model.

    The command's own keys win, and so do sections whose group it names.
    """
    raw = command.compose()
    _refuse_unknown_keys(raw)
    section = raw.checkpoint
    named_keys = _keys_of(command)
    load, step, save = _reported(lambda: (str(section.load), section.ckpt_step, section.save), command.overrides)
    names_model = (command.folder, command.name) != (CONFIGS, "train") or named_keys & {"model", "experiment"}
    if load in ("auto", "none") or names_model:
        return raw
    from trainer.config.load_saved import find_saved

    saved = find_saved(location(load), iteration=step, save=None if save is None else Path(save), files=files)
    if saved is None:
        return raw
    values = {key: value for key, value in saved.values.items() if not _is_named(key, named_keys)}
    if values.get("checkpoint.mirror") is not None and not saved.is_of(save):
        mirror = values.pop("checkpoint.mirror")
        values = {key: value for key, value in values.items() if not key.startswith("checkpoint.mirror_")}
        _log.warning(f"checkpoint.mirror={mirror} belongs to the loaded run: set checkpoint.mirror to mirror this run")
    _reported(lambda: _update(raw, values), [str(saved.path)])
    _log.info(f"using the configuration in {saved.path}, overridden by the command's keys")
    return raw


def resolve_command(command: CommandLine, files: Files) -> Resolved:
    """Resolve a command's configuration over the loaded checkpoint's.

    Texts without their own tokenizer take the weights' tokenizer. A fresh byte-level model takes its vocabulary from
    the texts' tokenizer.

    Raises:
        TrainerError: See `resolve`. Also, a checkpoint is damaged, or its tokenizer has another form.
    """
    raw = over_saved(command, files)
    resolved = replace(resolve(raw), words=command.words)
    if resolved.config.data.kind in TOKEN_KINDS or path_problems(resolved.config):
        return resolved
    values: Mapping[str, object]
    if resolved.config.data.tokenizer is not None:
        values, origin = _vocabulary(resolved.config, command), f"data.tokenizer={resolved.config.data.tokenizer}"
    else:
        from trainer.config.load_saved import tokenizer_of_weights

        tokenizer = tokenizer_of_weights(resolved.config, files)
        values, origin = {} if tokenizer is None else {"data.tokenizer": tokenizer}, "the weights"
    if not values:
        return resolved
    for key, value in values.items():
        _log.info(f"{key}={value}, from {origin}")
    _update(raw, values)
    return replace(resolve(raw), words=command.words)


def _vocabulary(config: Config, command: CommandLine) -> dict[str, int]:
    """Return vocabulary keys from the texts' tokenizer, for a fresh model with the default byte vocabulary.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    model, starts_fresh = config.model, config.checkpoint.load in ("auto", "none") and config.checkpoint.base is None
    names = _keys_of(command)
    if not starts_fresh or "model.vocab_size" in names or model.vocab_size != END_OF_TEXT_ID + 1:
        return {}
    from trainer.data.text import BYTES, open_encoder

    encoder = open_encoder(config.data.tokenizer)
    if encoder.label == BYTES:
        return {}
    values = {
        "model.vocab_size": encoder.vocab_size,
        "model.bos_token_id": encoder.end_of_text,
        "model.eos_token_id": encoder.end_of_text,
    }
    return {key: value for key, value in values.items() if key not in names}


def _update(raw: DictConfig, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        _set(raw, key, escape(value))


def _set(raw: DictConfig, key: str, value: object) -> None:
    """Set a key. A null mapping first gets its defaults, if the value belongs to it or below it."""
    for name, mapping in null_mappings():
        replaces_mapping = key == name and isinstance(value, dict)
        if (replaces_mapping or key.startswith(f"{name}.")) and OmegaConf.select(raw, name) is None:
            OmegaConf.update(raw, name, mapping(), merge=False)
    # Merge into a nested schema section: a dict in its place would have another type.
    is_section = isinstance(value, dict) and OmegaConf.select(raw, key) is not None
    OmegaConf.update(raw, key, value, merge=is_section)


def _keys_of(command: CommandLine) -> set[str]:
    """Return the keys and groups in a command's overrides."""
    parsed = OverridesParser.create().parse_overrides(list(command.overrides))
    return {override.key_or_group for override in parsed}


def _is_named(key: str, names: Collection[str]) -> bool:
    """Return whether a command names a key, its mapping, or a member."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def _reported(call: Callable[[], _T], overrides: Sequence[str], problems: Callable[[], Sequence[str]] = tuple) -> _T:
    """Call Hydra or OmegaConf, and convert their errors to a ConfigError.

    Their own error classes name the override. Assertions and ValueErrors from their dependencies do not.

    Args:
        overrides: The overrides to name in those errors.
        problems: Returns each override's problem. Called after a failure.
    """
    try:
        return call()
    except (HydraException, OmegaConfBaseException) as error:
        if len(several := problems()) > 1:
            text = "\n  ".join(["these problems:", *several])
            raise ConfigError("The configuration cannot be composed", found=text) from error
        text = _error_text(error)
        one_value = "Pass one value per key: multirun is not supported. Text with a comma needs quotes: \"KEY='a,b'\"."
        fix = one_value if "--multirun" in text else _suggestion(error)
        raise ConfigError("The configuration cannot be composed", found=text, fix=fix) from error
    except ConfigError:
        raise
    except Exception as error:
        where = " ".join(overrides) or None
        raise ConfigError("The configuration cannot be composed", where=where, found=_error_text(error)) from error


def _suggestion(error: BaseException) -> str | None:
    """Return advice with the key or choice most similar to a misspelled name."""
    below = error.__cause__ or error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        suggestion = closest(choice, error.options or ())
        return suggestion and f"Did you mean {group}={suggestion}?"
    if isinstance(below, ConfigKeyError | ConfigAttributeError):
        suggestion = closest(str(below.full_key), keys())
        return suggestion and f"Did you mean {suggestion}?"
    if wrong := re.search(r"Invalid value '(.*)', expected one of \[(.*)\]", str(below)):
        suggestion = closest(wrong[1], wrong[2].split(", "), cutoff=0.5)
        return suggestion and f"Did you mean {getattr(below, 'full_key', 'KEY')}={suggestion}?"
    return None


def _refuse_hydra_keys(overrides: Sequence[str]) -> None:
    for override in overrides:
        if re.match(r"[+~]*hydra[./@=]", override):
            raise ConfigError(
                "Hydra's own keys cannot be set",
                found=override,
                fix="Remove it. To set the run's folder, use run.dir.",
            )


def resolve(raw: DictConfig) -> Resolved:
    """Resolve every interpolation in a composed configuration.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type, or an interpolation cannot be resolved.
    """
    _refuse_unknown_keys(raw)
    _refuse_clocks(raw)

    def converted() -> tuple[object, str]:
        return OmegaConf.to_object(raw), OmegaConf.to_yaml(raw, resolve=True)

    config, text = _reported(converted, ())
    assert isinstance(config, Config)
    environment_keys = frozenset(from_environment(OmegaConf.to_container(raw, resolve=False)))
    if environment_keys:
        text += f"{_ENVIRONMENT}{' '.join(sorted(environment_keys))}\n"
    return Resolved(config, text, environment_keys)


def sections_of(config: Config) -> dict[str, object]:
    """Return a configuration's sections in the form that `read_resolved` reads from a file."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return {str(name): section for name, section in values.items()} if isinstance(values, dict) else {}


def read_resolved(path: Path) -> tuple[dict[str, object], frozenset[str]]:
    """Read the sections and `environment_keys` from a run's `config.yaml`. Both are empty if it does not exist.

    Raises:
        ConfigError: It is damaged.
        OSError: It cannot be read.
    """
    try:
        text = read_regular(path, limit_bytes=SMALL_BYTES).decode()
        values = OmegaConf.to_container(OmegaConf.create(text))
    except FileNotFoundError:
        return {}, frozenset()
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("The run's configuration is damaged", where=path, found=error) from error
    sections = {str(name): section for name, section in values.items()} if isinstance(values, dict) else {}
    _, comment, names = text.rpartition(f"\n{_ENVIRONMENT}")
    return sections, frozenset(names.split() if comment else ())


def _refuse_unknown_keys(raw: DictConfig) -> None:
    """Refuse unknown keys, which `+KEY=VALUE` adds, and missing sections, which `~KEY` removes."""
    added = list(_unknown_keys(raw))
    removed = [field.name for field in fields(Config) if field.name not in raw]
    if added or removed:
        suggestion = closest(added[0], keys()) if added else None
        hint = f"Did you mean {suggestion}? " if suggestion else "Correct the key: "
        raise ConfigError(
            "The configuration has unknown or missing keys",
            found="; ".join([*(f"{key} is unknown" for key in added), *(f"{key} is missing" for key in removed)]),
            fix=f"{hint}`reprise options` shows all keys.",
        )


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    members = {field.name for field in fields(OmegaConf.get_type(node))}  # type: ignore[arg-type]
    for key in node:
        name = f"{prefix}{key!s}"
        if key not in members:
            yield name
            continue
        is_set = not (OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key))
        if is_set and isinstance(member := node[key], DictConfig) and is_dataclass(OmegaConf.get_type(member)):
            yield from _unknown_keys(member, f"{name}.")


def _error_text(error: BaseException) -> str:
    """Return Hydra's message with its cause on a single line. For a value, Hydra's message names only the key."""
    below = error.__cause__
    text = _one_line(str(error)) or type(error).__name__
    return text if below is None else f"{text.removesuffix('.')}: {_one_line(str(below))}"


def _one_line(text: str) -> str:
    lines = [re.sub(r"^full_key: (.*)", r"(\1)", line.strip()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_OMITTED_LINES))


def _refuse_clocks(raw: DictConfig) -> None:
    """Refuse a run folder whose name depends on the time: ranks would disagree, and no resume would find it."""
    table = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(table, dict)
    section = table["run"]  # a text if an interpolation replaces the section
    for key, value in section.items() if isinstance(section, dict) else ():
        if "${now" in str(value):
            raise ConfigError(
                "The run's name or folder depends on the time",
                where=f"run.{key!s}",
                found=str(value),
                fix="Set a fixed name so that the same command resumes the run.",
            )
