"""Token ids of a text too long to be encoded at once, equal to the ids of the whole text.

A piece ends where the tokenizer splits the text whatever stands far before and behind. A window
around each place is encoded: at a candidate the ids of its left and right part must be those of the
window. Then each piece is encoded with OVERLAP characters of the next one, and must end with the
ids of these characters alone. For byte-pair encoding this is a proof: a sequence of tokens is the
encoding of its text exactly if each neighbouring pair is the encoding of its own (Berglund and van
der Merwe 2023, "Formalizing BPE tokenization"), and each pair stands in one of the encodings;
pre-tokenizers that go from left to right meet within the overlap. For Unigram the best paths meet
within it, unless two paths are equally good. Where no place is found in LONGEST characters, the
piece ends there all the same, and is counted.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel3d.data.tokenizer import Backend, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Characters of a piece; while it is encoded it takes up to 250 bytes a character.
PIECE = 2**17
# What a piece is encoded with of the next one.
OVERLAP = 2**12
# Of a window's middle, where pieces may end, in characters; and of the places that are tried there.
MIDDLE, TRIED = 2**10, 24
LONGEST = 8 * PIECE
# Pieces that are encoded at once.
AT_ONCE = 4


@dataclass
class LongText:
    """An encoder of long texts; `num_uncertain` pieces may end otherwise than as a whole."""

    tokenizer: "PreTrainedTokenizerBase | Backend"
    num_uncertain: int = 0

    def __post_init__(self) -> None:
        self._continued: Any = None

    def ids(self, chunks: Iterable[str]) -> Iterator[list[int]]:
        """Ids of a text that arrives in chunks, piece by piece, with nothing added."""
        text, more, ended = "", iter(chunks), False
        tokenizer: Any = self.tokenizer
        length = PIECE
        while True:
            read = [text]
            missing = max(AT_ONCE * PIECE, length) + MIDDLE + OVERLAP - len(text)
            while missing >= 0 and not ended:
                chunk = next(more, None)
                ended = chunk is None
                read.append(chunk or "")
                missing -= len(read[-1])
            text = "".join(read)
            if ended and len(text) <= length + MIDDLE + OVERLAP:
                yield from encode(tokenizer, [text])
                return
            if length > LONGEST:
                self.num_uncertain += 1
                yield from encode(tokenizer, [text[:LONGEST]])
                text, tokenizer, length = text[LONGEST:], self._rest(), PIECE
                continue
            ends = self._ends(text, length)
            start = 0
            for end, ids in zip(ends, self._encode(tokenizer, text, ends), strict=True):
                if ids is None:
                    break
                yield ids
                start, tokenizer = end, self._rest()
            text, length = text[start:], PIECE if start else 2 * length

    def _ends(self, text: str, length: int) -> list[int]:
        """Where pieces may end, the first one after about `length` characters."""
        ends: list[int] = []
        start = 0
        while len(ends) < AT_ONCE and start + length + MIDDLE + OVERLAP < len(text):
            end = self._end(text, start + length)
            if end is None:
                break
            ends.append(end)
            start, length = end, PIECE
        return ends

    def _end(self, text: str, near: int) -> int | None:
        """A place near another where the tokenizer splits, by what stands around it."""
        rest = self._rest()
        first = near - MIDDLE
        window = text[first : near + MIDDLE]
        backend = getattr(rest, "backend_tokenizer", None)
        starts = set(range(len(window)))
        if backend is not None:
            found = backend.encode(window, add_special_tokens=False)
            starts = {start for start, _ in found.offsets}
        inner = {start for start in starts if MIDDLE // 2 <= start < 3 * MIDDLE // 2}
        # Between words first: most tokenizers split there for certain.
        between = [x for x in inner if window[x].isspace() and window[x - 1].isalnum()]
        places = [*sorted(between)[: TRIED // 2], *sorted(inner - set(between))]
        for place in places[:TRIED]:
            cut = first + place
            left, right = text[cut - MIDDLE // 2 : cut], text[cut : cut + MIDDLE // 2]
            parts = encode(rest, [left, right, left + right])
            if parts[0] + parts[1] == parts[2]:
                return cut
        return None

    def _encode(self, tokenizer: Any, text: str, ends: list[int]) -> Iterator[list[int] | None]:
        """The ids of each piece; None where it does not end as it does within the text."""
        pieces = [text[a : b + OVERLAP] for a, b in zip([0, *ends], ends, strict=False)]
        beyond = [text[end : end + OVERLAP] for end in ends]
        first = encode(tokenizer, pieces[:1])
        others = encode(self._rest(), [*pieces[1:], *beyond])
        count = len(pieces) - 1
        for ids, overlap in zip([*first, *others[:count]], others[count:], strict=True):
            cut = len(ids) - len(overlap)
            yield ids[:cut] if ids[max(0, cut) :] == overlap else None

    def _rest(self) -> Any:
        """The tokenizer for what is not a text's start."""
        if self._continued is None:
            self._continued = continued(self.tokenizer)
        return self._continued


def continued(tokenizer: "PreTrainedTokenizerBase | Backend") -> Any:
    """The tokenizer for the middle of a text, without the space that some tokenizers put first."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer
    changed = type(backend).from_str(json.dumps(_without_prefix(json.loads(backend.to_str()))))
    # Scores that went through text may differ in their last bit, and so decide ties otherwise.
    changed.model = backend.model
    return Backend(changed)


def _without_prefix(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_prefix(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    known = {"prepend_scheme": "never", "add_prefix_space": False}
    # The model's part is large, and has neither.
    return {
        key: value if key in ("model", "added_tokens") else known.get(key, _without_prefix(value))
        for key, value in part.items()
    }
