"""Read a torch distributed checkpoint (DCP): FSDP2, torchtitan, accelerate, or plain torch.

A folder has `.metadata`, which names the file, the offset and the box of each piece of a tensor,
and files `*.distcp`, in which each piece is what `torch.save` writes
(`torch.distributed.checkpoint.filesystem`, torch 2.4 and later).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import Box
from parallel3d.extras.foreign.checkpoints.ids import OfIds
from parallel3d.extras.foreign.checkpoints.pickles import load_bytes, load_metadata
from parallel3d.extras.foreign.checkpoints.source import Source, check_adamw
from parallel3d.extras.foreign.checkpoints.tensors import BoxPiece, ForeignTensor, number

METADATA = ".metadata"
_STATE = re.compile(r"(.*?)(?:^|\.)state\.(.+)\.(\w+)")
_GROUP = re.compile(r"(?:.*?)(?:^|\.)param_groups\.(.+)\.(\w+)")
_STEPS = ("step", "global_step", "train_state.step", "trainer.global_step")
_IN_GROUP = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
)


class Folder:
    """The entries of one folder: tensors, and other values by key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        index = load_metadata(path / METADATA).state
        self._pieces: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        for key, info in index["storage_data"].items():
            self._pieces[key.state["fqn"]].append((key.state, info.state))
        self.tensors: dict[str, ForeignTensor] = {}
        self.others: list[str] = []
        for name, entry in index["state_dict_metadata"].items():
            if "size" in entry.state:
                self.tensors[name] = self._tensor(name, entry.state)
            else:
                self.others.append(name)

    def value(self, name: str) -> Any:
        """Return a value that is not a tensor, or a tensor of one element."""
        if name in self.tensors:
            return number(self.tensors[name].read())
        return self._load(name, self._pieces[name][0][1])

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> ForeignTensor:
        properties = entry["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        shapes = {tuple(c.state["offsets"]): tuple(c.state["sizes"]) for c in entry["chunks"]}
        pieces = []
        for key, info in self._pieces[name]:
            offsets = tuple(key["offset"] or (0,) * len(entry["size"]))
            box = Box(offsets, shapes[offsets])
            pieces.append(BoxPiece(box, partial(self._read, name, info)))
        return ForeignTensor(str(self.path), tuple(entry["size"]), dtype, pieces)

    def _read(self, name: str, info: Mapping[str, Any]) -> Tensor:
        value = self._load(name, info)
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{self.path}: {name} is no tensor; save the checkpoint again")
        return value.detach()

    def _load(self, name: str, info: Mapping[str, Any]) -> Any:
        """Return one piece of a file; raises CheckpointError."""
        relative = str(info["relative_path"])
        path = self.path / relative
        if Path(relative).name != relative:
            raise CheckpointError(f"{self.path / METADATA}: names {relative!r}, outside the folder")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: is compressed or encrypted ({info['transform_descriptors']}); save it "
                "without extensions"
            )
        try:
            with open(path, "rb") as file:
                file.seek(info["offset"])
                data = file.read(info["length"])
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing; copy the whole folder") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) < info["length"]:
            raise CheckpointError(f"{path}: ends before {name}; copy it again")
        return load_bytes(data, f"{path}: {name}")


def find_folders(path: Path) -> list[Path]:
    """Return the folders with a checkpoint's entries; [] if there are none.

    accelerate writes the model and the optimizer to two folders, beside each other.
    """
    if (path / METADATA).is_file():
        return [path]
    if not path.is_dir():
        return []
    return sorted(inner.parent for inner in path.glob(f"*/{METADATA}"))


_State = dict[str, dict[str, ForeignTensor]]
"""The state of the optimizer, by parameter (its name or number) and key."""


def open_dcp(folders: Iterable[Path], order: Mapping[str, tuple[int, ...]]) -> Source:
    """Return the run in folders of a torch distributed checkpoint; raises CheckpointError.

    - `order`: the shapes of the model's parameters by transformers' names, in its order.
    """
    opened = [Folder(path) for path in folders]
    first = opened[0].path
    source = Source(first if len(opened) == 1 else first.parent, "torch")
    tensors: dict[str, ForeignTensor] = {}
    for folder in opened:
        if both := tensors.keys() & folder.tensors.keys():
            raise CheckpointError(
                f"{source.folder}: {folder.path.name} is not the only checkpoint there with "
                f"{min(both)}; name the folder of one step"
            )
        tensors |= folder.tensors
    of_other = {name: folder for folder in opened for name in folder.others}
    state = _find_state(tensors, source.folder)
    for name in _STEPS:
        holder = next((f for f in opened if name in f.tensors or name in f.others), None)
        if holder is not None:
            source.step = int(holder.value(name))
            break
    for name, tensor in tensors.items():
        if not _STATE.fullmatch(name) and name not in _STEPS:
            source.tensors["master"][name] = tensor
    groups, members = _groups(of_other)
    for kept in state.values():
        check_adamw(kept, source.folder)
    names = {name: name for name in state}
    if all(name.isdigit() for name in state):
        names = _named(state, members, order, source.folder)
        members = [[names[number] for number in of_group] for of_group in members]
    for own, kept in state.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            source.add(kind, names[own], kept[kind])
    counted = next(iter(state.values())).get("step")
    source.take_steps(counted and counted.read())
    source.take_groups(groups, members)
    return source


def _find_state(tensors: Mapping[str, ForeignTensor], folder: Path) -> _State:
    """Return the state of the optimizer; raises CheckpointError if there is none."""
    state: _State = defaultdict(dict)
    roots = set()
    for key, tensor in tensors.items():
        match = _STATE.fullmatch(key)
        if match:
            roots.add(match[1])
            state[match[2]][match[3]] = tensor
    if not state:
        raise CheckpointError(
            f"{folder}: has no moments: no entry is called ...state.NAME.exp_avg; save the "
            "optimizer beside the model, or name the folder that has both"
        )
    if len(roots) > 1:
        raise CheckpointError(
            f"{folder}: has several optimizers ({', '.join(sorted(roots))}); save one of them"
        )
    return state


def _groups(others: Mapping[str, Folder]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Return the optimizer's groups and the names or numbers of their parameters.

    Flat entries have each setting for each parameter; those of equal settings are one group.
    """
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    members: dict[str, list[str]] = {}
    for key, folder in others.items():
        match = _GROUP.fullmatch(key)
        if match and match[2] in _IN_GROUP:
            values[match[1]][match[2]] = folder.value(key)
        elif key.endswith("param_groups"):
            loaded = folder.value(key)
            return list(loaded), [list(map(str, group["params"])) for group in loaded]
        elif match and match[2] == "params":
            members[match[1]] = list(map(str, folder.value(key)))
    if members:
        names = sorted(members, key=int)
        return [values[name] for name in names], [members[name] for name in names]
    groups: list[dict[str, Any]] = []
    of_group: list[list[str]] = []
    for name, own in values.items():
        if own in groups:
            of_group[groups.index(own)].append(name)
        else:
            groups.append(own)
            of_group.append([name])
    return groups, of_group


def _named(
    state: _State, members: list[list[str]], order: Mapping[str, tuple[int, ...]], folder: Path
) -> dict[str, str]:
    """Return transformers' names by the optimizer's numbers."""
    members = members or [sorted(state, key=int)]
    of_ids = OfIds([{"params": of_group} for of_group in members], state, folder)
    return dict(zip(chain(*members), chain(*of_ids.names(order)), strict=True))
