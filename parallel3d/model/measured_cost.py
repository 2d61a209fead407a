"""Costs of a layer that were measured, as data: polynomials in a microbatch's shape (no torch).

`models/transformers/meter.py` measures a layer at a few shapes and fits them. A variant is one
combination of tensor parallelism and recomputation.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from parallel3d.model.module_cost import BLOCK
from parallel3d.model.recompute import FULL, NONE, Recompute, parse
from parallel3d.model.spec import Attention, KeptMemory, LayerCost, Shape


class Polynomial(NamedTuple):
    """A number of a block's cost: the sum of these coefficients, each times its monomial."""

    constant: float = 0.0
    batch: float = 0.0
    seq: float = 0.0
    tokens: float = 0.0
    squared_seq: float = 0.0
    """A mask that the samples share: seq x seq."""
    scores: float = 0.0
    """Scores of all samples: tokens x seq."""

    def at(self, monomials: Sequence[int]) -> int:
        """Return the value where the monomials are these, as `monomials_at` returns them."""
        return round(sum(map(float.__mul__, self, map(float, monomials))))


def monomials_at(shape: Shape) -> tuple[int, ...]:
    """Return the monomials of `Polynomial` at a shape, in its order."""
    tokens = shape.tokens
    return 1, shape.batch, shape.seq, tokens, shape.seq**2, tokens * shape.seq


@dataclass(frozen=True)
class Variant:
    """A layer's cost with some tensor parallelism and recomputation, for any shape.

    Its cost does not state the FLOPs of all ranks, nor the scores that a classic attention keeps.
    """

    tp: int
    sequence_parallel: bool
    recompute: str
    """The text of a `Recompute`."""
    example: LayerCost
    """The cost at one of the shapes."""
    polynomials: tuple[Polynomial, ...]
    """One for each number of `example`, in the order of `numbers_in`."""
    attention_dropout: bool = False
    """Dropout on the attention weights."""

    def fitted(self, monomials: Sequence[int]) -> LayerCost:
        """Return the cost where the monomials are these, as it was measured."""
        values = iter([polynomial.at(monomials) for polynomial in self.polynomials])
        cost: LayerCost = with_numbers(self.example, values)
        return cost

    def at(self, monomials: Sequence[int]) -> LayerCost:
        """Return the cost where the monomials are these, with the scores of classic attention."""
        cost = self.fitted(monomials)
        attention = cost.forward.attention
        if attention is None:
            return cost
        scores = _scores_of(attention, self.attention_dropout)
        if cost.recomputed.attention:
            return replace(cost, working=cost.working + scores)
        return replace(cost, saved=cost.saved + scores)


def _scores_of(attention: Attention, dropout: bool) -> KeptMemory:
    keys = min(attention.seq, attention.keys + BLOCK)
    scores = attention.batch * attention.heads * attention.seq * keys
    return KeptMemory(scores=scores, dropped_scores=scores if dropout else 0)


@dataclass(frozen=True)
class MeasuredCost:
    """A layer's cost from measurements: a `CostOf`.

    pydantic's `TypeAdapter(MeasuredCost)` writes and reads it as JSON.
    """

    variants: tuple[Variant, ...]
    """Those that were measured, the plain one of one rank (tp = 1) among them."""

    def __call__(
        self,
        shape: Shape,
        tp: int = 1,
        sequence_parallel: bool = False,
        recompute: Recompute = NONE,
    ) -> LayerCost:
        """Return the cost of one microbatch.

        Parts of `recompute` that were not measured cost as if they were not recomputed. Raises
        KeyError for a `tp` that was not measured.
        """
        return _known(self, shape, tp, sequence_parallel and tp > 1, recompute)

    def of(self, shape: Shape, tp: int, split: bool, recompute: Recompute) -> LayerCost:
        """Return the cost, computed now; `split` is sequence parallelism over several ranks."""
        cost = self._at(shape, tp, split, recompute)
        whole = cost if tp == 1 else self._at(shape, 1, False, NONE)
        return replace(cost, forward_flops=whole.forward.flops)

    def _at(self, shape: Shape, tp: int, split: bool, recompute: Recompute) -> LayerCost:
        by_recompute = self._by_setting.get((tp, split))
        if by_recompute is None:
            raise KeyError(f"no cost was measured for tp = {tp}, sequence_parallel = {split}")
        return _closest(by_recompute, recompute).at(monomials_at(shape))

    @cached_property
    def _by_setting(self) -> dict[tuple[int, bool], dict[Recompute, Variant]]:
        settings: dict[tuple[int, bool], dict[Recompute, Variant]] = {}
        for variant in self.variants:
            setting = (variant.tp, variant.sequence_parallel)
            settings.setdefault(setting, {})[parse(variant.recompute)] = variant
        return settings

    @cached_property
    def _hash(self) -> int:
        return hash(self.variants)

    def __hash__(self) -> int:
        return self._hash  # a search asks for it many times


def _closest(variants: dict[Recompute, Variant], recompute: Recompute) -> Variant:
    """Return the variant that recomputes most of these parts and no other."""
    if recompute.full_layers:
        return variants.get(FULL, variants[NONE])
    measured = [kind for kind in variants if not kind.full_layers]
    fitting = [kind for kind in measured if kind.parts <= recompute.parts]
    return variants[max(fitting, key=lambda kind: len(kind.parts))]


@lru_cache(maxsize=2**14)
def _known(
    cost: MeasuredCost, shape: Shape, tp: int, split: bool, recompute: Recompute
) -> LayerCost:
    return cost.of(shape, tp, split, recompute)


def numbers_in(tree: Any) -> Iterator[int]:
    """Yield the integers in nested dataclasses and tuples, in the order of their fields."""
    if isinstance(tree, int):
        yield tree
    elif is_dataclass(tree):
        for field in fields(tree):
            yield from numbers_in(getattr(tree, field.name))
    elif isinstance(tree, tuple):
        for part in tree:
            yield from numbers_in(part)


def with_numbers(tree: Any, numbers: Iterator[int]) -> Any:
    """Return `tree` with other integers, in the order of `numbers_in`."""
    if isinstance(tree, int):
        return next(numbers)
    if is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in fields(tree)]
        return replace(tree, **{name: with_numbers(getattr(tree, name), numbers) for name in names})
    if isinstance(tree, tuple):
        parts = [with_numbers(part, numbers) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def fit(
    rows: Sequence[Sequence[int]], costs: Sequence[LayerCost], used: Sequence[int]
) -> tuple[Polynomial, ...]:
    """Return the polynomials through the numbers of as many costs as monomials are used.

    - `rows`: the monomials at each cost's shape.
    - `used`: the indices of the monomials that have a coefficient.

    Raises ValueError if the costs have different parts.
    """
    inverse = _inverse([[row[i] for i in used] for row in rows])
    columns = [tuple(numbers_in(cost)) for cost in costs]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the number of operations depends on the shape")
    polynomials = []
    for values in zip(*columns, strict=True):
        coefficients = [0.0] * len(Polynomial._fields)
        for i, weights in zip(used, inverse, strict=True):
            coefficients[i] = float(sum(map(Fraction.__mul__, weights, map(Fraction, values))))
        polynomials.append(Polynomial(*coefficients))
    return tuple(polynomials)


def _inverse(matrix: Iterable[Iterable[int]]) -> list[list[Fraction]]:
    """Return the exact inverse of a square matrix (Gauss and Jordan)."""
    rows = [[Fraction(number) for number in row] for row in matrix]
    size = len(rows)
    for i, row in enumerate(rows):
        row.extend(Fraction(int(i == j)) for j in range(size))
    for i in range(size):
        pivot = next(j for j in range(i, size) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        factor = rows[i][i]
        rows[i] = [number / factor for number in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
