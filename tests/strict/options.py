"""Delays that hold up the operations of a strict group."""

import random
from dataclasses import dataclass, field

from parallel3d.base.errors import ConfigError

NAME = "strict"


@dataclass(frozen=True)
class StrictOptions:
    """Delays of operations that show what does not wait: random ones, and chosen ones.

    `delay`: the longest random delay of an operation, in seconds; the same for the same `seed`.
    `chosen`: seconds for all operations of a kind ("send"), or for those of one rank ("send@1").
    """

    delay: float = 2e-4
    seed: int = 0
    chosen: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str) -> "StrictOptions":
        """Read "delay=0.001,seed=7,send@1=0.5"; ConfigError where it is something else."""
        try:
            settings = [s.split("=") for s in text.split(",") if s]
            given = {key: float(number) for key, number in settings}
            if min(given.values(), default=0) < 0:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f'PARALLEL3D_BACKEND: the strict backend has no settings "{text}"; write them as '
                'in "tests.strict:strict,delay=0.001,seed=7,send@1=0.5" (seconds)'
            ) from None
        delay, seed = given.pop("delay", cls.delay), given.pop("seed", 0)
        return cls(delay, int(seed), given)

    def seconds(self, kind: str, rank: int, dice: random.Random) -> float:
        """Seconds that an operation of `kind` on a global rank is held up before it starts."""
        drawn = dice.uniform(0, self.delay)
        return self.chosen.get(f"{kind}@{rank}", self.chosen.get(kind, drawn))
