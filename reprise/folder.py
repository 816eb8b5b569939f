"""The folder of a run's checkpoints: its iterations and their names, its lock, holds, the names of their files."""

from reprise.format.names import ACCESSORIES as ACCESSORIES
from reprise.format.names import ADAPTERS as ADAPTERS
from reprise.format.names import FORMAT as FORMAT
from reprise.format.names import HOST as HOST
from reprise.format.names import INDEX as INDEX
from reprise.format.names import INTERIM as INTERIM
from reprise.format.names import MANIFEST as MANIFEST
from reprise.format.names import STATE as STATE
from reprise.format.names import STILL_MIRRORED as STILL_MIRRORED
from reprise.storage.folder import TRACKER as TRACKER
from reprise.storage.folder import WEIGHTS as WEIGHTS
from reprise.storage.folder import CheckpointFolder as CheckpointFolder
from reprise.storage.folder import FolderTerms as FolderTerms
from reprise.storage.folder import is_iteration_name as is_iteration_name
from reprise.storage.folder import iteration_name as iteration_name
from reprise.storage.folder import iteration_of as iteration_of
from reprise.storage.folder import named_iteration as named_iteration
from reprise.storage.folder import shown_name as shown_name
from reprise.storage.holds import HOLD as HOLD
from reprise.storage.holds import Hold as Hold
from reprise.storage.lock import FolderLock as FolderLock
from reprise.storage.lock import is_locked as is_locked
from reprise.stores.holds import ManifestVersion as ManifestVersion
from reprise.stores.holds import manifest_version as manifest_version
from reprise.stores.holds import take_hold as take_hold
