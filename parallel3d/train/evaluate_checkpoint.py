"""Evaluate a checkpoint of an earlier run, on any mesh."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from parallel3d.base import reader
from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.base.say import Say
from parallel3d.checkpoint.load import load_weights
from parallel3d.checkpoint.manifest import STATE, TOKENIZER, read_state
from parallel3d.checkpoint.on_disk import verify_on_all_ranks
from parallel3d.checkpoint.places import FoundCheckpoint
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import CompleteConfig, ResolvedConfig, RunConfig
from parallel3d.config.normalise import apply_overrides
from parallel3d.data.corpus import Corpus
from parallel3d.data.prepare_progress import shown_progress
from parallel3d.data.sources import no_progress
from parallel3d.data.split import SPLIT_FORMAT
from parallel3d.engine import Engine, EngineSettings, ForwardEngine, forward_settings
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.launch import Launch
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.model.config import ModelConfig
from parallel3d.pipeline.executor import Evaluator
from parallel3d.schedule.schedule import Schedule
from parallel3d.schedule.schedules import make_evaluation
from parallel3d.train.assembly import build, hidden_shape
from parallel3d.train.ending import StopRequest
from parallel3d.train.evaluation import Evaluation, Losses, evaluation_corpora
from parallel3d.train.feed import Feed
from parallel3d.train.open_corpus import open_corpus
from parallel3d.train.start import begin

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
    any_dp = {"dp": "auto", "dp_shards": None}
    if world_size == 1:
        mesh = mesh | {"pp": 1, "cp": 1, "tp": 1, "ep": 1}
        block["mesh"] = mesh | any_dp
        # On one rank the schedule and the stages do not change the numbers.
        block["pipeline"] = reader.block_at(raw, "parallel3d.pipeline") | {
            "schedule": "gpipe",
            "stages_per_rank": 1,
        }
    elif is_own_config:
        block["mesh"] = mesh | any_dp
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
    complete = config.with_corpus(corpus.vocab_size, len(corpus.train))
    with (
        open_evaluator(complete, mesh, checkpoint, console, corpus) as (evaluator, schedule),
        closing(Feed(complete, mesh, corpus, schedule)) as feed,
        nullcontext(no_progress) if console.quiet else shown_progress() as progress,
    ):
        stop.hold(None)
        evaluation = Evaluation(
            complete,
            mesh,
            corpus=corpus,
            feed=feed,
            evaluator=evaluator,
            stop=stop,
            progress=progress,
        )
        return evaluation.run()


@contextmanager
def open_evaluator(
    config: CompleteConfig,
    mesh: Mesh,
    checkpoint: Path,
    console: Console,
    corpus: Corpus | None = None,
) -> Iterator[tuple[Evaluator, Schedule]]:
    """Yield an evaluator with a checkpoint's weights, and the schedule of its stages; collective.

    Raises CheckpointError if the checkpoint cannot be used, or is of another tokenizer than the
    corpus, if there is one.
    """
    pulse.doing("comparing the checkpoint's hashes")
    folder = Path(on_first(mesh, lambda: str(checkpoint)))
    try:
        source = verify_on_all_ranks(folder, mesh)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} {error}; use another checkpoint") from None
    if corpus is not None:
        refuse_other_text(source, corpus, console.print)
    pulse.doing("building the model")
    settings = forward_settings(EngineSettings.from_config(config))
    layers, shape, schedule, stages = build(config, mesh, settings, seed=None)
    pulse.doing("reading the weights")
    load_weights(source, stages.held, mesh, layers=layers)
    console.print(f"weights of {source.folder}")
    with closing(ForwardEngine(stages.module, settings, mesh)) as engine:
        evaluator = Evaluator(
            make_evaluation(schedule),
            mesh,
            cast(Engine, engine),  # enough for a program without backwards
            key=stages.key,
            hidden_shape=hidden_shape(config.mesh, shape, config.model.hidden_size),
        )
        yield evaluator, schedule


def refuse_other_text(source: FoundCheckpoint, corpus: Corpus, say: Say) -> None:
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
