"""Checks of the ids in a file: ids outside the vocabulary, document ends, digests of documents.

With sampling, only some documents, spread over an indexed file, are read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.ids.id_file import BLOCK, TokenFile, blocks, spread

DIGEST = np.dtype("V16")
SAMPLED_DOCUMENTS = 256
SAMPLED_IDS = 4096
# If this many documents all end with the same id, it is no coincidence.
ALIKE = 64
OnIds = Callable[[int], None]


@dataclass(frozen=True)
class Vocabulary:
    """The allowed ids 0 .. size - 1, and the end-of-text; `is_sure` if the user configured it."""

    size: int
    end_of_text: int
    is_sure: bool = False


@dataclass(frozen=True, eq=False)
class Checked:
    """The non-empty documents of a file, without their end-of-text."""

    rows: np.ndarray
    """int64 [documents]: numbers of the documents in the file, from 1."""
    starts: np.ndarray
    """int64 [documents]: the first id of each."""
    lengths: np.ndarray
    """int64 [documents]: the number of ids of each."""
    digests: np.ndarray
    """V16 [documents]"""
    counts: np.ndarray
    """int64 [vocabulary]: occurrences in the checked ids, with one end-of-text per document."""
    num_checked: int
    """Number of ids that were read."""
    num_empty: int
    """Number of documents without ids."""


def check(file: TokenFile, vocabulary: Vocabulary, *, sample: bool, on_ids: OnIds) -> Checked:
    """Check the ids of a file, and call `on_ids` with the number of ids done so far.

    A document's digest depends on its ids, but not on their type. With `sample`, it depends on its
    place and length and on the ids that were read of its file. Raises DataError for ids outside the
    vocabulary, and if documents seem to end with another id than the end-of-text.
    """
    if file.starts is None or file.lengths is None:
        starts, lengths = _ends(file, vocabulary)
    else:
        starts = file.starts
        lengths = file.lengths.astype(np.int64)
    num_all = len(lengths)
    rows = np.flatnonzero(lengths) + 1
    starts = starts[rows - 1]
    lengths = lengths[rows - 1].copy()
    scan = _Scan(file, vocabulary, rows, starts)
    if sample and file.starts is not None:
        _sample(scan, lengths, on_ids)
        digests = _place_digests(scan, lengths)
    else:
        digests = _read_all(scan, lengths, on_ids)
    has_ids = lengths > 0
    scan.counts[vocabulary.end_of_text] += scan.num_documents - scan.num_ended
    num_empty = num_all - int(has_ids.sum())
    if file.starts is None and lengths[0] == 0:
        # An end-of-text at the beginning of the file, as in llm.c's, is not an empty document.
        num_empty -= 1
    return Checked(
        rows=rows[has_ids],
        starts=starts[has_ids],
        lengths=lengths[has_ids],
        digests=digests[has_ids],
        counts=scan.counts,
        num_checked=scan.num_ids,
        num_empty=num_empty,
    )


def _ends(file: TokenFile, vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and lengths of a flat array's documents; the last may have no end-of-text."""
    ends = [np.empty(0, np.int64)]
    first = 0
    alternate = file.dtype.itemsize == 2
    for ids in blocks(file):
        if not first and alternate and len(ids) >= 16 and ids[::2].any() and not ids[1::2].any():
            raise DataError(
                f"{file.name}: every second id is 0, so ids seem to have {2 * file.dtype.itemsize}"
                f' bytes, not {file.dtype.itemsize}; set data.token_dtype to "uint32"'
            )
        ends.append(np.flatnonzero(ids == vocabulary.end_of_text) + first)
        first += len(ids)
    document_ends = np.concatenate(ends) + 1
    if not len(document_ends):
        raise DataError(
            f"{file.name} ({file.dtype.name}) does not contain the end-of-text id"
            f" {vocabulary.end_of_text}, which must end each document of a flat array; set"
            " data.tokenizer or data.end_of_text_id to those of the file, or correct token_dtype"
        )
    if document_ends[-1] < file.num_tokens:
        document_ends = np.append(document_ends, file.num_tokens)
    starts = np.concatenate([[0], document_ends[:-1]]).astype(np.int64)
    return starts, document_ends - starts


class _Scan:
    """Statistics that are accumulated while the ids of a file are read."""

    def __init__(
        self, file: TokenFile, vocabulary: Vocabulary, rows: np.ndarray, starts: np.ndarray
    ) -> None:
        self.file = file
        self.vocabulary = vocabulary
        self.rows = rows
        self.starts = starts
        self.counts = np.zeros(vocabulary.size, dtype=np.int64)
        self.num_ids = 0
        self.num_documents = 0
        self.num_ended = 0
        self.digest = blake2b(digest_size=16)
        self._ends: set[int] = set()

    def at(self, ids: np.ndarray, first: int) -> np.ndarray:
        """Count `ids`, which start at the file's `first`-th, and return them as uint32."""
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocabulary.size):
            wrong = int(((ids < 0) | (ids >= self.vocabulary.size)).argmax())
            index = int(np.searchsorted(self.starts, first + wrong, side="right")) - 1
            raise DataError(
                f"{self.file.name}, document {int(self.rows[index])}: id {int(ids[wrong])}"
                f" ({self.file.dtype.name}, place {first + wrong - int(self.starts[index]):,}) is"
                f" outside the vocabulary of {self.vocabulary.size}; set data.tokenizer or"
                " data.vocab_size to those of the file, or correct token_dtype"
            )
        self.num_ids += len(ids)
        plain = ids.astype("<u4")
        self.counts += np.bincount(plain, minlength=self.vocabulary.size)
        return plain

    def ended(self, last: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Record last ids and lengths of documents; return which are end-of-text: bool [n]."""
        is_end: np.ndarray = last == self.vocabulary.end_of_text
        self.num_documents += len(last)
        # `counts` has the end-of-texts of the file; do not count those of empty documents.
        self.num_ended += int(is_end.sum())
        self.counts[self.vocabulary.end_of_text] -= int((is_end & (lengths == 1)).sum())
        if len(self._ends) < 2:
            self._ends |= {int(x) for x in np.unique(last)[:2]}
        return is_end

    def check_ends(self) -> None:
        """Raise DataError if all documents end with the same id and it is not the end-of-text."""
        end = self.vocabulary.end_of_text
        alike = self.num_documents >= ALIKE and len(self._ends) == 1
        if alike and self._ends != {end} and not self.vocabulary.is_sure:
            raise DataError(
                f"{self.file.name}: all {self.num_documents:,} documents read end with id"
                f" {self._ends.pop()}, but the end-of-text is {end}; use the tokenizer of the file,"
                f" or set data.end_of_text_id = {end} if this is intended"
            )


def _read_all(scan: _Scan, lengths: np.ndarray, on_ids: OnIds) -> np.ndarray:
    """Read every document, subtract its end-of-text from `lengths`, and return the digests."""
    digests: list[bytes] = []
    for first, last in _groups(scan.starts, lengths):
        start = int(scan.starts[first])
        count = int(lengths[first:last].sum())
        # At most a block, unless a single document is longer.
        plain = scan.at(np.concatenate([*blocks(scan.file, start, count)]), start)
        ends = np.cumsum(lengths[first:last])
        begins = ends - lengths[first:last]
        lengths[first:last] -= scan.ended(plain[ends - 1], lengths[first:last])
        data = plain.view(np.uint8).data
        for begin, length in zip(begins.tolist(), lengths[first:last].tolist(), strict=True):
            part = data[4 * begin : 4 * (begin + length)]
            digests.append(blake2b(part, digest_size=16).digest())
        on_ids(scan.num_ids)
    scan.check_ends()
    return np.frombuffer(b"".join(digests), DIGEST)


def _groups(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield ranges of contiguous documents, each of at most a block or of one document."""
    ends = starts + lengths
    # Ends of the runs of contiguous documents.
    breaks = np.append(np.flatnonzero(starts[1:] != ends[:-1]) + 1, len(starts))
    first = 0
    while first < len(starts):
        run = int(breaks[np.searchsorted(breaks, first, side="right")])
        num = int(np.searchsorted(ends[first:run], starts[first] + BLOCK, side="right"))
        yield first, first + max(1, num)
        first += max(1, num)


def _sample(scan: _Scan, lengths: np.ndarray, on_ids: OnIds) -> None:
    """Read evenly spread documents; subtract 1 from `lengths` if they end with end-of-text."""
    chosen = spread(len(lengths), SAMPLED_DOCUMENTS)
    num_ends = 0
    for index in chosen.tolist():
        start = int(scan.starts[index])
        length = int(lengths[index])
        tail = min(length, SAMPLED_IDS)
        [ids] = blocks(scan.file, start + length - tail, tail)
        plain = scan.at(ids, start + length - tail)
        scan.digest.update(plain.view(np.uint8).data)
        num_ends += int(scan.ended(plain[-1:], lengths[index : index + 1])[0])
    on_ids(int(lengths.sum()))
    scan.check_ends()
    if 0 < num_ends < len(chosen):
        raise DataError(
            f"{scan.file.name}: only {num_ends} of {len(chosen)} sampled documents end with an"
            ' end-of-text, so a sample is not enough; set data.check_ids to "full"'
        )
    if num_ends:
        lengths -= 1


def _place_digests(scan: _Scan, lengths: np.ndarray) -> np.ndarray:
    """Return digests of the documents' places and lengths and the ids read of their file."""
    name = scan.digest.digest()
    pairs = np.stack([scan.rows, lengths], axis=1).astype("<i8")
    digests = [blake2b(name + pair.tobytes(), digest_size=16).digest() for pair in pairs]
    return np.frombuffer(b"".join(digests), DIGEST)
