"""The on-disk format: names, layout, manifest and headers."""

from typing import TYPE_CHECKING

from reprise.lazy import importer

if TYPE_CHECKING:
    from reprise.format.box import Box as Box
    from reprise.format.box import Image as Image
    from reprise.format.box import Split as Split
    from reprise.format.box import box_of_splits as box_of_splits
    from reprise.format.box import cut as cut
    from reprise.format.box import extent as extent
    from reprise.format.box import image as image
    from reprise.format.box import in_bytes as in_bytes
    from reprise.format.box import intersect as intersect
    from reprise.format.box import relative as relative
    from reprise.format.box import whole as whole
    from reprise.format.dtype import StoredDtype as StoredDtype
    from reprise.format.layout import DEFAULT_FILE_BYTES as DEFAULT_FILE_BYTES
    from reprise.format.layout import FileLayout as FileLayout
    from reprise.format.layout import Layout as Layout
    from reprise.format.layout import Place as Place
    from reprise.format.layout import TensorKind as TensorKind
    from reprise.format.layout import TensorSpec as TensorSpec
    from reprise.format.layout import build_layout as build_layout
    from reprise.format.layout import header_places as header_places
    from reprise.format.layout import model_index as model_index
    from reprise.format.lineage import FRESH as FRESH
    from reprise.format.lineage import LINEAGE as LINEAGE
    from reprise.format.lineage import Branch as Branch
    from reprise.format.lineage import Journal as Journal
    from reprise.format.lineage import Lineage as Lineage
    from reprise.format.lineage import Parent as Parent
    from reprise.format.lineage import newest_lineage as newest_lineage
    from reprise.format.lineage import saved_lineage as saved_lineage
    from reprise.format.manifest import BLOCK_BYTES as BLOCK_BYTES
    from reprise.format.manifest import WrittenPiece as WrittenPiece
    from reprise.format.manifest import digest_of as digest_of
    from reprise.format.mirror_record import MirrorRule as MirrorRule
    from reprise.format.names import ACCESSORIES as ACCESSORIES
    from reprise.format.names import ADAPTERS as ADAPTERS
    from reprise.format.names import FORMAT as FORMAT
    from reprise.format.names import HOST as HOST
    from reprise.format.names import INDEX as INDEX
    from reprise.format.names import INTERIM as INTERIM
    from reprise.format.names import MANIFEST as MANIFEST
    from reprise.format.names import STATE as STATE
    from reprise.format.names import STILL_MIRRORED as STILL_MIRRORED

_NAMES = {
    "format.box": "Box Image Split box_of_splits cut extent image in_bytes intersect relative whole",
    "format.dtype": "StoredDtype",
    "format.layout": (
        "DEFAULT_FILE_BYTES FileLayout Layout Place TensorKind TensorSpec build_layout header_places model_index"
    ),
    "format.lineage": "Branch FRESH Journal LINEAGE Lineage Parent newest_lineage saved_lineage",
    "format.manifest": "BLOCK_BYTES WrittenPiece digest_of",
    "format.mirror_record": "MirrorRule",
    "format.names": "ACCESSORIES ADAPTERS FORMAT HOST INDEX INTERIM MANIFEST STATE STILL_MIRRORED",
}

if not TYPE_CHECKING:
    __getattr__ = importer(__name__, _NAMES)
