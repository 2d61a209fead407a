"""A ladder as it stands: each run with its cost and state, and warnings."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel3d.base.atomic import replace_text
from parallel3d.scaling.ladder.cost import Cost, with_costs
from parallel3d.scaling.ladder.expand import CONFIGS, LadderRun, runs_of
from parallel3d.scaling.ladder.file import LadderConfig, load
from parallel3d.scaling.ladder.state import State, state_of
from parallel3d.scaling.runs import unique_tokens

REPEATS = 4
"""Passes over a corpus up to which repeated tokens are worth as much as new ones, nearly
(arXiv:2305.16264)."""
_BEYOND = 10  # times the largest fitted FLOPs, of a held-out run that tests a forecast
_FEW_STEPS = 50


@dataclass(frozen=True)
class Rung:
    """A run with its cost and state; training tokens of its corpus where known."""

    run: LadderRun
    cost: Cost
    state: State
    unique_tokens: int | None


@dataclass(frozen=True)
class Ladder:
    """The ladder of a file: its runs, trunks before their forks, held-out runs last."""

    file: Path
    config: LadderConfig
    rungs: tuple[Rung, ...]
    warnings: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """The folder of the ladder's runs."""
        return Path(self.config.directory)

    def config_file(self, run: LadderRun) -> Path:
        """The config file that launch/train.py reads for a run."""
        return self.directory / CONFIGS / f"{run.name}.json"

    def forecast_file(self, run: LadderRun) -> Path:
        """The file in which the forecast of a held-out run is registered."""
        return self.directory / f"forecast-{run.name}.json"

    def write_configs(self) -> None:
        """Write each run's config beside the runs."""
        for rung in self.rungs:
            path = self.config_file(rung.run)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(rung.run.config.to_dict(), indent=1)
            if not path.exists() or path.read_text(encoding="utf-8") != f"{text}\n":
                replace_text(path, f"{text}\n")


def ladder_of(name: str) -> Ladder:
    """The ladder in a file, as it stands; raises ConfigError where the file makes no ladder."""
    config, base, file = load(name)
    runs = with_costs(runs_of(config, base, file))
    unique = config.unique_tokens or unique_tokens(Path(config.directory))
    rungs = tuple(Rung(run, cost, state_of(run), unique) for run, cost in runs)
    return Ladder(file, config, rungs, tuple(_warnings(config, [run for run, _ in runs], unique)))


def _warnings(config: LadderConfig, runs: Sequence[LadderRun], unique: int | None) -> Iterator[str]:
    sizes = len({run.counts for run in runs if run.kind == "fit"})
    if sizes < 3:
        yield f"{sizes} sizes: the parametric law needs 3, and a profile of a budget, too"
    fitted = max(run.flops for run in runs if run.kind == "fit")
    for run in runs:
        if run.kind == "held-out" and run.flops < _BEYOND * fitted * 0.98:
            yield (
                f"{run.name}: {run.flops / fitted:.2g} times the largest fitted FLOPs; a forecast "
                f"is tested by {_BEYOND} times or more"
            )
    if few := [run.name for run in runs if run.steps < _FEW_STEPS]:
        what = "give a smaller hyperparameters.batch_tokens"
        yield f"{few[0]}: fewer than {_FEW_STEPS} steps; {what}"
    if unique is None:
        yield "repeats of the corpus are not known before `run` prepares it; or give unique_tokens"
    elif over := [run for run in runs if run.tokens > REPEATS * unique]:
        most = max(over, key=lambda run: run.tokens)
        yield (
            f"{len(over)} runs read the corpus of {unique:,} tokens more than {REPEATS} times "
            f"({most.name}: {most.tokens / unique:.1f}); from there on repeated tokens are worth "
            "less than new ones (arXiv:2305.16264): the law that is fitted is not that of fresh "
            "text"
        )
