"""Names for the numbers that torch's optimizers have in the place of parameter names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError

# transformers' Trainer decays no bias and no norm (`Trainer.get_decay_parameter_names`).
_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_NORM = re.compile(r"norm|(?:^|\.)ln_\w+\.", re.IGNORECASE)

Shapes = Mapping[str, Sequence[int]]


class OfIds:
    """The groups and the state of an optimizer that numbers its parameters."""

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], path: Path
    ) -> None:
        self.ids: list[list[Any]] = [list(group["params"]) for group in groups]
        self._groups = groups
        self._state = state
        self._path = path

    def names(self, shapes: Shapes) -> list[list[str]]:
        """Return the names of each group's parameters, in the order of their numbers.

        The optimizer's own names are taken if it has them. Otherwise parameters are in the module's
        order, all in one group, or divided into those that decay and the rest. Every moment must
        have its parameter's shape. Raises CheckpointError if no order fits.

        - `shapes`: the parameters' shapes by name, in the order of the module.
        """
        found = self._find(shapes)
        if found is not None:
            return found
        raise CheckpointError(
            f"{self._path}: {sum(map(len, self.ids))} parameters in {len(self.ids)} groups do not "
            f"fit the {len(shapes)} of the model; set parallel3d.model to that of the run, or save "
            "the optimizer with named parameters: AdamW(model.named_parameters())"
        )

    def fit(self, shapes: Shapes) -> bool:
        """Return True if `names` finds an order."""
        return self._find(shapes) is not None

    def _find(self, shapes: Shapes) -> list[list[str]] | None:
        own = [list(group.get("param_names", ())) for group in self._groups]
        for candidate in (own, *_orders(list(shapes), shapes)):
            if self._fits(candidate, shapes):
                return candidate
        return None

    def _fits(self, names: Sequence[Sequence[str]], shapes: Shapes) -> bool:
        if [len(group) for group in names] != [len(group) for group in self.ids]:
            return False
        for group, ids in zip(names, self.ids, strict=True):
            for name, number in zip(group, ids, strict=True):
                moment = self._state.get(number, {}).get("exp_avg")
                if moment is None or name not in shapes:
                    return False
                if tuple(moment.shape) != tuple(shapes[name]):
                    return False
        return True


def _orders(names: Sequence[str], shapes: Shapes) -> Iterator[list[list[str]]]:
    """Yield the orders in which programs hand parameters to their optimizers."""
    yield [list(names)]
    decays = {
        "Trainer": [n for n in names if not (_NOT_DECAYED.search(n) or _NORM.search(n))],
        "by pattern": [n for n in names if not _NOT_DECAYED.search(n)],
        "by dims": [n for n in names if len(shapes[n]) > 1],
    }
    for decayed in decays.values():
        rest = [name for name in names if name not in set(decayed)]
        yield [decayed, rest]
        yield [rest, decayed]
