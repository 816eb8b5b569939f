"""Loads checkpoints: choose, open, read and verify."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.loading.blocks import verify_tensors as verify_tensors
    from reprise.loading.choose import Chooser as Chooser
    from reprise.loading.choose import LoadSource as LoadSource
    from reprise.loading.choose import LoadTerms as LoadTerms
    from reprise.loading.choose import no_folder as no_folder
    from reprise.loading.loader import Target as Target
    from reprise.loading.loader import fill as fill
    from reprise.loading.reader import Checkpoint as Checkpoint
    from reprise.loading.reader import OpenFile as OpenFile
    from reprise.loading.reader import check_tensors as check_tensors
    from reprise.loading.reader import open_checkpoint as open_checkpoint
    from reprise.loading.reader import open_tensor_file as open_tensor_file
    from reprise.loading.reader import read_file as read_file
    from reprise.loading.reader import read_header as read_header
    from reprise.loading.reader import read_places as read_places
    from reprise.loading.restorer import Restored as Restored
    from reprise.loading.restorer import Restorer as Restorer

_NAMES = {
    "loading.blocks": "verify_tensors",
    "loading.choose": "Chooser LoadSource LoadTerms no_folder",
    "loading.loader": "Target fill",
    "loading.reader": "Checkpoint OpenFile check_tensors open_checkpoint open_tensor_file read_file read_header "
    "read_places",
    "loading.restorer": "Restored Restorer",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
