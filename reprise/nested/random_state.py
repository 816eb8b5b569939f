"""This process's random generator states, as an object to store in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.random import get_state, set_state

from reprise.errors import MismatchError
from reprise.nested.typed_values import rebuilt
from reprise.tensors.modes import own_modes

_HOST = ("python", "numpy", "cpu")


class RandomState:
    """The states of the global generators in Python, NumPy and torch, including torch's devices in use.

    `save` and `load` create it with `rng=True`. In a state dict, put it under a separate key for each rank: `{"rng":
    {str(rank): RandomState()}}`. It does not include generators created by the program itself.
    """

    @own_modes()
    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states: large states as integer tensors, the others as numbers."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, torch.tensor(words, device="cpu"), gauss],
            "numpy": rebuilt(get_state(legacy=False), _exchanged),
            "cpu": torch.get_rng_state(),
        }
        for name in (name for name in _devices() if _module(name).is_initialized()):  # else it drew no numbers there
            state[name] = _module(name).get_rng_state(torch.device(name)).cpu()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators.

        Raises:
            MismatchError: A state belongs to a device missing here. Nothing is set then.
        """
        devices = [name for name in state if name not in _HOST]
        if absent := {*devices} - {*_devices()}:
            raise MismatchError(
                "The checkpoint has random state for a device that this process lacks",
                found=", ".join(sorted(absent)),
                fix="Resume on as many devices, or load without rng=True, which keeps the program's own seed.",
            )
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        set_state(rebuilt(state["numpy"], _exchanged))
        torch.set_rng_state(state["cpu"])
        for name in devices:
            _module(name).set_rng_state(state[name], torch.device(name))


def _devices() -> list[str]:
    """Return the accelerator's devices."""
    device = torch.accelerator.current_accelerator()
    return [] if device is None else [f"{device.type}:{index}" for index in range(torch.accelerator.device_count())]


def _module(name: str) -> Any:
    return torch.get_device_module(torch.device(name))


def _exchanged(value: Any) -> Any:
    """Return an array as a tensor, a tensor as an array, and other values as they are."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.numpy() if isinstance(value, torch.Tensor) else value
