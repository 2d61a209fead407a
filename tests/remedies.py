"""A remedy must help: a test causes a refusal, does what its message says, and goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from parallel3d.base.errors import Parallel3DError, RankError, TrainingError


@dataclass
class Refusal:
    """The message of an error that was expected; "" until it is raised."""

    text: str = ""


@contextmanager
def refused(remedy: str) -> Iterator[Refusal]:
    """Expect an error for the user, whose message says this."""
    refusal = Refusal()
    with pytest.raises((Parallel3DError, TrainingError, RankError)) as caught:
        yield refusal
    refusal.text = str(caught.value)
    assert remedy in refusal.text
