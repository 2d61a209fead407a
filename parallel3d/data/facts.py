"""Facts that the preparation of a corpus records, in its meta.json and for `prepare --json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict


class SkippedDocument(TypedDict):
    """A document that was left out, as `prepare --json` prints it."""

    file: str
    line: int | None
    """None for the whole file."""
    reason: str
    message: str


@dataclass(frozen=True)
class Facts:
    """Facts about one corpus; those that do not apply to it are None.

    The JSON form has the known ones, those of `order` first and the others in the order of the
    fields. So what `from_json` reads, `to_json` writes byte for byte.
    """

    check_ids: str | None = None
    """Which token ids were checked: "full" or "sample"; as the next three, for corpora of ids."""
    num_checked_ids: int | None = None
    num_empty_documents: int | None = None
    """Number of documents without ids, which were left out."""
    weights: str | None = None
    """The column of the tokens' weights in the loss: "labels NAME" or "weights NAME"; for
    conversations "chat", and a digest of the weights."""
    count: str | None = None
    """When the tokens of a stream of text are counted: `data.count`."""
    num_bytes: int | None = None
    """Bytes of all texts in UTF-8."""
    unknown_share: float | None = None
    """The share of the text that the tokenizer does not know, if it is large enough to warn of."""
    num_repeated_documents: int | None = None
    """Number of documents whose contents an earlier document has, too."""
    skipped: Mapping[str, int] | None = None
    """Number of documents that were left out, by reason."""
    skipped_first: Sequence[SkippedDocument] | None = None
    """The first of them; none for a mixture, whose parts have them."""
    num_in_training: int | None = None
    """Number of a validation set's documents that are also in the training part."""
    packed_samples: int | None = None
    """Number of packed samples in an epoch."""
    packed_padding_share: float | None = None
    """The share of places in packed samples that are padding."""
    packed_cut_share: float | None = None
    """The share of documents that are longer than a packed sample, and cut."""
    order: tuple[str, ...] = ()
    """The facts that were read from JSON, in its order."""

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Facts":
        """Return the facts of a meta.json, without those that only older versions recorded."""
        known = {name: value for name, value in facts.items() if name in _NAMES}
        return cls(**known, order=tuple(known))

    def to_json(self) -> dict[str, Any]:
        """Return the facts that are known as a JSON object."""
        names = dict.fromkeys([*self.order, *_NAMES])
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_NAMES = [field.name for field in fields(Facts) if field.name != "order"]
