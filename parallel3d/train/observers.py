"""The observers of a run, in the order in which all ranks call them."""

from collections.abc import Sequence

from parallel3d.checkpoint.save import Saver
from parallel3d.checkpoint.state import RunState
from parallel3d.mesh.mesh import Mesh
from parallel3d.train.assembly import Assembly
from parallel3d.train.bad_steps import BadSteps
from parallel3d.train.check_bits import CopyCheck
from parallel3d.train.digest_log import DigestLog
from parallel3d.train.ending import StopRequest
from parallel3d.train.evaluation import Evaluation
from parallel3d.train.feed import Feed
from parallel3d.train.gradient_noise import GradientNoise
from parallel3d.train.layer_history import LayerHistory
from parallel3d.train.metrics import MetricsWriter
from parallel3d.train.observer import Observer
from parallel3d.train.output import Output
from parallel3d.train.profiler import Profiler, StepWatch
from parallel3d.train.reporter import FirstStep, Reporter
from parallel3d.train.rewinding import Rewinder
from parallel3d.train.saving import Saving
from parallel3d.train.scheduled_evaluation import ScheduledEvaluation
from parallel3d.train.start import Start
from parallel3d.train.step_filter import StepFilter
from parallel3d.train.trainer import Trainer
from parallel3d.train.weight_average import WeightAverage


def observed_trainer(
    start: Start,
    mesh: Mesh,
    parts: Assembly,
    *,
    output: Output | None = None,
    writer: MetricsWriter | None = None,
    saver: Saver | None = None,
    stop: StopRequest | None = None,
    guards: Sequence[Observer] = (),
) -> Trainer:
    """Return the trainer of a run, with the observers that its config asks for.

    The list below is the order of their collectives.

    - `output`: the run's; without it no progress is shown and nothing is profiled.
    - `writer`: of metrics without an output, on the rank that reports.
    - `saver`: without one nothing is saved.
    - `guards`: further observers, which check a step before anything is decided by its numbers.
    """
    config = start.config
    train = config.train
    writer = output.writer if output else writer
    progress = output.progress if output else None
    say = progress.say if progress else _ignore
    stop = stop or StopRequest()
    feed = Feed(config, mesh, start.corpus, parts.schedule)
    saved = start.checkpoint.state if start.checkpoint else None
    bad = BadSteps(train, saved, parts.engine.settings.precision)
    rewinder = Rewinder(start, mesh, parts, saver=saver, say=say)
    saving = None
    if saver:
        saving = Saving(config, saver, RunState(config, start.corpus), stop, bad.state)
    observers: list[Observer] = []
    if output and train.profile:
        observers.append(Profiler(train.profile, mesh, parts.executor, run=start.folder))
    observers += [StepWatch(config, mesh, parts, say=say), FirstStep(config, mesh, say)]
    if train.check_bits.every:
        observers.append(CopyCheck(train.check_bits.every, mesh, parts, start.position))
    observers += guards
    history = None
    if train.layer_history:
        history = LayerHistory(
            train.layer_history,
            mesh,
            parts,
            folder=start.folder if writer else None,
            stop=stop,
            say=say,
        )
        observers.append(history)
    observers.append(StepFilter(config, mesh, bad, rewinder, say, history))
    if train.noise_scale_every:
        observers.append(GradientNoise(config, mesh, parts.engine))
    if train.ema:
        observers.append(WeightAverage(train.ema, parts.engine))
    evaluation = Evaluation(
        config, mesh, corpus=start.corpus, feed=feed, evaluator=parts.evaluator, stop=stop
    )
    observers.append(ScheduledEvaluation(config, evaluation, parts.engine))
    observers.append(
        Reporter(
            config,
            mesh,
            parts,
            feed,
            position=start.position,
            peak_flops=output.peak_flops if output else None,
            writer=writer,
            progress=progress,
            saving=saving,
        )
    )
    if train.digest_every:
        folder = start.folder if writer else None
        observers.append(DigestLog(train.digest_every, mesh, parts, folder))
    if saving:
        observers.append(saving)
    return Trainer(start, mesh, parts, feed=feed, observers=observers, rewinder=rewinder, stop=stop)


def _ignore(text: str) -> None:
    """Say nothing, on ranks that report nothing."""
