"""torchrun's environment variables. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reprise.errors import LaunchError


@dataclass(frozen=True, slots=True)
class Environment:
    """A rank's place in the launch, from torchrun's variables. A plain `python` process is a world with a single rank.

    Args:
        has_agent_store: Whether the ranks meet in the store of torchrun's agent.
        is_torchrun: Whether torchrun started this process.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    has_agent_store: bool
    is_torchrun: bool = False

    @property
    def store_host(self) -> str:
        """Describe the process hosting the store."""
        return "torchrun's agent on the first node" if self.has_agent_store else "rank 0"

    @staticmethod
    def read(variables: Mapping[str, str]) -> Environment:
        """Read torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).

        Raises:
            LaunchError: A variable is not a number or out of range, or is missing with several ranks.
        """
        number = {name: _number(name, variables.get(name, default)) for name, default in _NUMBERS.items()}
        for name, (least, most) in _ranges(number).items():
            if not least <= number[name] <= most:
                raise LaunchError(
                    f"The environment variable {name} is out of range",
                    expected=f"{least} to {most}",
                    found=number[name],
                    fix="Launch with torchrun, or unset torchrun's variables for a single process.",
                )
        missing = [name for name in ("RANK", "MASTER_ADDR") if not variables.get(name)]
        missing += ["MASTER_PORT"] if number["MASTER_PORT"] == 0 else []
        if number["WORLD_SIZE"] > 1 and missing:
            raise LaunchError(
                "Some of torchrun's environment variables are missing",
                expected=f"{' and '.join(missing)} with WORLD_SIZE={number['WORLD_SIZE']}",
                fix="Launch with torchrun, or set them on every rank.",
            )
        return Environment(
            number["RANK"],
            number["WORLD_SIZE"],
            number["LOCAL_RANK"],
            number["LOCAL_WORLD_SIZE"],
            variables.get("MASTER_ADDR", "localhost"),
            number["MASTER_PORT"],
            variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            "TORCHELASTIC_RUN_ID" in variables,
        )

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks on this host, including this one. torchrun numbers them consecutively."""
        first = self.rank - self.local_rank
        return tuple(range(first, min(first + self.local_world_size, self.world_size)))


_NUMBERS = {
    "WORLD_SIZE": "1",
    "RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_PORT": "0",
}
_MOST_RANKS = 1 << 20


def _ranges(number: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return each variable's range. Sizes come before the numbers they bound."""
    return {
        "WORLD_SIZE": (1, _MOST_RANKS),
        "RANK": (0, number["WORLD_SIZE"] - 1),
        "LOCAL_WORLD_SIZE": (1, number["WORLD_SIZE"]),
        "LOCAL_RANK": (0, number["WORLD_SIZE"] - 1),
        "MASTER_PORT": (0, 65535),
    }


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"The environment variable {name} is not a number",
            found=repr(text),
            fix="Launch with torchrun, or unset torchrun's variables for a single process.",
        ) from None
