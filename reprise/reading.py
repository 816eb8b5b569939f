"""Opens checkpoints, chooses the one to load, and reads tensors and files from it.

The functions that fill torch's tensors are imported at their first use.
"""

from typing import TYPE_CHECKING

from reprise.format.layout import header_places as header_places
from reprise.format.lineage import FRESH as FRESH
from reprise.format.lineage import LINEAGE as LINEAGE
from reprise.format.lineage import Branch as Branch
from reprise.format.lineage import Lineage as Lineage
from reprise.format.lineage import Parent as Parent
from reprise.format.lineage import newest_lineage as newest_lineage
from reprise.format.lineage import saved_lineage as saved_lineage
from reprise.lazy import importer
from reprise.loading.choose import Chooser as Chooser
from reprise.loading.choose import LoadSource as LoadSource
from reprise.loading.choose import LoadTerms as LoadTerms
from reprise.loading.choose import no_folder as no_folder
from reprise.loading.reader import Checkpoint as Checkpoint
from reprise.loading.reader import Gatherer as Gatherer
from reprise.loading.reader import OpenFile as OpenFile
from reprise.loading.reader import find_accessory as find_accessory
from reprise.loading.reader import open_checkpoint as open_checkpoint
from reprise.loading.reader import open_tensor_file as open_tensor_file
from reprise.loading.reader import read_content as read_content
from reprise.loading.reader import read_file as read_file
from reprise.loading.reader import read_header as read_header
from reprise.loading.reader import read_places as read_places
from reprise.loading.verify import verify_share as verify_share
from reprise.storage.progress_line import ProgressLine as ProgressLine

if TYPE_CHECKING:
    from reprise.commit.replicas import check_replicas as check_replicas
    from reprise.loading.loader import LoadReport as LoadReport
    from reprise.loading.loader import Target as Target
    from reprise.loading.loader import check_tensors as check_tensors
    from reprise.loading.loader import fill as fill

_NAMES = {"loading.loader": ("LoadReport", "Target", "check_tensors", "fill"), "commit.replicas": ("check_replicas",)}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
