"""The bounds of documents in samples whose attention stays within a document."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.config.arithmetic import block_tokens
from parallel3d.model.module_cost import BLOCK
from parallel3d.tensor.compiled import graph_break

Tensors = TypeVar("Tensors", "Dealt", "Segments")


class Piece(NamedTuple):
    """Neighbouring tokens of a document in a block that was dealt to this rank.

    They are `tokens` tokens of the flattened tokens here. The last of them attends to the tokens
    [first, end) of the flattened batch, each one before it to one less.
    """

    tokens: int
    first: int
    end: int


# A compiled block guards all fields of a tuple, but only those of a dataclass that it reads.
@dataclass(frozen=True, eq=False)
class Dealt:
    """The tokens of a batch of samples that this rank of a context-parallel group has.

    - `group`: None if one rank has whole samples.
    - `seq`: the length of whole samples. `block`: tokens that are dealt together.
    - `places` [batch, seq / cp]: where in its sample each token here is.
    - `flat` [cp, batch * seq / cp]: where in the flattened batch each rank's tokens are.
    - `order` [batch * seq]: the row of each token of the flattened batch if the ranks' flattened
      tokens are gathered.
    - `first` [batch, seq / cp]: where in the sample each token's document begins.
    - `pieces`: the tokens here, in order.
    """

    group: dist.ProcessGroup | None
    seq: int
    block: int
    places: Tensor
    flat: Tensor
    order: Tensor
    first: Tensor
    pieces: tuple[Piece, ...]

    @property
    def flat_here(self) -> Tensor:
        """Where in the flattened batch this rank's tokens are, [batch * seq / cp]."""
        return self.flat[0 if self.group is None else self.group.rank()]

    @classmethod
    def of(cls, places: Tensor, starts: Tensor, group: dist.ProcessGroup) -> "Dealt":
        """Return what this rank of `group` has.

        - `places` [batch, cp, seq / cp]: of each rank's tokens in their samples.
        - `starts` [batch, seq]: where the document of each token of the samples begins.
        """
        batch, seq = starts.shape
        block = block_tokens(seq, group.size())
        samples = torch.arange(batch).unsqueeze(-1) * seq  # the first token of each, flattened
        flat = (places.transpose(0, 1) + samples).flatten(1)  # [cp, batch * seq / cp]
        own = places[:, group.rank()]
        first = starts.gather(1, own)
        begins = torch.ones_like(own, dtype=torch.bool)  # a block ends a piece, too
        begins[:, 1:] = (first[:, 1:] != first[:, :-1]) | (own[:, 1:] % block == 0)
        heads = begins.flatten().nonzero().squeeze(-1)
        lengths = torch.diff(heads, append=torch.tensor([own.numel()]))
        firsts = (first + samples).flatten()[heads]
        ends = (own + samples).flatten()[heads] + lengths
        pieces = tuple(map(Piece, lengths.tolist(), firsts.tolist(), ends.tolist()))
        return cls(group, seq, block, own, flat, flat.flatten().argsort(), first, pieces)


@dataclass(frozen=True, eq=False)
class Segments:
    """The places of documents in a batch of samples; every document ends with its sample.

    - `positions` [batch, seq]: restart at 0 in each document. Where samples are dealt, those of the
      tokens here.
    - `bounds` (int32, [documents + 1]): the index of each document's first token in the flattened
      batch, and the number of tokens at the end.
    - `lengths`: the number of tokens of each document.
    """

    positions: Tensor
    bounds: Tensor
    lengths: tuple[int, ...]
    dealt: Dealt | None = None
    """The tokens here, if a context-parallel group shares the samples."""

    @property
    def seq(self) -> int:
        """The length of whole samples."""
        return self.positions.shape[-1] if self.dealt is None else self.dealt.seq

    @classmethod
    def of(
        cls, documents: Tensor, places: Tensor | None = None, group: dist.ProcessGroup | None = None
    ) -> "Segments":
        """Return the segments on the host; `documents` [batch, seq] has each token's document.

        `places` [batch, cp, seq / cp]: those of each rank's tokens, if `group` shares the samples.
        """
        documents = documents.cpu()
        seq = documents.shape[-1]
        here = torch.arange(seq)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        first = torch.where(starts, here, 0).cummax(-1).values  # where each document starts
        end = torch.tensor([documents.numel()])
        bounds = torch.cat([starts.flatten().nonzero().squeeze(-1), end]).to(torch.int32)
        positions = here - first
        dealt = None
        if places is not None and group is not None:
            dealt = Dealt.of(places, first, group)
            positions = dealt.places - dealt.first
        return cls(positions, bounds, tuple(bounds.diff().tolist()), dealt)

    def on(self, device: torch.device) -> "Segments":
        """Return the segments with their tensors copied to a device, without waiting."""

        dealt = None if self.dealt is None else _moved(self.dealt, device)
        return replace(_moved(self, device), dealt=dealt)


def _moved(value: Tensors, device: torch.device) -> Tensors:
    """Return segments, or what is dealt of them, with their own tensors on a device."""
    tensors: dict[str, Any] = {}
    for field in fields(value):
        own = getattr(value, field.name)
        if isinstance(own, Tensor):
            pinned = own.pin_memory() if device.type == "cuda" else own
            tensors[field.name] = pinned.to(device, non_blocking=True)
    return replace(value, **tensors)


def undealt_block(seq: int) -> int:
    """Return the block size of whole samples of one rank: that of a kernel if it divides them."""
    return gcd(seq, BLOCK)


@graph_break("the places of chunks")
def in_chunks(size: int, batch: int, seq: int, device: torch.device) -> Segments:
    """Return whole samples in pieces of `size` tokens, as if each piece were a document."""
    return _in_chunks(size, batch, seq, device)


@lru_cache(maxsize=16)
def _in_chunks(size: int, batch: int, seq: int, device: torch.device) -> Segments:
    numbers = torch.arange(seq) // size
    return Segments.of(numbers.expand(batch, seq)).on(device)


@graph_break("the places of tokens whose scores have a soft-cap")
def undealt(segments: Segments | None, batch: int, seq: int, device: torch.device) -> Dealt:
    """Return whole samples as tokens of one rank; `segments` None: each is one document."""
    return _undealt(segments, batch, seq, device)


@lru_cache(maxsize=16)
def _undealt(segments: Segments | None, batch: int, seq: int, device: torch.device) -> Dealt:
    places = torch.arange(seq, device=device).expand(batch, seq)
    tokens = torch.arange(batch * seq, device=device)
    first = torch.zeros_like(places) if segments is None else places - segments.positions
    lengths = (seq,) * batch if segments is None else segments.lengths
    pieces = []
    begin = 0
    for length in lengths:
        for start in range(0, length, BLOCK):
            count = min(BLOCK, length - start)
            pieces.append(Piece(count, begin, begin + start + count))
        begin += length
    block = undealt_block(seq)
    return Dealt(None, seq, block, places, tokens.unsqueeze(0), tokens, first, tuple(pieces))
