"""Read a DeepSpeed checkpoint at ZeRO 0 to 3, of its pipeline engine, or in its universal format.

The layout of the files is that of deepspeed 0.19 (`runtime/engine.py`, `runtime/zero`,
`runtime/bf16_optimizer.py`, `runtime/pipe/module.py`, `checkpoint/ds_to_universal.py`); older
versions with `param_slice_mappings` (0.7 and later) have the same keys.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from parallel3d.base.errors import CheckpointError
from parallel3d.extras.foreign.checkpoints.ids import OfIds
from parallel3d.extras.foreign.checkpoints.pickles import Inert, Stored, load
from parallel3d.extras.foreign.checkpoints.source import Source, check_adamw
from parallel3d.extras.foreign.checkpoints.tensors import (
    FROM_WEIGHTS,
    KINDS,
    FlatPiece,
    ForeignTensor,
    whole,
)

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt|layer_(\d+)-model_states\.pt")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_FP32 = "single_partition_of_fp32_groups"


def find_folder(path: Path) -> Path | None:
    """Return the folder of a checkpoint's files: `path`, or the one that `latest` names; or None.

    Raises CheckpointError if `latest` names a folder that is not there.
    """
    if not path.is_dir():
        return None
    if any(_MODEL_FILE.fullmatch(file.name) for file in path.iterdir()):
        return path
    for name in ("latest", "latest_universal"):
        if (path / name).is_file():
            folder = path / (path / name).read_text().strip()
            if folder.is_dir():
                return folder
            raise CheckpointError(f"{path / name}: names {folder}, which is missing; copy it, too")
    return None


def open_deepspeed(folder: Path) -> Source:
    """Return the run in a folder with DeepSpeed's files; raises CheckpointError."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    models: dict[int, dict[int, Path]] = defaultdict(dict)
    optimizers: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in files:
        if match := _MODEL_FILE.fullmatch(path.name):
            models[int(match[2])][int(match[1] or 0)] = path
        elif match := _OPTIMIZER_FILE.fullmatch(path.name):
            optimizers[int(match[2])][int(match[1])] = path
        elif "expp_rank" in path.name or re.match(r"layer_\d+_expert_", path.name):
            raise CheckpointError(
                f"{path}: experts that are divided over ranks cannot be read; {FROM_WEIGHTS}"
            )
    if not models:
        raise CheckpointError(
            f"{folder}: mp_rank_00_model_states.pt is missing; copy the whole folder"
        )
    paths = {rank: models[rank][min(models[rank])] for rank in sorted(models)}
    first = load(paths[min(paths)])
    source = Source(folder, "DeepSpeed")
    _take_counters(source, first)
    if (folder / "zero").is_dir():
        _read_universal(source, folder / "zero")
        return source
    _check_ranks(folder, first, models)
    layers = _Layers(folder)
    for rank, path in paths.items():
        model = first if rank == min(paths) else load(path)
        if rank in optimizers:
            _read_sharded(source, model, path, optimizers[rank])
        elif any(optimizers.values()):
            raise CheckpointError(
                f"{folder}: has no optimizer's file of mp_rank_{rank:02}; copy it"
            )
        else:
            _read_unsharded(source, model, path, layers)
    return source


def _take_counters(source: Source, model: Mapping[str, Any]) -> None:
    """Note the steps, samples and batch of a file of model states.

    Raises CheckpointError if its config names another optimizer.
    """
    if "global_steps" in model:
        source.step = int(model["global_steps"])
    if "global_samples" in model:
        source.samples = int(model["global_samples"])
    settings = model.get("ds_config")
    if not isinstance(settings, dict):
        return
    batch = settings.get("train_batch_size")
    if isinstance(batch, int):
        source.batch = batch
    optimizer = dict(settings.get("optimizer") or {}).get("type")
    # LAMB keeps what Adam keeps, so its state does not show it.
    if isinstance(optimizer, str) and optimizer.lower() not in ("adam", "adamw"):
        raise CheckpointError(
            f"{source.folder}: was trained with {optimizer}, whose state is not AdamW's; continue "
            "a run of AdamW or Adam"
        )


def _check_ranks(folder: Path, model: Mapping[str, Any], models: Mapping[int, object]) -> None:
    """Raise CheckpointError if model-parallel ranks are missing, or cut parameters."""
    size = int(model.get("mp_world_size") or 1)
    dims = model.get("checkpoint_parallel_dimensions") or {}
    tensor = int(dims.get("tp_degree") or 1)
    if "pp_degree" not in dims and size > 1 and model.get("module") is not None:
        tensor = size  # without a pipeline
    if tensor > 1:
        raise CheckpointError(
            f"{folder}: {tensor} tensor-parallel ranks cut its parameters; convert it with "
            "DeepSpeed's ds_to_universal, and name the new folder"
        )
    missing = sorted(set(range(size)) - set(models))
    if missing:
        raise CheckpointError(
            f"{folder}: mp_rank_{missing[0]:02}_model_states.pt is missing ({size} ranks have "
            "saved); copy the whole folder"
        )


def _read_sharded(
    source: Source, model: Mapping[str, Any], model_path: Path, paths: Mapping[int, Path]
) -> None:
    """Add the tensors of the data-parallel ranks' files, at ZeRO 1 to 3."""
    shapes = _shapes(model, model_path)
    own: dict[int, Mapping[str, Any]] = {}
    size = 1
    for rank in sorted(paths):
        state = load(paths[rank])["optimizer_state_dict"]
        count = state["partition_count"]
        size = max(size, *(count if isinstance(count, list) else [count]))
        own[rank] = state
    for rank in range(size):
        if rank not in own:
            name = next(iter(paths.values())).name
            lost = re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", name)
            raise CheckpointError(
                f"{source.folder}: {lost} is missing ({size} ranks have saved); copy the whole "
                "folder"
            )
    pieces: dict[str, dict[str, list[FlatPiece]]] = defaultdict(lambda: defaultdict(list))
    of_groups: list[list[str]] = []
    for rank, state in own.items():
        path = paths[rank]
        is_zero3 = "fp32_flat_groups" in state
        masters = state["fp32_flat_groups" if is_zero3 else _FP32]
        base = state["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]
        moments = base if isinstance(base, list) else base["state"]
        groups = [] if isinstance(base, list) else base["param_groups"]
        slices = _zero3_slices(shapes, size, rank, masters) if is_zero3 else _slices(state, path)
        of_groups = [list(of_group) for of_group in shapes]
        for index, of_group in enumerate(slices):
            own_state = _state_of(moments, index, path)
            flats = {"master": masters[index]} | {
                k: own_state[k] for k in ("exp_avg", "exp_avg_sq")
            }
            for name, (numel, start) in of_group.items():
                for kind, flat in flats.items():
                    before = pieces[kind][name]
                    at = sum(piece.numel for piece in before)
                    before.append(FlatPiece(flat, start, numel, at))
            group = groups[index] if index < len(groups) else {}
            source.take_steps(own_state.get("step", group.get("step")))
        source.take_groups(groups, of_groups)
        _take_scale(source, state)
    of_name = {name: shape for of_group in shapes for name, shape in of_group.items()}
    for kind, by_name in pieces.items():
        for name, parts in by_name.items():
            dtype = parts[0].stored.dtype
            tensor = ForeignTensor(str(source.folder), of_name[name], dtype, parts)
            source.add(kind, name, tensor)


def _state_of(moments: Any, index: int, path: Path) -> Mapping[str, Any]:
    """Return the optimizer's state of a flat group; raises CheckpointError."""
    try:
        state: Mapping[str, Any] = moments[index]
    except (KeyError, IndexError):
        raise CheckpointError(
            f"{path}: has no moments of group {index}; use a checkpoint after the first step"
        ) from None
    check_adamw(state, path)
    return state


def _shapes(model: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the parameters by name, group by group."""
    shapes = model.get("param_shapes")
    if not isinstance(shapes, list | dict):
        raise CheckpointError(
            f"{path}: has no param_shapes; save the checkpoint with DeepSpeed 0.7 or later"
        )
    groups = [shapes] if isinstance(shapes, dict) else shapes
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _slices(state: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, int]]]:
    """Return by group and name the (elements, first element) in a rank's flat partition."""
    mappings = state.get("param_slice_mappings")
    if mappings is None:
        raise CheckpointError(
            f"{path}: has no param_slice_mappings; save the checkpoint with DeepSpeed 0.7 or later"
        )
    slices = []
    for mapping in mappings:
        of_group = {}
        for name, address in mapping.items():
            assert isinstance(address, Inert), address
            of_group[name] = (int(address.state["numel"]), int(address.state["start"]))
        slices.append(of_group)
    return slices


def _zero3_slices(
    shapes: Sequence[Mapping[str, Sequence[int]]], size: int, rank: int, masters: Sequence[Stored]
) -> list[dict[str, tuple[int, int]]]:
    """Return what `_slices` returns, at ZeRO 3: each parameter is divided evenly, with padding.

    A group's parameters follow each other in its flat partitions, of which it may have several.
    """
    slices: list[dict[str, tuple[int, int]]] = [{} for _ in masters]
    flat = 0
    start = 0
    for name, shape in (pair for group in shapes for pair in group.items()):
        numel = prod(shape)
        part = -(-numel // size)
        while flat < len(masters) - 1 and start + part > prod(masters[flat].shape):
            flat += 1
            start = 0
        own = max(0, min(part, numel - part * rank))
        slices[flat][name] = (own, start)
        start += part
    return slices


def _take_scale(source: Source, state: Mapping[str, Any]) -> None:
    """Note the state of fp16's dynamic loss scale."""
    scaler = state.get("loss_scaler")
    if isinstance(scaler, Inert) and all(name in scaler.state for name in _SCALE):
        source.loss_scale = {name: scaler.state[name] for name in _SCALE}


def _read_unsharded(
    source: Source, model: Mapping[str, Any], path: Path, layers: "_Layers"
) -> None:
    """Add the tensors of a file without ZeRO: whole weights and states by number."""
    state = model.get("optimizer")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: has no state of the optimizer, and no files *_optim_states.pt are beside it; "
            "copy the whole folder"
        )
    inner = state.get("optimizer_state_dict", state)
    ids = OfIds(inner["param_groups"], inner["state"], path)
    weights = _weights(model)
    if weights is None:
        weights = layers.of_next_stage(ids)
    flats = state.get("fp32_groups_flat")
    names = [[*weights]]
    if flats is None:
        names = ids.names({name: tensor.shape for name, tensor in weights.items()})
    elif len(flats) > 1:
        raise CheckpointError(
            f"{path}: fp16 without ZeRO has {len(flats)} groups, whose order it does not say; "
            "save it at ZeRO stage 1"
        )
    masters = state.get("fp32_groups")
    steps = None
    for index, of_group in enumerate(names):
        start = 0
        for position, name in enumerate(of_group):
            shape = weights[name].shape
            of_param = _state_of(inner["state"], ids.ids[index][0 if flats else position], path)
            steps = of_param.get("step", inner["param_groups"][index].get("step"))
            if flats:
                piece = {"master": flats[index], **of_param}
                for kind in KINDS:
                    parts = (FlatPiece(piece[kind], start, prod(shape)),)
                    dtype = piece[kind].dtype
                    source.add(kind, name, ForeignTensor(str(path), shape, dtype, parts))
                start += prod(shape)
                continue
            master = whole(masters[index][position]) if masters else weights[name]
            source.add("master", name, master)
            for kind in ("exp_avg", "exp_avg_sq"):
                source.add(kind, name, whole(of_param[kind]))
    source.take_steps(steps)
    source.take_groups(inner["param_groups"], names)


def _weights(model: Mapping[str, Any]) -> dict[str, ForeignTensor] | None:
    """Return the weights by name, in the module's order; None for a pipeline's stage."""
    module = model.get("module")
    if not isinstance(module, dict):
        return None
    buffers = set(model.get("buffer_names") or ())
    shared = model.get("shared_params") or {}
    weights = {}
    seen = set()
    for name, value in module.items():
        if isinstance(value, Stored) and name not in buffers and name not in shared:
            if value.at not in seen:  # a tied weight has one place, and counts once
                weights[name] = whole(value)
            seen.add(value.at)
    return weights


class _Layers:
    """The weights in a pipeline's files of layers, which the stages take in their order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left: dict[str, ForeignTensor] | None = None
        self._first: dict[str, ForeignTensor] = {}

    def of_next_stage(self, ids: OfIds) -> dict[str, ForeignTensor]:
        """Return the weights of the next stage, in the order of its optimizer.

        A later stage may begin with the tied weights of the first layer. Raises CheckpointError.
        """
        if self._left is None:
            self._left = dict(self._weights())
            number = next(iter(self._left), "").partition(".")[0]
            self._first = {n: t for n, t in self._left.items() if n.startswith(f"{number}.")}
        count = sum(map(len, ids.ids))
        for tied in ({}, self._first):
            names = list(self._left)[: max(0, count - len(tied))]
            weights = tied | {name: self._left[name] for name in names}
            shapes = {name: weight.shape for name, weight in weights.items()}
            if ids.fit(shapes):
                self._left = {n: t for n, t in self._left.items() if n not in names}
                return weights
        raise CheckpointError(
            f"{self._folder}: its files layer_* do not fit its optimizer's {count} parameters; "
            "copy the whole folder, or save it at ZeRO stage 1"
        )

    def _weights(self) -> Iterator[tuple[str, ForeignTensor]]:
        for path in sorted(self._folder.iterdir()):
            match = _LAYER_FILE.fullmatch(path.name)
            if match:
                layer = int(match[1] or match[3])
                for name, value in load(path).items():
                    if isinstance(value, Stored):
                        yield f"{layer}.{name}", whole(value)


def _read_universal(source: Source, zero: Path) -> None:
    """Add the tensors of the universal format: a folder for each parameter."""
    for folder in sorted(path for path in zero.iterdir() if path.is_dir()):
        for kind, file in (
            ("master", "fp32"),
            ("exp_avg", "exp_avg"),
            ("exp_avg_sq", "exp_avg_sq"),
        ):
            path = folder / f"{file}.pt"
            stored = load(path)
            if isinstance(stored, dict):
                stored = stored["param"]
            source.add(kind, folder.name, whole(stored))
        if (folder / "step.pt").is_file() and source.optimizer_steps is None:
            steps = load(folder / "step.pt")
            source.take_steps(steps["param"] if isinstance(steps, dict) else steps)
