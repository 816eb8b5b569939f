"""torchrun's environment variables. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reprise.errors import LaunchError

_MOST_RANKS = 1 << 20
STORE_HOST = "rank 0 or torchrun's agent on the first node"  # the process hosting the store


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

    @staticmethod
    def read(variables: Mapping[str, str]) -> Environment:
        """Read torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).

        Raises:
            LaunchError: A variable is not a number in its range, or is missing with several ranks.
        """
        world_size = _number(variables, "WORLD_SIZE", 1, 1, _MOST_RANKS)
        rank = _number(variables, "RANK", 0, 0, world_size - 1)
        local_world_size = _number(variables, "LOCAL_WORLD_SIZE", 1, 1, world_size)
        local_rank = _number(variables, "LOCAL_RANK", 0, 0, world_size - 1)
        port = _number(variables, "MASTER_PORT", 0, 0, 65535)
        missing = [name for name in ("RANK", "MASTER_ADDR") if not variables.get(name)]
        missing += ["MASTER_PORT"] if port == 0 else []
        if world_size > 1 and missing:
            raise LaunchError(
                "Some of torchrun's environment variables are missing",
                expected=f"{' and '.join(missing)} with WORLD_SIZE={world_size}",
                fix="Launch with torchrun, or set them on every rank.",
            )
        return Environment(
            rank,
            world_size,
            local_rank,
            local_world_size,
            variables.get("MASTER_ADDR", "localhost"),
            port,
            variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            "TORCHELASTIC_RUN_ID" in variables,
        )

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks on this host, including this one. torchrun numbers them consecutively."""
        first = self.rank - self.local_rank
        return tuple(range(first, min(first + self.local_world_size, self.world_size)))


def _number(variables: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = variables.get(name, str(default))
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise LaunchError(
            f"The environment variable {name} is not valid",
            expected=f"a number from {least} to {most}",
            found=repr(text),
            fix="Launch with torchrun, or unset torchrun's variables for a single process.",
        )
    return number
