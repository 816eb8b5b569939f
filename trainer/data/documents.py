"""Documents within windows: token bits mark their starts and ends, so a window stays a single tensor.

A document's first token has `DOCUMENT_START` added, and a token behind the end of its window's document is `PADDED`.
Both are above every token. The bits stay with micro-batches when they are split or sent; `WindowForm.split` removes
them before the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.data.data_file import Ints
from trainer.data.document_table import DocumentTable
from trainer.data.section import DataKind, DataSection, SampleCut

DOCUMENT_START = 1 << 32  # tokens are uint16 or uint32
PADDED = 1 << 33
_TOKEN = DOCUMENT_START - 1
IGNORED = -100  # a target ignored by `models.layers.token_loss`


class ModelInputs(NamedTuple):
    """Windows as a model takes them.

    Args:
        tokens: int64 [b, t].
        targets: int64 [b, t], `IGNORED` where there is no target.
        starts: int64 [b, t], the position at which each token's document starts. None without document masks.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    starts: torch.Tensor | None = None

    def keywords(self) -> dict[str, torch.Tensor]:
        """Return the model's keyword arguments besides tokens and dropout key."""
        return {} if self.starts is None else {"starts": self.starts}


@dataclass(frozen=True, slots=True)
class WindowForm:
    """The mark bits in a run's windows.

    Args:
        masks_documents: Whether attention and positions stay within documents.
        is_padded: Whether windows end with their documents.
    """

    masks_documents: bool = False
    is_padded: bool = False

    def split(self, windows: torch.Tensor) -> ModelInputs:
        """Split windows [b, t + 1] into inputs and targets."""
        if not (self.masks_documents or self.is_padded):
            return ModelInputs(windows[:, :-1], windows[:, 1:])
        tokens, starts = windows & _TOKEN, None
        targets = tokens[:, 1:].where(windows[:, 1:] < PADDED, IGNORED)
        if self.masks_documents:
            positions = torch.arange(windows.shape[1] - 1, device=windows.device)
            starts = torch.where(windows[:, :-1] & DOCUMENT_START != 0, positions, 0).cummax(dim=1).values
        return ModelInputs(tokens[:, :-1], targets, starts)


def window_form(section: DataSection) -> WindowForm:
    """Return a run's window form."""
    return WindowForm(
        section.document_mask, is_padded=section.samples is SampleCut.per_document or section.kind is DataKind.module
    )


def uses_index(marks: DocumentMarks | None, *, per_document: bool) -> bool:
    """Return whether samples depend on the document index beside the tokens."""
    return per_document or (marks is not None and marks.end_of_text is None)


@dataclass(frozen=True, slots=True)
class DocumentMarks:
    """Where documents start: behind every token `end_of_text` or, if it is None, at the file index's document starts.

    The first token in every window starts a document too, whatever token precedes it in the file.
    """

    end_of_text: int | None

    def mark(self, window: Ints, table: DocumentTable | None, start: int) -> None:
        """Mark document starts in a window [t + 1], read from a file's position `start`, in place.

        Args:
            table: The file's documents from its index, which is read if there is no end of text.

        Raises:
            DataError: The file's index cannot be read.
        """
        if self.end_of_text is not None:
            window[1:] += (window[:-1] == self.end_of_text) * np.int64(DOCUMENT_START)
        else:
            assert table is not None, "only files with an index come without an end of text"
            window[table.starts_in(start, start + window.size) - start] += DOCUMENT_START
