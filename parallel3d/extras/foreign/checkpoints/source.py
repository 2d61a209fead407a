"""The state of a run of another program, as far as its checkpoint says it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.extras.foreign.checkpoints.tensors import KINDS, ForeignTensor, number

ADAMW = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW keeps for a parameter, beside `foreach`'s and `fused`'s own."""


@dataclass
class Source:
    """A checkpoint of another program."""

    folder: Path
    program: str
    """The program that has written it, for people."""
    tensors: dict[str, dict[str, ForeignTensor]] = field(
        default_factory=lambda: {kind: {} for kind in KINDS}
    )
    """By kind, the tensors by the program's names."""
    step: int | None = None
    """Steps done, if it says so."""
    samples: int | None = None
    """Samples trained on, if it says so."""
    optimizer_steps: int | None = None
    """Updates of the optimizer."""
    groups: Sequence[Mapping[str, Any]] = ()
    """The optimizer's groups, as torch's `param_groups` have them."""
    decays: dict[str, float] = field(default_factory=dict)
    """The weight decay of each parameter, by the program's names."""
    batch: int | None = None
    """Samples per step, if it says so."""
    loss_scale: dict[str, Any] | None = None
    """The state of fp16's dynamic loss scale."""

    def add(self, kind: str, name: str, tensor: ForeignTensor) -> None:
        """Add a tensor; a second one of the same name is a copy of the first."""
        first = self.tensors[kind].setdefault(plain_name(name), tensor)
        if first is not tensor:
            first.copies.append(tensor)

    def take_steps(self, steps: object) -> None:
        """Note the updates of the optimizer, if it has counted them."""
        if steps is not None:
            self.optimizer_steps = int(number(steps))

    def take_groups(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[Iterable[str]]
    ) -> None:
        """Note the optimizer's groups and the weight decay of their parameters.

        Raises CheckpointError if they are those of another optimizer of torch.

        - `names`: the parameters of each group, if they are known group by group.
        """
        for group in groups:
            # torch's optimizers have "maximize", and its Adams "amsgrad"; RAdam's state is Adam's.
            if "maximize" in group and ("amsgrad" not in group or group["maximize"]):
                raise CheckpointError(
                    f"{self.folder}: its optimizer's groups have {', '.join(sorted(group))}, which "
                    "are not AdamW's; continue a run of AdamW or Adam"
                )
        if not self.groups:
            self.groups = groups
        if len(groups) != len(names):
            return
        for group, of_group in zip(groups, names, strict=True):
            decay = float(group.get("weight_decay", 0.0))
            self.decays |= {plain_name(name): decay for name in of_group}


_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without those of torch's wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_adamw(state: Iterable[str], place: object) -> None:
    """Raise CheckpointError unless an optimizer keeps what AdamW keeps.

    - `state`: the keys of a parameter's state.
    - `place`: the file.
    """
    found = {key for key in state if isinstance(key, str)}
    if found - ADAMW or not {"exp_avg", "exp_avg_sq"} <= found:
        raise CheckpointError(
            f"{place}: its optimizer keeps {', '.join(sorted(found)) or 'nothing'}, which is not "
            "AdamW's exp_avg and exp_avg_sq; continue a run of AdamW or Adam without amsgrad"
        )
