"""Opens checkpoints, chooses the one to load, and reads tensors and files from it.

The functions that fill torch's tensors are imported at their first use.
"""

from typing import TYPE_CHECKING

from reprise.format.layout import header_places
from reprise.format.lineage import FRESH, LINEAGE, Branch, Lineage, Parent, newest_lineage, saved_lineage
from reprise.lazy import importer
from reprise.loading.choose import Chooser, LoadSource, LoadTerms, no_folder
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

_NAMES = {"loading.loader": ("LoadReport", "Target", "check_tensors", "fill"), "loading.replicas": ("check_replicas",)}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
