"""Configurations that launched ranks take from the process that launches them: Hydra's compose is a third of a start.

A test process composes each set of overrides once, apart from paths, which differ between runs. What cannot be composed
here is left to the ranks, which report it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from functools import cache

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.compose import CONFIGS

_PATH = re.compile(r"([a-z_.]+)=(/[\w./-]+)")


def composed(arguments: Sequence[str]) -> DictConfig | None:
    """Return the configuration of a command of the trainer; None for other commands and for wrong overrides."""
    if arguments[:1] != ["trainer"]:
        return None
    paths = {match[1]: match[2] for word in arguments if (match := _PATH.fullmatch(word))}
    others = tuple(word for word in arguments[1:] if not _PATH.fullmatch(word))
    if len(set(map(_key, arguments))) != len(arguments):
        return None
    try:
        config = deepcopy(_composed(others))
        for key, path in paths.items():
            OmegaConf.update(config, key, path)
    except (HydraException, OmegaConfBaseException, ValueError, AssertionError):
        return None
    return config


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("train", overrides=list(overrides))


def answer_with(config: DictConfig, arguments: Sequence[str]) -> None:
    """Let Hydra answer these arguments in this process with the configuration composed elsewhere."""
    compose = hydra.compose

    def answer(name: str, overrides: list[str]) -> DictConfig:
        return deepcopy(config) if overrides == [*arguments[1:]] else compose(name, overrides=overrides)

    hydra.compose = answer
