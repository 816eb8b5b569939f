"""Messages between ranks over the process group's store, and calls made by all ranks together."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.ranks.channel import StoreChannel as StoreChannel
    from reprise.ranks.channel import single_rank_channel as single_rank_channel

_NAMES = {
    "ranks.channel": "StoreChannel single_rank_channel",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
