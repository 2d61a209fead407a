"""The end of a document was counted to the document after it, which could attend to it."""

from typing import Any

import numpy as np

from parallel3d.data import batches
from parallel3d.train import feed
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(__doc__, needs=("isolated documents",), kind="shared")


def plant() -> Planted:
    """A document begins with the end-of-text of the one before."""

    def documents_of(original: Any, tokens: Any, end_of_text: int) -> Any:
        return np.cumsum(tokens == end_of_text, axis=1, dtype=np.int64)

    return all_of(
        wrapped(batches, "documents_of", documents_of), wrapped(feed, "documents_of", documents_of)
    )
