"""Messages between ranks over the store of the process group, and the hosts on which the ranks are."""

from reprise.commit.attempt import Hosts, find_hosts
from reprise.commit.channel import StoreChannel, single_rank_channel
