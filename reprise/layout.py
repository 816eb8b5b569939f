"""Where the bytes of tensors lie: boxes of tensors, files of tensors, the part and the digests of each rank."""

from reprise.format.box import Box as Box
from reprise.format.box import Image as Image
from reprise.format.box import absolute as absolute
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
from reprise.format.layout import model_index as model_index
from reprise.format.manifest import BLOCK_BYTES as BLOCK_BYTES
from reprise.format.manifest import WrittenPiece as WrittenPiece
from reprise.format.manifest import digest_of as digest_of
from reprise.saving.plan import Holding as Holding
from reprise.saving.plan import pieces_of as pieces_of
from reprise.tensors.dtypes import stored_dtype as stored_dtype
from reprise.tensors.dtypes import torch_dtype as torch_dtype
