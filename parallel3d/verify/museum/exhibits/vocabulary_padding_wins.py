"""Logits of padding have a share of the probability."""

from typing import Any

import torch.nn.functional as F

from parallel3d.tensor import output
from parallel3d.tensor.cut import even_split
from parallel3d.tensor.vocab import _CrossEntropy
from parallel3d.verify.exhibit import Exhibit, Planted, replaced

EXHIBIT = Exhibit(
    date="2026-09-09",
    source="unslothai/unsloth#10616",
    what=(
        "Columns beyond the vocabulary took part in the softmax, and with them the "
        "probability of tokens that do not exist."
    ),
    mesh=(1, 1, 4),
)


def plant() -> Planted:
    """The last rank's slice has three columns more, of zeros."""

    def loss(logits: Any, labels: Any, vocab_size: int, group: Any) -> Any:
        start, stop = even_split(vocab_size, group.size(), group.rank())
        padded = F.pad(logits, (0, 3)) if stop == vocab_size else logits
        return _CrossEntropy.apply(padded, labels, start, group)

    return replaced(output, "vocab_parallel_cross_entropy", loss)
