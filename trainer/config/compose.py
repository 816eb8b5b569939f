"""Composes a command's configuration from its overrides, with Hydra.

Only this module and `overrides` use Hydra, through its public API.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from reprise.errors import ConfigError, first_of
from reprise.storage import Files, is_dir, read_regular
from reprise.stores import location
from trainer.config.megatron_flags import refuse_flags
from trainer.config.options import CONFIGS, choices_in
from trainer.config.overrides import escape, quote, readable
from trainer.config.saved import flattened
from trainer.config.schema import Config, key_types
from trainer.config.suggest import closest
from trainer.config.values import path_problems
from trainer.data.byte_level import END_OF_TEXT_ID
from trainer.data.section import TOKEN_KINDS

_log = logging.getLogger(__name__)
# Lines to omit from Hydra's errors: keys cannot be appended, and Hydra's folders do not concern the user.
_OMITTED_LINES = ("reference_type", "object_type", "To append to your config", "Config search path:", "provider=")

# The mapping that is null by default, and its keys.
_NULL_MAPPING = re.compile(r"model\.rope_scaling[.=]")

# Starts the last line in a run's config.yaml. YAML indents values, so no value line starts like this.
_ENVIRONMENT = "# from environment variables: "

# What a variable's value is replaced with, to find the keys it reaches.
_MARK = "from an environment variable"

_ONE_VALUE = "Pass one value per key: multirun is not supported. Text with a comma needs quotes: \"KEY='a,b'\"."
_SCHEDULE = ("schedule.", "optimizer.")
_HELP = """\
usage: reprise train KEY=VALUE ...

Train a model, or continue the run of the same name. `reprise options` explains every group and key, and `--cfg job`
prints the configuration that the command line composes. `--config-dir FOLDER` adds a folder of YAML files.
"""

ConfigStore.instance().store(name="schema", node=Config)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command's overrides, and the folders with configuration files they apply to.

    Args:
        overrides: The command's overrides.
        folders: Folders with groups, besides the project's.
    """

    overrides: tuple[str, ...]
    folders: tuple[Path, ...] = ()

    def compose(self) -> DictConfig:
        """Return the configuration, with its interpolations unresolved.

        Raises:
            ConfigError: An override is malformed, a key is unknown, or a value has the wrong type.
        """
        for word in self.overrides:
            if re.match(r"~|hydra[./@=]", word):
                raise ConfigError(
                    "Hydra's own keys cannot be set, and no key can be deleted",
                    found=word,
                    fix="Remove it. To set the run's folder, use run.dir.",
                )
        try:
            return self._composed(self.overrides)
        except ConfigError as error:
            if len(problems := self._problems()) < 2:
                raise
            text = "\n  ".join(["these problems:", *problems])
            raise ConfigError("The configuration cannot be composed", found=text) from error

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration. Values below a null mapping are merged last, because Hydra cannot set them."""
        words = [word for word in overrides if not _NULL_MAPPING.match(word)]
        if self.folders:
            words.append(f"hydra.searchpath=[{','.join(quote(f'file://{path}') for path in self.folders)}]")
        with _reported(overrides):
            with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
                raw = hydra.compose("train", overrides=words)
            for parsed in OverridesParser.create().parse_overrides([*filter(_NULL_MAPPING.match, overrides)]):
                _merge(raw, {parsed.key_or_group: parsed.value()})
        return raw

    def _problems(self) -> list[str]:
        """Return each override's problem, composed separately on top of the command's valid groups."""
        names = {name for path in (CONFIGS, *self.folders) for name in choices_in(path)}
        problems, groups = list[str](), list[str]()
        for word in sorted(self.overrides, key=lambda word: word.partition("=")[0] not in names):
            try:
                self._composed([*groups, word])
            except ConfigError as error:
                problems.append(f"{error.found} {error.fix or ''}".rstrip())
            else:
                groups += [word] if word.partition("=")[0] in names else []
        return list(dict.fromkeys(problems))


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
    parser.add_argument("--config-dir", "-cd", type=Path, action="append", default=[])
    options = parser.parse_intermixed_args(words)
    if missing := [str(path) for path in options.config_dir if not is_dir(path)]:
        raise ConfigError("A configuration folder does not exist", found=", ".join(missing))
    folders = tuple(path.resolve() for path in options.config_dir)
    command = CommandLine(tuple(readable(options.overrides)), folders)
    if not (options.help or options.cfg):
        return command
    try:
        print(_HELP if options.help else OmegaConf.to_yaml(command.compose()))
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stdout = None
    return None


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without interpolations.

    Args:
        config: The configuration.
        text: The configuration as YAML, with `environment_keys` in a final comment.
        environment_keys: Dotted keys whose values come from environment variables.
    """

    config: Config
    text: str
    environment_keys: frozenset[str]


def unlike(text: str, first: str, *, rank: int) -> ConfigError:
    """Return the error for a rank whose configuration differs from rank 0's, given both as YAML. It names the keys."""
    values, first_values = (flattened(yaml.safe_load(each)) for each in (text, first))
    names = sorted(key for key in {*values, *first_values} if values.get(key, ...) != first_values.get(key, ...))
    return ConfigError(
        "The configuration differs from rank 0's",
        where=f"rank {rank}",
        found=f"other values of {first_of(names, 10)}" if names else None,
        fix="Enter the same command, with the same environment variables, on every host.",
    )


def compose(overrides: Sequence[str] = (), values: Mapping[str, object] | None = None) -> Config:
    """Compose the configuration from values by dotted key, which overrides replace, without validation.

    Raises:
        ConfigError: An override is malformed, a key is unknown, or a value cannot be resolved.
    """
    command = CommandLine(tuple(readable(overrides)))
    raw = command.compose()
    with _reported():
        _merge(raw, _unnamed(values or {}, command))
    return resolve(raw).config


def over_saved(command: CommandLine, files: Files) -> DictConfig:
    """Compose a command's configuration over the loaded checkpoint's, unless the command names a model.

    The command's own keys win, and so do sections whose group it names. With `checkpoint.use_checkpoint_scheduler` the
    checkpoint's schedule and optimizer settings win over all, also those of the run's own checkpoint.
    """
    raw = command.compose()
    with _reported(command.overrides):
        section = raw.checkpoint
        load, step, save = str(section.load), section.ckpt_step, section.save
        folder = section.local.dir if save is None else save
        takes_schedule = section.use_checkpoint_scheduler
    is_whole = load == "auto" or bool(_keys_of(command) & {"model", "experiment"})
    if load == "none" or (is_whole and not takes_schedule):
        return raw
    from trainer.config.load_saved import find_saved

    path = load if load != "auto" or folder is None else folder
    saved = find_saved(location(path), iteration=step, save=None if save is None else Path(save), files=files)
    if saved is None:
        return raw
    values = {} if is_whole else _unnamed(saved.values, command)
    if takes_schedule:
        values |= {key: escape(value) for key, value in saved.values.items() if key.startswith(_SCHEDULE)}
    if values.get("checkpoint.mirror") is not None and not saved.is_of(save):
        mirror = values["checkpoint.mirror"]
        values = {key: value for key, value in values.items() if not key.startswith("checkpoint.mirror")}
        _log.warning(f"checkpoint.mirror={mirror} belongs to the loaded run: set checkpoint.mirror to mirror this run")
    with _reported([str(saved.path)]):
        _merge(raw, values)
    used = "the schedule and optimizer settings" if is_whole else "the configuration"
    _log.info(f"using {used} in {saved.path}, overridden by the command's other keys")
    return raw


def resolve_command(command: CommandLine, files: Files) -> Resolved:
    """Resolve a command's configuration over the loaded checkpoint's.

    Texts without their own tokenizer take the weights' tokenizer. A fresh byte-level model takes its vocabulary from
    the texts' tokenizer.

    Raises:
        TrainerError: See `resolve`. Also, a checkpoint is damaged, or its tokenizer has another form.
    """
    raw = over_saved(command, files)
    resolved = resolve(raw)
    if resolved.config.data.kind in TOKEN_KINDS or any(path_problems(resolved.config)):
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
    _merge(raw, {key: escape(value) for key, value in values.items()})
    return resolve(raw)


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


def _merge(raw: DictConfig, values: Mapping[str, object]) -> None:
    """Set keys. A null mapping takes the defaults of the keys it lacks."""
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        raw.merge_with(value)


def _keys_of(command: CommandLine) -> set[str]:
    """Return the keys and groups in a command's overrides."""
    parsed = OverridesParser.create().parse_overrides(list(command.overrides))
    return {override.key_or_group for override in parsed}


def _unnamed(values: Mapping[str, object], command: CommandLine) -> dict[str, object]:
    """Return the values whose key the command does not name, nor its section, nor a member, with literal texts."""
    named_keys = [f"{key}." for key in _keys_of(command)]

    def is_named(key: str) -> bool:
        return any(f"{key}.".startswith(name) or name.startswith(f"{key}.") for name in named_keys)

    return {key: escape(value) for key, value in values.items() if not is_named(key)}


@contextmanager
def _reported(words: Sequence[str] = ()) -> Iterator[None]:
    """Convert errors from Hydra and OmegaConf to a ConfigError.

    Their own error classes name the override. Assertions and ValueErrors from their dependencies do not.

    Args:
        words: The overrides to name in those errors.
    """
    try:
        yield
    except Exception as error:
        text, fix, where = _error_text(error), None, " ".join(words) or None
        if isinstance(error, HydraException | OmegaConfBaseException):
            fix, where = _ONE_VALUE if "--multirun" in text else _suggestion(error), None
        raise ConfigError("The configuration cannot be composed", where=where, found=text, fix=fix) from error


def _suggestion(error: BaseException) -> str | None:
    """Return advice with the key or group choice most similar to a misspelled name."""
    below = error.__cause__ or error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        suggestion = closest(choice, error.options or ())
        return suggestion and f"Did you mean {group}={suggestion}?"
    if isinstance(below, ConfigKeyError | ConfigAttributeError):
        suggestion = closest(str(below.full_key), key_types())
        return suggestion and f"Did you mean {suggestion}?"
    return None


def resolve(raw: DictConfig) -> Resolved:
    """Resolve every interpolation in a composed configuration.

    Raises:
        ConfigError: A value has the wrong type, or an interpolation cannot be resolved.
    """
    section = OmegaConf.to_container(raw, resolve=False)["run"]  # type: ignore[index,call-overload]
    if "${now" in str(section):
        raise ConfigError(
            "The run's name or folder depends on the time",
            where="run.name, run.dir",
            found=section,
            fix="Set a fixed name so that the same command resumes the run.",
        )
    with _reported():
        config, text = OmegaConf.to_object(raw), OmegaConf.to_yaml(raw, resolve=True)
        environment_keys = keys_from_environment(OmegaConf.to_yaml(raw))
    assert isinstance(config, Config)
    if environment_keys:
        text += f"{_ENVIRONMENT}{' '.join(sorted(environment_keys))}\n"
    return Resolved(config, text, environment_keys)


def keys_from_environment(text: str) -> frozenset[str]:
    """Return the dotted keys whose values come from environment variables, also by way of other keys.

    Args:
        text: The configuration as YAML, with unresolved interpolations.
    """
    if "oc.env" not in text:
        return frozenset()
    OmegaConf.register_new_resolver("marked", lambda *_: _MARK, replace=True)
    marked = OmegaConf.create(text.replace("oc.env", "marked"))
    values = flattened(cast("dict[str, object]", OmegaConf.to_container(marked, resolve=True)))
    return frozenset(key for key, value in values.items() if _MARK in str(value))


def read_resolved(path: Path) -> tuple[dict[str, object], frozenset[str]]:
    """Read the sections and `environment_keys` from a run's `config.yaml`. Both are empty if it does not exist.

    Raises:
        ConfigError: It is damaged.
        OSError: It cannot be read.
    """
    try:
        text = read_regular(path).decode()
        values = OmegaConf.to_container(OmegaConf.create(text))
    except FileNotFoundError:
        return {}, frozenset()
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("The run's configuration is damaged", where=path, found=error) from error
    sections = {str(name): section for name, section in values.items()} if isinstance(values, dict) else {}
    _, comment, names = text.rpartition(f"\n{_ENVIRONMENT}")
    return sections, frozenset(names.split() if comment else ())


def _error_text(error: BaseException) -> str:
    """Return Hydra's message with its cause on a single line. For a value, Hydra's message names only the key."""
    below = error.__cause__
    text = _one_line(str(error)) or type(error).__name__
    return text if below is None else f"{text.removesuffix('.')}: {_one_line(str(below))}"


def _one_line(text: str) -> str:
    lines = [re.sub(r"^full_key: (.*)", r"(\1)", line.strip()) for line in text.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(_OMITTED_LINES))
