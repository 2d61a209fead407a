"""Evaluation of a checkpoint on any mesh, by the trainer's own code."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

from rich.console import Console

from parallel3d.base.errors import CheckpointError, ConfigError
from parallel3d.checkpoint import find
from parallel3d.checkpoint.load import load_weights
from parallel3d.checkpoint.manifest import TOKENIZER
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.data.corpus import Corpus
from parallel3d.data.split import SPLIT_FORMAT
from parallel3d.engine import Engine, EngineSettings, ForwardEngine, forward_settings
from parallel3d.mesh.agree import on_first
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.pipeline.executor import Executor
from parallel3d.schedule.schedules import make_evaluation
from parallel3d.train.assembly import build, hidden_shape
from parallel3d.train.evaluation import Evaluation, Losses, evaluation_corpora
from parallel3d.train.feed import Feed
from parallel3d.train.start import begin, open_corpus
from parallel3d.train.stopping import StopRequest


def evaluate(
    config: RunConfig, mesh: Mesh, checkpoint: Path, stop: StopRequest, console: Console
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
        evaluator = Executor(
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
    folder, state = source.folder, source.state
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
