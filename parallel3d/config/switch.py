"""Blocks of DeepSpeed's with a key that turns them on."""

from collections.abc import Iterable

from parallel3d.base.section import ABSENT, Problem, Section


class Switched(Section):
    """A block that has no effect unless `enabled` is true."""

    enabled: bool = False
    """Use this block. Required if the block has other keys, which are checked in any case."""

    def _problems(self) -> Iterable[Problem]:
        return missing_switch("enabled", self.model_fields_set, "true or false")


def missing_switch(path: str, names: Iterable[str], values: str) -> Iterable[Problem]:
    """Yield the problem of a block that has keys, but not the one that turns it on.

    DeepSpeed would leave such a block off without a word.

    - `path`: of the key that turns it on.
    - `names`: the keys that are there.
    - `values`: what can be written, for the remedy.
    """
    present = sorted(names)
    switch = path.rpartition(".")[2]
    if present and switch not in present:
        yield Problem(path, ABSENT, f"is missing beside {', '.join(present)}", f"write {values}")
