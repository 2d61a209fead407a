"""Train steps of an earlier run again, on any mesh, and name the first tensor that differs.

A replay has a folder in the run's, replays/PPxDPxTP, with its metrics and digests, and with the
norms of each layer's output and of the output's gradient in the last step, by microbatch. A
microbatch has the same samples on every mesh, because its size stays.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import CheckpointError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.base.reader import JsonObject
from parallel3d.checkpoint.manifest import read_state, step_folders
from parallel3d.checkpoint.on_disk import verify_on_all_ranks
from parallel3d.checkpoint.state import RunState
from parallel3d.config import ResolvedConfig, RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.mesh.agree import gather_json, on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.train.assembly import Assembly, assemble
from parallel3d.train.digests import BOUNDS, compare_runs, is_close
from parallel3d.train.metrics import MetricsWriter, step_reached
from parallel3d.train.observers import observed_trainer
from parallel3d.train.open_corpus import open_corpus
from parallel3d.train.start import Start, begin, restore

Norms = dict[str, float]
"""Norms of tensors by their places, "kind microbatch layer"."""


def replay_config(
    run: Path, step: int, mesh: MeshSizes | None, overrides: Sequence[str]
) -> tuple[RunConfig, Path]:
    """Return the config that trains a run up to `step` again, and the checkpoint before that.

    `mesh`: None means the run's own. Raises CheckpointError if the run has
    not trained the step, or has no checkpoint before it.
    """
    reached = step_reached(run)
    if step > reached:
        raise CheckpointError(f"--step {step}: {run} has {reached} steps; use one of them")
    older = [path for number, path in step_folders(run / "checkpoints") if number < step]
    if not older:
        raise CheckpointError(
            f"--step {step}: {run} has no checkpoint before it (checkpoint.keep, checkpoint.at); "
            "use a step after one of its checkpoints"
        )
    raw = read_state(older[0])["config"]
    block = raw["parallel3d"]
    if mesh and mesh.pp == 1 != block["mesh"]["pp"]:
        block["pipeline"] |= {"schedule": "gpipe", "stages_per_rank": 1}
    if mesh:
        block["mesh"] |= mesh._asdict()
        for name in block["mesh"].keys() & {"ep", "dp_shards"}:
            block["mesh"][name] = gcd(mesh.dp, block["mesh"][name])
    block["train"] |= {"stop_after": step, "evaluate_every": 0}
    block["run"] |= {"trackers": []}
    raw.pop("gradient_accumulation_steps", None)  # follows from the batch and dp
    apply_overrides(raw, overrides)
    return RunConfig.from_dict(raw, str(older[0])), older[0]


def replay(
    config: ResolvedConfig, mesh: Mesh, run: Path, checkpoint: Path, console: Console
) -> dict[str, Any]:
    """Train from a checkpoint to `train.stop_after` and compare with the run; collective.

    Return the keys of `compare_runs`, the `bound` (0 if every bit must be the same), and
    `first_tensor`, the first one in which another replay of the step differs.
    """
    begin(config, mesh, console)
    corpus = open_corpus(config, mesh, find_nodes(mesh), console)
    config = config.with_corpus(corpus.vocab_size, len(corpus.train))
    source = verify_on_all_ranks(checkpoint, mesh)
    state = RunState(config, corpus)
    position = state.position_in(source.state, source.folder, console.print)
    is_exact = mesh.device.type == "cpu" or config.train.deterministic
    is_same_mesh = is_exact and state.at(position)["mesh"] == source.state["mesh"]
    bound = 0.0 if is_same_mesh else BOUNDS[config.precision]
    folder = run / "replays" / str(config.mesh.sizes)
    parts = assemble(config, mesh, say=console.print)
    start = Start(
        config=config,
        settings={},
        folder=folder,
        digest="",
        corpus=corpus,
        checkpoint=source,
        position=position,
    )
    restore(start, mesh, parts)
    step = int(config.train.stop_after or 0)
    trace = _Trace(parts, mesh, step)
    writer = MetricsWriter(folder) if mesh.rank == 0 else None
    if writer:
        writer.rewind(0)  # the lines of an earlier replay
    observed_trainer(start, mesh, parts, writer=writer).run()
    norms = trace.gather(config.mesh.sequence_parallel)

    def compare() -> JsonObject:
        first = None
        for path in sorted(run.glob(f"replays/*/step-{step}.json")):
            other_bound = 0.0 if path.parent == folder and is_exact else BOUNDS[config.precision]
            other = json.loads(path.read_text())
            place = first_difference(norms, other, other_bound)
            if place and first is None:
                first = _place_in_words(place, parts)
                first["norms"] = [norms.get(place), other.get(place)]
                first["replay"] = path.parent.name
        replace_text(folder / f"step-{step}.json", json.dumps(norms))
        difference = compare_runs(run, folder, bound)
        same = difference["same"] and first is None
        return difference | {"same": same, "bound": bound, "first_tensor": first}

    comparison: JsonObject = on_first(mesh, compare)
    parts.engine.close()
    return comparison


def _place_in_words(place: str, parts: Assembly) -> dict[str, Any]:
    """Return stage, layer, microbatch and kind of the tensor at a place of `Norms`."""
    kind, microbatch, layer = place.split()
    index = int(layer)
    stages = parts.stages.layers_of_stage
    return {
        "stage": next(stage for stage, layers in enumerate(stages) if index in layers),
        "layer": parts.layers[index].name,
        "microbatch": int(microbatch),
        "tensor": kind,
    }


class _Trace:
    """Notes the norms of layers' outputs and their gradients in one step of training."""

    def __init__(self, parts: Assembly, mesh: Mesh, step: int) -> None:
        self._key = parts.stages.key
        self._mesh = mesh
        self._step = step
        self._executor = parts.executor
        self._squares: dict[str, Tensor] = {}
        for stage, layers in parts.stages.module.layers.items():
            for index, layer in zip(parts.stages.layers_of_stage[stage], layers, strict=True):
                layer.register_forward_hook(partial(self._note_output, index))

    def _note_output(self, layer: int, _: nn.Module, __: object, output: Tensor) -> None:
        if self._key.step == self._step - 1 and torch.is_grad_enabled():
            place = f"{self._executor.batch[self._key.microbatch].number} {layer}"
            self._note(f"output {place}", output)
            output.register_hook(partial(self._note, f"gradient {place}"))

    def _note(self, name: str, tensor: Tensor) -> None:
        # A dp rank divides by its own microbatches; the engine later averages over dp.
        scale = self._mesh.replicas.size if name.startswith("gradient") else 1
        self._squares[name] = (tensor.detach().double() / scale).square().sum()

    def gather(self, sums_over_tp: bool) -> Norms:
        """Return the norms of all ranks; with sequence parallelism tp ranks have parts."""
        own = {name: float(square) for name, square in self._squares.items()}
        squares: Norms = {}
        for of_rank in gather_json(self._mesh, own):
            for name, square in of_rank.items():
                if sums_over_tp and name in squares:
                    square += squares[name]
                squares[name] = square
        return {name: square**0.5 for name, square in squares.items()}


def first_difference(norms: Mapping[str, float], other: Mapping[str, float], bound: float) -> str:
    """Return the place of the first norm, in the order of computation, that differs; "" if none.

    Outputs come first, microbatch by microbatch, then gradients from the last layer back.
    """

    def order(place: str) -> tuple[bool, int, int]:
        kind, microbatch, layer = place.split()
        is_gradient = kind == "gradient"
        return is_gradient, int(microbatch), -int(layer) if is_gradient else int(layer)

    places = sorted(norms, key=order)
    return next((p for p in places if not is_close(norms[p], other.get(p), bound)), "")
