"""Run a ladder: prepare the corpus, train the runs, register forecasts, train the held-out runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TypeVar

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.base.lock import Lock, LockHeld
from parallel3d.scaling import forecast
from parallel3d.scaling.estimator import Estimator
from parallel3d.scaling.fit import fit_law
from parallel3d.scaling.flags import DRAWS, NO_EXTRA
from parallel3d.scaling.forecast import Forecast
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.ladder.plan import Ladder, Runs, ladder_of
from parallel3d.scaling.ladder.runner import STOPPED, TRAIN, Display, Runner
from parallel3d.scaling.laws import PARAMETRIC
from parallel3d.scaling.points import points_of
from parallel3d.scaling.reliability import with_checks
from parallel3d.scaling.result import finite
from parallel3d.scaling.runs import CORPUS, read_runs

DONE, FAILED = 0, 1  # exit codes; scripts rely on them
_R = TypeVar("_R", bound=Runs)
LOCK = "ladder.lock"
FIT = "forecast-fit.json"  # the law behind the forecasts, in the ladder's directory


def execute(name: str, parallel: int, out: Console) -> tuple[int, Ladder]:
    """Train the unfinished runs of a ladder; return the exit code and the ladder's new state.

    Raises ConfigError for a wrong ladder file, or if another process runs the same ladder.
    """
    return execute_runs(lambda: ladder_of(name), parallel, out)


def execute_runs(read: Callable[[], _R], parallel: int, out: Console) -> tuple[int, _R]:
    """Do the same for the runs that `read` returns."""
    ladder = read()
    ladder.directory.mkdir(parents=True, exist_ok=True)
    lock = Lock(ladder.directory / LOCK, about=str(ladder.file))
    try:
        lock.take(lambda text: terminal.say(out, text))
    except LockHeld as error:
        raise ConfigError(
            f"{ladder.directory}: the ladder is already being run by {error.holder}; wait for it "
            "to end, or stop it"
        ) from None
    try:
        code = _execute(ladder, parallel, out)
        if code == DONE and not ladder.is_tuned:
            code = _execute(read(), parallel, out)  # with the tuned rate and batch
    finally:
        lock.release()
    return code, read()


def _execute(ladder: Runs, parallel: int, out: Console) -> int:
    ladder.write_configs()
    rungs = [rung for rung in ladder.rungs if rung.state.name != "finished"]
    trunks = {rung.run.trunk for rung in rungs}  # trunks that unfinished forks need
    todo = [r.run for r in rungs if r.run.kind != "trunk" or r.run.name in trunks]
    todo = [run for run in todo if run.kind == "tune"] or todo
    with Display(out, len(ladder.rungs), len(ladder.rungs) - len(rungs)) as display:
        runner = Runner(ladder, parallel, display)
        with runner.listening():
            if todo and not (ladder.directory / CORPUS).exists():
                display.say("preparing the corpus")
                _prepare(ladder)
            runner.run([run for run in todo if run.kind != "held-out"])
            held_out = [run for run in todo if run.kind == "held-out"]
            if held_out and not runner.is_stopped:
                _forecast(ladder, held_out, runner, display)
                runner.run([run for run in held_out if run.name not in runner.failed])
    if runner.is_stopped:
        terminal.say(out, "stopped on request; every run saved its state: run again to continue")
        return STOPPED
    for name, why in runner.failed.items():
        terminal.say(out, f"FAILED {name}: {why}", "  ")
    return FAILED if runner.failed else DONE


def _prepare(ladder: Runs) -> None:
    """Tokenize the corpus once, before parallel runs need it, and record its number of tokens."""
    run = ladder.rungs[0].run
    config = ladder.config_file(run)
    command = [sys.executable, str(TRAIN.with_name("prepare.py")), "--config", str(config)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode == STOPPED:
        return
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, no output"]
        raise ConfigError(f"cannot prepare the corpus: {lines[-1]}")
    summary = json.loads(done.stdout)
    corpus = {"training_tokens": round(run.tokens / summary["epochs"]), "summary": summary}
    replace_text(ladder.directory / CORPUS, f"{json.dumps(corpus, indent=1)}\n")


def _forecast(ladder: Runs, held_out: list[LadderRun], runner: Runner, display: Display) -> None:
    """Register a forecast for each held-out run; mark runs without one as failed."""
    for run in held_out:
        if runner.failed and not ladder.forecast_file(run).exists():
            others = ", ".join(runner.failed)
            runner.failed[run.name] = f"not started: its forecast needs the failed runs {others}"
            continue
        try:
            prediction = register(ladder, run)
        except ConfigError as error:
            runner.failed[run.name] = f"not started: cannot register its forecast: {error}"
            continue
        if prediction and prediction.loss is not None:
            file = ladder.forecast_file(run)
            display.say(f"{run.name}: forecast {prediction.loss:.4f}, registered in {file}")
            for warning in prediction.warnings:
                display.say(f"WARNING: {warning}")


def register(ladder: Runs, run: LadderRun) -> Forecast | None:
    """Fit the parametric law to the finished runs and register the forecast of a held-out run.

    Returns None if a forecast is registered already. Raises ConfigError if the runs do not
    determine the law.
    """
    file = ladder.forecast_file(run)
    if file.exists():
        return None
    if find_spec("scipy") is None:
        raise ConfigError(NO_EXTRA.format("scipy"))
    table = read_runs(ladder.directory)
    fitted = {rung.run.name for rung in ladder.rungs if rung.run.kind == "fit"}
    table = table.take([i for i, name in enumerate(table.names) if name in fitted])
    fitted_law = fit_law(points_of(table, {}), PARAMETRIC, Estimator(), draws=DRAWS, seed=0)
    fit = replace(with_checks(fitted_law, table), path=ladder.directory / FIT)
    replace_text(fit.path, json.dumps(finite(fit.document())))
    prediction = forecast.forecast(fit, params=run.counts.with_head, tokens=run.tokens)
    forecast.register(file, prediction, fit)
    return prediction
