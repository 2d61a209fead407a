"""Columns beyond the vocabulary took part in the softmax, and with them the probability of tokens
that do not exist.
"""

from typing import Any

import torch.nn.functional as F

from parallel3d.tensor import loss, vocab
from tests.museum.exhibit import Exhibit, Planted, all_of, wrapped

EXHIBIT = Exhibit(__doc__, "2026-09-09", "unslothai/unsloth#10616", mesh=(1, 1, 4))


def plant() -> Planted:
    """The last rank's slice has three columns more, of zeros."""
    last = False

    def of_slice(original: Any, x: Any, weight: Any, labels: Any, **of: Any) -> Any:
        nonlocal last
        group = of["context"].group
        last = group.rank() == group.size() - 1
        return original(x, weight, labels, **of)

    def logits(original: Any, *given: Any) -> Any:
        return F.pad(original(*given), (0, 3 * last))

    def gradient(original: Any, *given: Any) -> Any:
        result = original(*given)
        return result[:, :-3] if last else result

    return all_of(
        wrapped(vocab, "vocab_parallel_loss", of_slice),
        wrapped(loss, "_logits", logits),
        wrapped(loss, "gradient_of", gradient),
    )
