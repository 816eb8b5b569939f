"""Object stores: checkpoints behind a URL, read and written by separate processes, which alone import obstore."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.stores.locations import ManifestVersion as ManifestVersion
    from reprise.stores.locations import files_of as files_of
    from reprise.stores.locations import is_stored as is_stored
    from reprise.stores.locations import location as location
    from reprise.stores.locations import manifest_version as manifest_version
    from reprise.stores.mirror import Mirror as Mirror
    from reprise.stores.mirror import mirror_rule as mirror_rule
    from reprise.stores.mirror import mirror_run as mirror_run
    from reprise.stores.probe import probe_store as probe_store
    from reprise.stores.url import is_store_url as is_store_url

_NAMES = {
    "stores.locations": "ManifestVersion files_of is_stored location manifest_version",
    "stores.mirror": "Mirror mirror_rule mirror_run",
    "stores.probe": "probe_store",
    "stores.url": "is_store_url",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
