"""The command `run`: the corpus, the runs, the forecasts, the held-out runs."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

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
from parallel3d.scaling.ladder.plan import Ladder, ladder_of
from parallel3d.scaling.ladder.runner import STOPPED, TRAIN, Display, Runner
from parallel3d.scaling.laws import PARAMETRIC
from parallel3d.scaling.points import points_of
from parallel3d.scaling.result import finite
from parallel3d.scaling.runs import CORPUS, read_runs

DONE, FAILED = 0, 1  # exit codes; scripts rely on them
LOCK = "ladder.lock"
FIT = "forecast-fit.json"  # of a ladder's directory: the law that the forecasts are of


def execute(name: str, parallel: int, out: Console) -> tuple[int, Ladder]:
    """Run the unfinished runs of a ladder; return the exit code and the ladder as it then stands.

    Raises ConfigError for what makes no ladder, and where another process runs this one.
    """
    ladder = ladder_of(name)
    ladder.directory.mkdir(parents=True, exist_ok=True)
    lock = Lock(ladder.directory / LOCK, about=str(ladder.file))
    try:
        lock.take(lambda text: terminal.say(out, text))
    except LockHeld as error:
        raise ConfigError(
            f"{ladder.directory}: its ladder is being run by {error.holder}; wait for its end, or "
            "stop it"
        ) from None
    try:
        code = _execute(ladder, parallel, out)
    finally:
        lock.release()
    return code, ladder_of(name)


def _execute(ladder: Ladder, parallel: int, out: Console) -> int:
    ladder.write_configs()
    rungs = [rung for rung in ladder.rungs if rung.state.name != "finished"]
    trunks = {rung.run.trunk for rung in rungs}  # those that unfinished forks need
    todo = [r.run for r in rungs if r.run.kind != "trunk" or r.run.name in trunks]
    with Display(out, len(ladder.rungs), len(ladder.rungs) - len(rungs)) as display:
        runner = Runner(ladder, parallel, display)
        with runner.listening():
            if todo and not (ladder.directory / CORPUS).exists():
                display.say("preparing the corpus")
                _prepare(ladder)
            runner.run([run for run in todo if run.kind != "held-out"])
            held = [run for run in todo if run.kind == "held-out"]
            if held and not runner.is_stopped:
                _forecast(ladder, held, runner, display)
                runner.run([run for run in held if run.name not in runner.failed])
    if runner.is_stopped:
        terminal.say(out, "stopped on request, all saved; start again to go on")
        return STOPPED
    for name, why in runner.failed.items():
        terminal.say(out, f"FAILED {name}: {why}", "  ")
    return FAILED if runner.failed else DONE


def _prepare(ladder: Ladder) -> None:
    """Tokenise the corpus once, before runs of it start side by side, and count it."""
    run = ladder.rungs[0].run
    config = ladder.config_file(run)
    command = [sys.executable, str(TRAIN.with_name("prepare.py")), "--config", str(config)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    if done.returncode == STOPPED:
        return
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(f"the corpus cannot be prepared: {said[-1]}")
    summary = json.loads(done.stdout)
    found = {"training_tokens": round(run.tokens / summary["epochs"]), "summary": summary}
    replace_text(ladder.directory / CORPUS, f"{json.dumps(found, indent=1)}\n")


def _forecast(ladder: Ladder, held: list[LadderRun], runner: Runner, display: Display) -> None:
    """Register the forecasts of the held-out runs; one without is not started."""
    for run in held:
        if runner.failed and not ladder.forecast_file(run).exists():
            others = ", ".join(runner.failed)
            runner.failed[run.name] = f"not started: its forecast waits for {others}"
            continue
        try:
            made = register(ladder, run)
        except ConfigError as error:
            runner.failed[run.name] = f"not started: no forecast can be registered: {error}"
            continue
        if made and made.loss is not None:
            file = ladder.forecast_file(run)
            display.say(f"{run.name}: forecast {made.loss:.4f}, registered in {file}")


def register(ladder: Ladder, run: LadderRun) -> Forecast | None:
    """Register the forecast of a held-out run, by the parametric law of all finished runs.

    None where it is registered already. Raises ConfigError where the runs tell no law.
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
    found = replace(fitted_law, path=ladder.directory / FIT)
    replace_text(found.path, json.dumps(finite(found.document())))
    made = forecast.forecast(found, params=run.counts.with_head, tokens=run.tokens)
    forecast.register(file, made, found)
    return made
