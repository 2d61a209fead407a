"""Checks of the ids in a file: ids beyond the vocabulary, document ends, repeated documents.

A sample reads some documents, spread over a file that says where they are, and trusts the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import BLOCK, TokenFile, blocks

DIGEST = np.dtype("V16")
SAMPLED_DOCUMENTS, SAMPLED_IDS = 256, 4096
# As many documents are no coincidence if they all end alike.
ALIKE = 64
OnIds = Callable[[int], None]


@dataclass(frozen=True)
class Vocabulary:
    """The allowed ids, 0 .. size - 1, and the end-of-text; `is_sure` if the user wrote that one."""

    size: int
    end_of_text: int
    is_sure: bool = False


@dataclass(frozen=True, eq=False)
class Checked:
    """The documents of a file that have ids, without their end-of-text, all [documents].

    `rows`, their numbers in the file, from 1; `starts` and `lengths` in ids; `digests` V16.
    `counts` [vocabulary] of the `num_checked` ids, with an end-of-text for each document;
    `num_empty` have no ids.
    """

    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    digests: np.ndarray
    counts: np.ndarray
    num_checked: int
    num_empty: int


def check(file: TokenFile, vocabulary: Vocabulary, *, sample: bool, on_ids: OnIds) -> Checked:
    """Check the ids of a file; `on_ids` is told the number of ids that are done.

    A digest stands for a document's ids, whatever their type; with `sample`, for its place and
    length and what was read of its file. Raises DataError for ids beyond the vocabulary, and where
    documents seem to end with another id than the end-of-text.
    """
    if file.starts is None or file.lengths is None:
        starts, lengths = _ends(file, vocabulary)
    else:
        starts, lengths = file.starts, file.lengths.astype(np.int64)
    num_all = len(lengths)
    rows = np.flatnonzero(lengths) + 1
    starts, lengths = starts[rows - 1], lengths[rows - 1].copy()
    look = _Look(file, vocabulary, rows, starts)
    if sample and file.starts is not None:
        _sample(look, lengths, on_ids)
        digests = _of_places(look, lengths)
    else:
        digests = _read_all(look, lengths, on_ids)
    kept = lengths > 0
    look.counts[vocabulary.end_of_text] += look.num_documents - look.num_ended
    num_empty = num_all - int(kept.sum())
    if file.starts is None and lengths[0] == 0:
        # In llm.c's files it begins the first document.
        num_empty -= 1
    return Checked(
        rows=rows[kept],
        starts=starts[kept],
        lengths=lengths[kept],
        digests=digests[kept],
        counts=look.counts,
        num_checked=look.num_ids,
        num_empty=num_empty,
    )


def _ends(file: TokenFile, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of a flat array's documents; the last may lack its end-of-text."""
    found, first = [], 0
    alternate = file.dtype.itemsize == 2
    for ids in blocks(file):
        if not first and alternate and len(ids) >= 16 and ids[::2].any() and not ids[1::2].any():
            raise DataError(
                f"{file.name}: every second id is 0, as if each had {2 * file.dtype.itemsize} bytes"
                f' and not {file.dtype.itemsize}; set data.token_dtype to "uint32"'
            )
        found.append(np.flatnonzero(ids == vocabulary.end_of_text) + first)
        first += len(ids)
    ends = np.concatenate(found) + 1
    if not len(ends):
        raise DataError(
            f"{file.name} ({file.dtype.name}) has no end-of-text, id {vocabulary.end_of_text},"
            " which ends each document of a flat array; give the tokenizer that wrote it,"
            " or its end_of_text_id, or another token_dtype"
        )
    if ends[-1] < file.num_tokens:
        ends = np.append(ends, file.num_tokens)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    return starts, ends - starts


class _Look:
    """Findings while the ids of a file go by."""

    def __init__(
        self, file: TokenFile, vocabulary: Vocabulary, rows: np.ndarray, starts: np.ndarray
    ) -> None:
        self.file, self.vocabulary, self.rows, self.starts = file, vocabulary, rows, starts
        self.counts = np.zeros(vocabulary.size, dtype=np.int64)
        self.num_ids = self.num_documents = self.num_ended = 0
        self.digest = blake2b(digest_size=16)
        self._ends: set[int] = set()

    def at(self, ids: np.ndarray, first: int) -> np.ndarray:
        """Count the ids from the file's `first`-th on, and return them as uint32."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary.size):
            wrong = int(((ids < 0) | (ids >= self.vocabulary.size)).argmax())
            index = int(np.searchsorted(self.starts, first + wrong, side="right")) - 1
            raise DataError(
                f"{self.file.name}, document {int(self.rows[index])}: id {int(ids[wrong])}"
                f" ({self.file.dtype.name}, place {first + wrong - int(self.starts[index]):,}) is"
                f" beyond a vocabulary of {self.vocabulary.size}; give the tokenizer that it was"
                " written with, or its vocab_size, or another token_dtype"
            )
        self.num_ids += len(ids)
        plain = ids.astype("<u4")
        self.counts += np.bincount(plain, minlength=self.vocabulary.size)
        return plain

    def ended(self, last: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Take the last ids of documents, and their lengths; return which are end-of-text."""
        is_end: np.ndarray = last == self.vocabulary.end_of_text
        self.num_documents += len(last)
        # An end-of-text in the file is counted already; one without a document shall not be.
        self.num_ended += int(is_end.sum())
        self.counts[self.vocabulary.end_of_text] -= int((is_end & (lengths == 1)).sum())
        if len(self._ends) < 2:
            self._ends |= {int(x) for x in np.unique(last)[:2]}
        return is_end

    def check_ends(self) -> None:
        """Raise DataError if all documents end with one id that is not the end-of-text."""
        end = self.vocabulary.end_of_text
        alike = self.num_documents >= ALIKE and len(self._ends) == 1
        if alike and self._ends != {end} and not self.vocabulary.is_sure:
            raise DataError(
                f"{self.file.name}: all {self.num_documents:,} documents that were read end with id"
                f" {self._ends.pop()}, and the end-of-text is {end}; give the tokenizer that it was"
                f' written with, or write "end_of_text_id": {end} if this is meant'
            )


def _read_all(look: _Look, lengths: np.ndarray, on_ids: OnIds) -> np.ndarray:
    """Read every document, take its end-of-text off its length, and return the digests."""
    digests: list[bytes] = []
    for first, last in _groups(look.starts, lengths):
        start = int(look.starts[first])
        count = int(lengths[first:last].sum())
        # More than a block only where one document is longer.
        plain = look.at(np.concatenate([*blocks(look.file, start, count)]), start)
        ends = np.cumsum(lengths[first:last])
        begins = ends - lengths[first:last]
        lengths[first:last] -= look.ended(plain[ends - 1], lengths[first:last])
        data = plain.view(np.uint8).data
        for begin, length in zip(begins.tolist(), lengths[first:last].tolist(), strict=True):
            part = data[4 * begin : 4 * (begin + length)]
            digests.append(blake2b(part, digest_size=16).digest())
        on_ids(look.num_ids)
    look.check_ends()
    return np.frombuffer(b"".join(digests), DIGEST)


def _groups(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents that lie one after the other: a block of them, or one."""
    ends = starts + lengths
    # Where a run of documents ends that follow on each other.
    breaks = np.append(np.flatnonzero(starts[1:] != ends[:-1]) + 1, len(starts))
    first = 0
    while first < len(starts):
        run = int(breaks[np.searchsorted(breaks, first, side="right")])
        num = int(np.searchsorted(ends[first:run], starts[first] + BLOCK, side="right"))
        yield first, first + max(1, num)
        first += max(1, num)


def _sample(look: _Look, lengths: np.ndarray, on_ids: OnIds) -> None:
    """Read some documents, spread evenly, first and last among them; take off what ends all."""
    count = len(lengths)
    chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_DOCUMENTS)).astype(np.int64))
    num_ends = 0
    for index in chosen.tolist():
        start, length = int(look.starts[index]), int(lengths[index])
        tail = min(length, SAMPLED_IDS)
        [ids] = blocks(look.file, start + length - tail, tail)
        plain = look.at(ids, start + length - tail)
        look.digest.update(plain.view(np.uint8).data)
        num_ends += int(look.ended(plain[-1:], lengths[index : index + 1])[0])
    on_ids(int(lengths.sum()))
    look.check_ends()
    if 0 < num_ends < len(chosen):
        raise DataError(
            f"{look.file.name}: {num_ends} of {len(chosen)} documents that were read end with an"
            ' end-of-text and the others do not, so a sample does not do; set check_ids to "full"'
        )
    lengths -= num_ends > 0


def _of_places(look: _Look, lengths: np.ndarray) -> np.ndarray:
    """Return digests of documents by place, length, and what was read of their file."""
    name = look.digest.digest()
    pairs = np.stack([look.rows, lengths], axis=1).astype("<i8")
    found = [blake2b(name + pair.tobytes(), digest_size=16).digest() for pair in pairs]
    return np.frombuffer(b"".join(found), DIGEST)
