"""Composes the configuration of a command from its overrides, with Hydra.

Only this module uses Hydra and OmegaConf.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from reprise.errors import ConfigError
from reprise.storage import SMALL_BYTES, Files, read_regular
from reprise.stores import location
from trainer.config.megatron_flags import refuse_flags
from trainer.config.options import CONFIGS, keys, null_mappings
from trainer.config.overrides import escape, is_other_text, readable
from trainer.config.schema import Config
from trainer.config.suggest import closest
from trainer.config.values import from_environment, path_problems
from trainer.data.section import TOKEN_KINDS

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Lines of Hydra's errors to omit: no key can be appended, and Hydra's folders do not concern the user.
_LEFT_OUT = ("reference_type", "object_type", "To append to your config", "Config search path:", "provider=")

_LIKE_A_KEY = 0.75  # least ratio of equal characters of an option and a key

# The end of a run's config.yaml. YAML indents the lines of its values, so no value begins a line so.
_ENVIRONMENT = "# from environment variables: "

ConfigStore.instance().store(name="schema", node=Config)
_apply_overrides = ConfigLoaderImpl._apply_overrides_to_config


def _apply_each(overrides: list[Override], raw: DictConfig) -> None:
    """Apply overrides as Hydra does, also to a mapping that is null and to the keys below it.

    Raises:
        HydraException: for an unknown key or a value of another type.
        ConfigError: for several of them.
    """
    problems = list[HydraException]()
    for override in overrides:
        if not override.is_delete():
            _open_null_mapping(raw, override.key_or_group, override._value)
        try:
            _apply_overrides([override], raw)
        except HydraException as error:
            problems.append(error)
    if len(problems) > 1:
        lines = [f"  {_error_text(error)} {_suggestion(error) or ''}".rstrip() for error in problems]
        raise ConfigError("The configuration cannot be composed", found="\n".join(["these problems:", *lines]))
    if problems:
        raise problems[0]


def _open_null_mapping(raw: DictConfig, key: str, value: object) -> None:
    """Give a mapping that is null its defaults if a value is of it or below it: OmegaConf 2.3 merges nothing there."""
    if key.count(".") < 2 and not isinstance(value, dict):
        return
    for name, mapping in null_mappings():
        is_set = key == name and isinstance(value, dict)
        if (is_set or key.startswith(f"{name}.")) and OmegaConf.select(raw, name) is None:
            OmegaConf.update(raw, name, mapping(), merge=False)


class _TypedLoader(get_yaml_loader()):  # type: ignore[misc]
    """Loads YAML as OmegaConf does, but a number or a truth value as its text where it would be written otherwise.

    The schema converts the text by the kind of its key: the text ``1.50`` stays a name, and is a number elsewhere.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        """Return the value of a node."""
        value = super().construct_object(node, deep)
        return node.value if is_other_text(value, node.value) else value


class FileConfigSource(file_config_source.FileConfigSource):
    """Reads the configuration's files, each text as it is written there.

    It has the name of Hydra's own, which is not registered after it.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file."""
        text = Path(self.path, self._normalize_file_name(config_path)).read_text(encoding="utf-8")
        config = OmegaConf.create(yaml.load(text, Loader=_TypedLoader) or {})
        return ConfigResult(self.provider, f"file://{self.path}", config, self._get_header_dict(text))


SourcesRegistry.instance().register(FileConfigSource)
ConfigLoaderImpl._apply_overrides_to_config = staticmethod(_apply_each)  # type: ignore[assignment,method-assign]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without interpolations.

    Args:
        config: the configuration.
        text: the same as YAML, which names `environment_keys` in a comment at its end.
        environment_keys: dotted keys whose values come from environment variables.
    """

    config: Config
    text: str
    environment_keys: frozenset[str]


def compose(overrides: Sequence[str]) -> Config:
    """Return the configuration composed from these overrides, without validation.

    Raises:
        ConfigError: for a malformed override, an unknown key, or a value without resolution.
    """
    return resolve(_composed(readable(overrides))).config


def compose_values(values: Mapping[str, object]) -> Config:
    """Return the configuration with these values by dotted key, without validation; see `compose`."""
    raw = _composed([])
    _reported(lambda: _update(raw, values), ())
    return resolve(raw).config


def _composed(overrides: Sequence[str]) -> DictConfig:
    _refuse_hydra_keys(overrides)

    def composed() -> DictConfig:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose("train", overrides=list(overrides))

    return _reported(composed, overrides)


def compose_command() -> DictConfig | None:
    """Return the configuration composed from the command line; None if Hydra only printed it (`--cfg`, `--help`)."""
    refuse_flags(sys.argv[1:])
    parser = command_parser()
    options, unknown = parser.parse_known_args()
    if unknown:
        _refuse_options(unknown)
        parser.parse_args()  # refuses the others
    words = options.overrides
    quoted = dict(zip(words, readable(words), strict=True))
    sys.argv[1:] = [quoted.get(word, word) for word in sys.argv[1:]]  # which Hydra reads
    arguments = command_parser().parse_args()
    if sys.argv[1:] == arguments.overrides:  # no option of Hydra, whose command would compose twice, to know its mode
        return _composed(arguments.overrides)
    if arguments.multirun or arguments.experimental_rerun is not None:
        raise ConfigError(
            "A command runs one configuration",
            found="--multirun" if arguments.multirun else "--experimental-rerun",
            fix="Start one command per configuration, each with its own run.name.",
        )
    _refuse_hydra_keys(arguments.overrides)
    configs: list[DictConfig] = []
    command = hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(configs.append)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    try:
        with _help_as_text():
            _reported(command, arguments.overrides)
    except BrokenPipeError:  # the reader of `--help` has seen enough
        sys.stdout = None
    return configs[0] if configs else None


def command_parser() -> argparse.ArgumentParser:
    """Return Hydra's parser of a command line."""
    with _help_as_text():
        return get_args_parser()


@contextmanager
def _help_as_text() -> Iterator[None]:
    """Show argparse a text as the help of each option while Hydra makes its parser.

    The help of `--shell-completion` is an object in Hydra 1.3.8, and argparse raises a ValueError on it from Python
    3.14 on. The option has the object again afterwards: Hydra formats it, not argparse.
    """
    add_argument = argparse.ArgumentParser.add_argument

    def add(parser: argparse.ArgumentParser, *names: str, **options: Any) -> argparse.Action:
        action = add_argument(parser, *names, **{**options, "help": ""})
        action.help = options.get("help")
        return action

    argparse.ArgumentParser.add_argument = add  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del argparse.ArgumentParser.add_argument  # the method of its base again


def _refuse_options(words: Sequence[str]) -> None:
    """Refuse an unknown option whose name is like a key's; argparse refuses the others."""
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys())}
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        suggestion = closest(name.replace("-", "_"), by_name, cutoff=_LIKE_A_KEY)
        if word.startswith("--") and suggestion is not None:
            raise ConfigError(
                "An option is unknown; settings have the form SECTION.KEY=VALUE here",
                found=word,
                fix=f"Did you mean {by_name[suggestion]}={value or 'VALUE'}?",
            )


def over_saved(raw: DictConfig, files: Files) -> DictConfig:
    """Return the configuration of a command without a model, over that of the checkpoint to load.

    The command's keys keep its values, and so do sections whose group it names.
    """
    _refuse_unknown_keys(raw)
    arguments, section = command_parser().parse_args(), raw.checkpoint
    named_keys = {override.key_or_group for override in OverridesParser.create().parse_overrides(arguments.overrides)}
    load, step, save = _reported(lambda: (str(section.load), section.ckpt_step, section.save), arguments.overrides)
    is_whole = arguments.config_name or arguments.config_path or named_keys & {"model", "experiment"}
    if load in ("auto", "none") or is_whole:
        return raw
    from trainer.config.load_saved import find_saved

    saved = find_saved(location(load), iteration=step, save=None if save is None else Path(save), files=files)
    if saved is None:
        return raw
    values = {key: value for key, value in saved.values.items() if not _is_named(key, named_keys)}
    if values.get("checkpoint.mirror") is not None and not saved.is_of(save):
        mirror = values.pop("checkpoint.mirror")
        values = {key: value for key, value in values.items() if not key.startswith("checkpoint.mirror_")}
        _log.warning(f"checkpoint.mirror={mirror} is of the run that is loaded: this one has no mirror unless named")
    _reported(lambda: _update(raw, values), [str(saved.path)])
    _log.info(f"the configuration is that of {saved.path}, under the keys of the command")
    return raw


def resolve_command(raw: DictConfig, files: Files) -> Resolved:
    """Return the configuration of a command, resolved, over that of the checkpoint to load.

    Texts without a tokenizer of their own have that of the weights.

    Raises:
        TrainerError: see `resolve`; or a checkpoint is damaged, or its tokenizer of another form.
    """
    resolved = resolve(over_saved(raw, files))
    if resolved.config.data.kind in TOKEN_KINDS or resolved.config.data.tokenizer or path_problems(resolved.config):
        return resolved
    from trainer.config.load_saved import tokenizer_of_weights

    tokenizer = tokenizer_of_weights(resolved.config, files)
    if tokenizer is None:
        return resolved
    _log.info(f"data.tokenizer={tokenizer}, that of the weights")
    _update(raw, {"data.tokenizer": tokenizer})
    return resolve(raw)


def _update(raw: DictConfig, values: Mapping[str, object]) -> None:
    for key, value in values.items():
        _open_null_mapping(raw, key, value)
        # A nested section of the schema takes members only; a dict in its place would be of another type.
        is_section = isinstance(value, dict) and OmegaConf.select(raw, key) is not None
        OmegaConf.update(raw, key, escape(value), merge=is_section)


def _is_named(key: str, names: Collection[str]) -> bool:
    """Return whether a command names a key, its mapping, or a member of it."""
    return any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in names)


def _reported(call: Callable[[], _T], overrides: Sequence[str]) -> _T:
    """Call Hydra or OmegaConf, and convert their errors to a ConfigError.

    Their own error classes name the override; assertions and ValueErrors from their dependencies do not.
    """
    try:
        return call()
    except (HydraException, OmegaConfBaseException) as error:
        text = _error_text(error)
        several = "Give one value per key; there is no multirun. Text with a comma needs quotes: \"KEY='a,b'\"."
        fix = several if "--multirun" in text else _suggestion(error)
        raise ConfigError("The configuration cannot be composed", found=text, fix=fix) from error
    except (BrokenPipeError, ConfigError):
        raise
    except Exception as error:
        where = " ".join(overrides) or None
        raise ConfigError("The configuration cannot be composed", where=where, found=_error_text(error)) from error


def _suggestion(error: BaseException) -> str | None:
    """Return the key, or the choice of a group or a key, most like a misspelled name."""
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
        if re.match(r"[+~]*hydra[./@=]", override) and not re.match(r"\+*hydra\.(searchpath|verbose)=", override):
            raise ConfigError(
                "Hydra's own keys cannot be set",
                found=override,
                fix="Remove it; run.dir sets the folder of a run.",
            )


def resolve(raw: DictConfig) -> Resolved:
    """Return a composed configuration with every interpolation resolved.

    Raises:
        ConfigError: for an unknown key, a value of another type, or an interpolation without resolution.
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
    """Return the sections of a configuration as `read_resolved` does those of a file."""
    values = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return {str(name): section for name, section in values.items()} if isinstance(values, dict) else {}


def read_resolved(path: Path) -> tuple[dict[str, object], frozenset[str]]:
    """Return the sections of a run's `config.yaml`, and its `environment_keys`; empty where there is none.

    Raises:
        ConfigError: if it is damaged.
        OSError: if it cannot be read.
    """
    try:
        text = read_regular(path, limit_bytes=SMALL_BYTES).decode()
        values = OmegaConf.to_container(OmegaConf.create(text))
    except FileNotFoundError:
        return {}, frozenset()
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("The configuration of a run is damaged", where=path, found=error) from error
    sections = {str(name): section for name, section in values.items()} if isinstance(values, dict) else {}
    _, comment, names = text.rpartition(f"\n{_ENVIRONMENT}")
    return sections, frozenset(names.split() if comment else ())


def _refuse_unknown_keys(raw: DictConfig) -> None:
    """Refuse unknown keys, which `+KEY=VALUE` adds, and missing sections, which `~KEY` removes."""
    added = list(_unknown_keys(raw))
    removed = [field.name for field in fields(Config) if field.name not in raw]
    if added or removed:
        suggestion = closest(added[0], keys()) if added else None
        hint = f"Did you mean {suggestion}? " if suggestion else "Correct the key; "
        raise ConfigError(
            "The configuration has unknown or missing keys",
            found="; ".join([*(f"{key} is unknown" for key in added), *(f"{key} is removed" for key in removed)]),
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
    """Return Hydra's message and its cause in a line; for a value, Hydra's message names only the key."""
    below = error.__cause__
    text = _one_line(str(error)) or type(error).__name__
    return text if below is None else f"{text.removesuffix('.')}: {_one_line(str(below))}"


def _one_line(text: str) -> str:
    lines = [re.sub(r"^full_key: (.*)", r"(\1)", line.strip()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_LEFT_OUT))


def _refuse_clocks(raw: DictConfig) -> None:
    """Refuse a run folder whose name depends on the time: ranks would disagree, and no resume would find it."""
    table = OmegaConf.to_container(raw, resolve=False)
    assert isinstance(table, dict)
    section = table["run"]  # an interpolation, if a value stands in its place
    for key, value in section.items() if isinstance(section, dict) else ():
        if "${now" in str(value):
            raise ConfigError(
                "The name or folder of a run depends on the time",
                where=f"run.{key!s}",
                found=str(value),
                fix="Set a fixed name, so that the same command resumes the run.",
            )
