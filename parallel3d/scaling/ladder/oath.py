"""Forecasts of a ladder's held-out runs, registered before these runs start."""

import json
from dataclasses import replace
from importlib.util import find_spec

from parallel3d.base.atomic import replace_text
from parallel3d.base.errors import ConfigError
from parallel3d.scaling import forecast
from parallel3d.scaling.command import DRAWS, NO_EXTRA
from parallel3d.scaling.estimator import Estimator
from parallel3d.scaling.fit import fit_law
from parallel3d.scaling.forecast import Forecast
from parallel3d.scaling.ladder.expand import LadderRun
from parallel3d.scaling.ladder.plan import Ladder
from parallel3d.scaling.laws import LAWS
from parallel3d.scaling.points import points_of
from parallel3d.scaling.result import StoredFit, finite
from parallel3d.scaling.runs import read_runs

FIT = "forecast-fit.json"  # of a ladder's directory: the law that the forecasts are of


def register(ladder: Ladder, run: LadderRun) -> Forecast | None:
    """Register the forecast of a held-out run, by the parametric law of all finished runs.

    None where it is registered already: a forecast is never made again. Raises ConfigError where
    the runs tell no law.
    """
    file = ladder.forecast_file(run)
    if file.exists():
        return None
    if find_spec("scipy") is None:
        raise ConfigError(NO_EXTRA.format("scipy"))
    table = read_runs(ladder.directory)
    fitted = {rung.run.name for rung in ladder.rungs if rung.run.kind == "fit"}
    keep = [i for i, name in enumerate(table.names) if name in fitted]
    names = tuple(table.names[i] for i in keep)
    table = replace(table, rows=tuple(table.rows[i] for i in keep), names=names)
    found = fit_law(points_of(table, {}), LAWS["parametric"], Estimator(), draws=DRAWS, seed=0)
    path = ladder.directory / FIT
    replace_text(path, json.dumps(finite(found.document())))
    stored = StoredFit.read(path)
    made = forecast.forecast(stored, params=run.counts.with_head, tokens=run.tokens)
    forecast.register(file, made, stored)
    return made
