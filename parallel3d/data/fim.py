"""Fill-in-the-middle: some documents are rearranged, so that a model learns to fill gaps in text.

A document is cut at two random places into prefix, middle and suffix, with a special token before
each (Bavarian et al. 2022, arXiv:2207.14255):

    PSM  <prefix> prefix <suffix> suffix <middle> middle
    SPM  <prefix> <suffix> suffix <middle> prefix middle

The choice is a pure function of the run's seed, the sample's global index and the document's number
in the sample, so it is the same on every mesh, and another one in each epoch.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.config.data import FimConfig
from parallel3d.data.corpus import Corpus
from parallel3d.data.order import MASK64, mix
from parallel3d.data.tokenizer import load_tokenizer

ROOM = 3
"""Special tokens of a rearranged document; packed samples have room for them."""
# Those of StarCoder, Qwen, CodeLlama and DeepSeek, before prefix, suffix and middle.
_KNOWN = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
# The choices must not resemble the order of the samples.
_KEY = 0x46494D


@dataclass(frozen=True)
class Fim:
    """The rearrangement of documents in samples."""

    config: FimConfig
    special: tuple[int, ...]
    """The ids of the special tokens before prefix, suffix and middle."""
    end_of_text: int
    seed: int

    @classmethod
    def of(cls, config: FimConfig | None, corpus: Corpus, seed: int = 0) -> "Fim | None":
        """Return the rearrangement with the special tokens of the corpus's tokenizer.

        Raises DataError if it has none.
        """
        if config is None:
            return None
        known = load_tokenizer(corpus.tokenizer_directory).get_vocab()
        names = _KNOWN if config.tokens == "auto" else (config.tokens,)
        for own in names:
            if known.keys() >= set(own):
                return cls(config, tuple(known[name] for name in own), corpus.end_of_text, seed)
        raise DataError(
            f"data.fim.tokens = {config.tokens!r}: the tokenizer does not have them; name its"
            " special tokens before prefix, suffix and middle, or use a tokenizer that has some"
        )

    def rearrange(
        self,
        index: int,
        bounds: np.ndarray,
        places: np.ndarray,
        pieces: np.ndarray,
        sample: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:
        """Rearrange documents of the sample with this global index, in place.

        - `bounds`: those of the stream's documents
        - `places`, `pieces` [seq]: of each token, see `Packing.positions`
        - `sample`: tokens, labels and weights, each [seq]

        Special tokens take the room after a document, or else the place of its last tokens (its
        end-of-text remains). The rest of a document that is cut ends with the label end-of-text.
        """
        tokens, labels, weights = sample
        cuts = np.flatnonzero(np.diff(pieces)) + 1
        for number, (begin, end) in enumerate(pairwise([0, *cuts.tolist(), len(pieces)])):
            size = int((places[begin:end] >= 0).sum())
            draws = self._draw(index, number)
            if not size or draws[0] >= self.config.rate:
                continue
            document = int(np.searchsorted(bounds, places[begin], side="right")) - 1
            start = int(places[begin])
            is_whole = bounds[document : document + 2].tolist() == [start, start + size]
            last = int(labels[begin + size - 1])
            has_end = int(tokens[begin + size - 1]) == self.end_of_text
            num_ends = 1 if has_end else 0
            length = min(size, end - begin - ROOM) - num_ends
            if length < 1 or not (is_whole or self.config.by == "fragment"):
                continue
            first, second = sorted(int(draw * (length + 1)) for draw in draws[2:])
            text = tokens[begin : begin + length].tolist()
            prefix = text[:first]
            middle = text[first:second]
            suffix = text[second:]
            before, after, between = self.special
            if draws[1] < self.config.spm_rate:
                ids = [before, after, *suffix, between, *prefix, *middle]
            else:
                ids = [before, *prefix, after, *suffix, between, *middle]
            ids.append(self.end_of_text)
            if has_end:
                ids.append(last)
            own = slice(begin, begin + len(ids) - 1)
            tokens[own] = ids[:-1]
            labels[own] = ids[1:]
            weights[own] = 1

    def _draw(self, index: int, number: int) -> list[float]:
        """Return four uniform numbers from 0 to 1: the choices, and the two cuts."""
        key = np.array([(self.seed ^ _KEY) & MASK64], np.uint64)
        for value in (index, number):
            key = mix(key) + np.uint64(value)
        bits = mix(mix(key) + np.arange(4, dtype=np.uint64)) >> np.uint64(11)
        drawn: list[float] = (bits / 2**53).tolist()
        return drawn
