"""Messages between ranks over the store of the process group, and the hosts on which the ranks are."""

from reprise.commit.attempt import Hosts as Hosts
from reprise.commit.attempt import find_hosts as find_hosts
from reprise.commit.channel import StoreChannel as StoreChannel
from reprise.commit.channel import single_rank_channel as single_rank_channel
