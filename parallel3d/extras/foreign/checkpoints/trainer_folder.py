"""Read a folder of transformers' Trainer: weights, `optimizer.pt` and `trainer_state.json`."""

from collections.abc import Mapping
from pathlib import Path

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.safe_files import parse_object, read_bytes
from parallel3d.config.pretrained import weight_files
from parallel3d.extras.foreign.checkpoints.ids import OfIds
from parallel3d.extras.foreign.checkpoints.pickles import Stored, load
from parallel3d.extras.foreign.checkpoints.source import Source, check_adamw
from parallel3d.extras.foreign.checkpoints.tensors import whole
from parallel3d.huggingface.source import DTYPES, stored_tensors

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
_MOST_JSON_BYTES = 2**28


def open_trainer(folder: Path, order: Mapping[str, tuple[int, ...]]) -> Source:
    """Return the run in a folder of the Trainer; raises CheckpointError.

    It does not say how many samples it has trained on.

    - `order`: the shapes of the model's parameters by transformers' names, in its order.
    """
    source = Source(folder, "transformers' Trainer")
    try:
        state = parse_object(read_bytes(folder / STATE, _MOST_JSON_BYTES))
        source.step = int(str(state["global_step"]))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder / STATE}: has no global_step ({error}); copy the whole folder"
        ) from None
    path = folder / OPTIMIZER
    if not path.is_file():
        raise CheckpointError(
            f"{path}: is missing, and with it the moments; save without save_only_model, or start "
            "from the weights alone: parallel3d.model.from_pretrained"
        )
    for file in weight_files(folder):
        for stored in stored_tensors(file):
            if stored.type not in DTYPES:
                raise CheckpointError(f"{file}: {stored.name} has the type {stored.type}; use fp32")
            own = Stored(stored.path, stored.at, stored.shape, DTYPES[stored.type])
            source.add("master", stored.name, whole(own))
    optimizer = load(path)
    groups = optimizer["param_groups"]
    for own_state in optimizer["state"].values():
        check_adamw(own_state, path)
    ids = OfIds(groups, optimizer["state"], path)
    names = ids.names(order)
    steps = None
    for of_group, numbers in zip(names, ids.ids, strict=True):
        for name, key in zip(of_group, numbers, strict=True):
            own_state = optimizer["state"][key]
            steps = own_state.get("step", steps)
            for kind in ("exp_avg", "exp_avg_sq"):
                source.add(kind, name, whole(own_state[kind]))
    source.take_steps(steps)
    source.take_groups(groups, names)
    return source
