"""Opens checkpoints, chooses the one to load, and reads tensors and files from it.

The functions that fill torch's tensors are imported at their first use.
"""

from typing import TYPE_CHECKING

from reprise.format.layout import header_places
from reprise.format.lineage import FRESH, LINEAGE, Branch, Lineage, Parent, newest_lineage, saved_lineage
from reprise.lazy import importer
from reprise.loading.choose import Chooser, LoadSource, LoadTerms, committed_in, no_folder
from reprise.loading.reader import (
    Checkpoint,
    Gatherer,
    OpenFile,
    find_accessory,
    open_checkpoint,
    open_tensor_file,
    read_content,
    read_file,
    read_header,
    read_places,
)
from reprise.loading.verify import verify_share
from reprise.storage.progress_line import ProgressLine

if TYPE_CHECKING:
    from reprise.loading.loader import LoadReport, Target, check_tensors, fill
    from reprise.loading.replicas import check_replicas

__all__ = [
    "FRESH",
    "LINEAGE",
    "Branch",
    "Checkpoint",
    "Chooser",
    "Gatherer",
    "Lineage",
    "LoadReport",
    "LoadSource",
    "LoadTerms",
    "OpenFile",
    "Parent",
    "ProgressLine",
    "Target",
    "check_replicas",
    "check_tensors",
    "committed_in",
    "fill",
    "find_accessory",
    "header_places",
    "newest_lineage",
    "no_folder",
    "open_checkpoint",
    "open_tensor_file",
    "read_content",
    "read_file",
    "read_header",
    "read_places",
    "saved_lineage",
    "verify_share",
]

_MODULES = {
    "LoadReport": "reprise.loading.loader",
    "Target": "reprise.loading.loader",
    "check_replicas": "reprise.loading.replicas",
    "check_tensors": "reprise.loading.loader",
    "fill": "reprise.loading.loader",
}


if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _MODULES)
