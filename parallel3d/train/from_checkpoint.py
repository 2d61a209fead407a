"""Work from a checkpoint of an earlier run, on any mesh: evaluate it, or train its steps again.

A replay names the first tensor in which two of them differ. It has a folder in the run's,
replays/PPxDPxTP, with its metrics and digests, and with the norms of each layer's output and of the
output's gradient in the last step, by microbatch. A microbatch has the same samples on every mesh,
because its size stays.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor, nn

from parallel3d.base import reader
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.base.mesh_sizes import MeshSizes
from parallel3d.checkpoint import find
from parallel3d.checkpoint.load import load_weights
from parallel3d.checkpoint.manifest import STATE, TOKENIZER, read_state, step_folders
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.checkpoint.state import RunState
from parallel3d.config import ResolvedConfig, RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.data.corpus import Corpus
from parallel3d.data.split import SPLIT_FORMAT
from parallel3d.engine import Engine, EngineSettings, ForwardEngine, forward_settings
from parallel3d.mesh.agree import gather_json, on_first
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.config import ModelConfig
from parallel3d.pipeline.executor import Evaluator
from parallel3d.schedule.schedules import make_evaluation
from parallel3d.train.assembly import Assembly, assemble, build, hidden_shape
from parallel3d.train.digests import BOUNDS, compare_runs, is_close
from parallel3d.train.ending import StopRequest
from parallel3d.train.evaluation import Evaluation, Losses, evaluation_corpora
from parallel3d.train.feed import Feed
from parallel3d.train.metrics import MetricsWriter, step_reached
from parallel3d.train.observers import observed_trainer
from parallel3d.train.start import Start, begin, open_corpus, restore

_MESH = "parallel3d.mesh"


def evaluation_config(
    checkpoint: Path,
    launch: Launch,
    *,
    file: str | None = None,
    overrides: Sequence[str] = (),
    samples: int | None = None,
) -> RunConfig:
    """Return the unresolved config for evaluating a checkpoint.

    It is the config of the checkpoint's run, or `file` if given, with `overrides` applied;
    `samples` replaces train.evaluate_samples. On one process the mesh is 1 x 1 x 1. With the run's
    own config dp takes the ranks that the other axes leave. Raises ConfigError for a wrong setting,
    and if the model differs from the trained one.
    """
    own_config = read_state(checkpoint).get("config")
    if not isinstance(own_config, dict):
        raise CheckpointError(f"{checkpoint / STATE}: has no config; use another checkpoint")
    raw = reader.read(reader.find(file)) if file else json.loads(json.dumps(own_config))
    _place(raw, launch.world_size, is_own_config=file is None)
    apply_overrides(raw, overrides)
    if samples is not None:
        reader.set_values(raw, [("parallel3d.train.evaluate_samples", str(samples))])
    config = RunConfig.from_dict(raw, file or str(checkpoint / STATE))
    trained = RunConfig.from_dict(own_config, str(checkpoint / STATE))
    for name, there, here in _differing(trained.model, config.model):
        raise ConfigError(
            f"parallel3d.model.{name} = {json.dumps(here)}: {checkpoint} was trained with "
            f"{json.dumps(there)}; use the model as it was trained, or leave out --config"
        )
    return config


def _place(raw: dict[str, Any], world_size: int, is_own_config: bool) -> None:
    """Set the mesh of `raw` for `world_size` ranks."""
    mesh = reader.block_at(raw, _MESH)
    block = reader.block_at(raw, "parallel3d")
    if not mesh:  # "plan", or invalid, which is reported later
        return
    if world_size == 1:
        block["mesh"] = mesh | {"pp": 1, "dp": "auto", "cp": 1, "tp": 1, "ep": 1}
        # On one rank the schedule and the stages do not change the numbers.
        block["pipeline"] = reader.block_at(raw, "parallel3d.pipeline") | {
            "schedule": "gpipe",
            "stages_per_rank": 1,
        }
    elif is_own_config:
        block["mesh"] = mesh | {"dp": "auto"}
    train = block.get("train")
    if isinstance(train, dict):  # an evaluation has one batch size
        train |= {"batch_schedule": [], "batch_lr": "none"}
    batch_sizes = [
        raw.get(n) for n in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ]
    is_auto = reader.block_at(raw, _MESH).get("dp") == "auto"
    if is_auto and all(isinstance(number, int) for number in batch_sizes):
        raw.pop("train_batch_size", None)  # it may belong to another dp


def _differing(
    trained: ModelConfig, evaluated: ModelConfig
) -> Iterator[tuple[str, object, object]]:
    """Yield each differing model setting that can change results: name, trained, evaluated."""
    trained_values = trained.model_dump(mode="json")
    evaluated_values = evaluated.model_dump(mode="json")
    for name in evaluated_values if trained.family == evaluated.family else ("family",):
        # Initialisation and dropout affect training only; the corpus decides what "auto" means.
        is_trainings = name in ("from_pretrained", "initializer_range") or name.endswith("_pdrop")
        if not is_trainings and evaluated_values[name] not in (trained_values[name], "auto"):
            yield name, trained_values[name], evaluated_values[name]


def evaluate(
    config: ResolvedConfig, mesh: Mesh, checkpoint: Path, stop: StopRequest, console: Console
) -> Losses | None:
    """Return the loss of each evaluation set for a checkpoint's weights; collective.

    Returns None after a request to stop. Nothing is written to the checkpoint's run. Raises
    ConfigError if there is nothing to evaluate, CheckpointError if the checkpoint cannot be used.
    """
    begin(config, mesh, console)
    corpus = open_corpus(config, mesh, find_nodes(mesh), console)
    if not evaluation_corpora(corpus):
        raise ConfigError(
            "there is nothing to evaluate: no held-out text (parallel3d.data.held_out_fraction = "
            "0) and no validation set; add one: "
            '--data.validation \'{"mine": {"source": "text", "paths": '
            '["mine/*.txt"]}}\''
        )
    config = config.with_corpus(corpus.vocab_size, len(corpus.train))
    pulse.doing("comparing the checkpoint's hashes")
    folder = Path(on_first(mesh, lambda: str(checkpoint)))
    try:
        source = find.verify_on_all_ranks(folder, mesh)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} {error}; use another checkpoint") from None
    refuse_other_text(source, corpus, console.print)
    pulse.doing("building the model")
    settings = forward_settings(EngineSettings.from_config(config))
    layers, shape, schedule, stages = build(config, mesh, settings, seed=None)
    pulse.doing("reading the weights")
    load_weights(source, stages.held, mesh, layers=layers)
    console.print(f"weights of {source.folder}")
    with (
        closing(ForwardEngine(stages.module, settings, mesh)) as engine,
        closing(Feed(config, mesh, corpus, schedule)) as feed,
    ):
        evaluator = Evaluator(
            make_evaluation(schedule),
            mesh,
            cast(Engine, engine),  # enough for a program without backwards
            key=stages.key,
            hidden_shape=hidden_shape(config.mesh, shape, config.model.hidden_size),
        )
        stop.hold(None)
        evaluation = Evaluation(
            config, mesh, corpus=corpus, feed=feed, evaluator=evaluator, stop=stop
        )
        return evaluation.run()


def refuse_other_text(
    source: find.FoundCheckpoint, corpus: Corpus, say: Callable[[str], None]
) -> None:
    """Raise CheckpointError if the tokenizer or the rule of the split is not the checkpoint's.

    Warns by `say` if the corpus is another one.
    """
    folder = source.folder
    state = source.state
    if state["tokenizer"] != tokenizer_digest(corpus.tokenizer_directory):
        own = folder / TOKENIZER
        remedy = f"add --data.tokenizer {own}" if own.is_dir() else "use its data.tokenizer"
        raise CheckpointError(
            f"{folder} was trained with another tokenizer, so its token ids mean something else; "
            f"{remedy}"
        )
    if state.get("split", 1) != SPLIT_FORMAT and len(corpus.held_out):
        raise CheckpointError(
            f"{folder} was written by a version of parallel3d that held out other documents, so it "
            "was trained on text that is held out now; add --data.held_out_fraction 0, and "
            "evaluate validation sets"
        )
    if state["corpus"] != corpus.key:
        say(
            "WARNING: the corpus has changed since the checkpoint was trained; it may have been "
            "trained on text that is held out now"
        )


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
        block["mesh"] |= mesh._asdict() | {"ep": gcd(mesh.dp, block["mesh"].get("ep", 1))}
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
    source = find.verify_on_all_ranks(checkpoint, mesh)
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

    def compare() -> dict[str, object]:
        names = [layer.name for layer in parts.layers]
        stages = parts.stages.layers_of_stage
        first = None
        for path in sorted(run.glob(f"replays/*/step-{step}.json")):
            other_bound = 0.0 if path.parent == folder and is_exact else BOUNDS[config.precision]
            other = json.loads(path.read_text())
            place = first_difference(norms, other, other_bound)
            if place and first is None:
                kind, microbatch, layer = place.split()
                stage = next(s for s, layers in enumerate(stages) if int(layer) in layers)
                first = {
                    "stage": stage,
                    "layer": names[int(layer)],
                    "microbatch": int(microbatch),
                    "tensor": kind,
                    "norms": [norms.get(place), other.get(place)],
                    "replay": path.parent.name,
                }
        replace_text(folder / f"step-{step}.json", json.dumps(norms))
        difference = compare_runs(run, folder, bound)
        same = difference["same"] and first is None
        return difference | {"same": same, "bound": bound, "first_tensor": first}

    comparison: dict[str, object] = on_first(mesh, compare)
    parts.engine.close()
    return comparison


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
