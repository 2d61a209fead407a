"""Write the unfinished runs of a ladder as Slurm job arrays."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from shlex import quote

from parallel3d.extras.scaling.ladder.expand import LadderRun
from parallel3d.extras.scaling.ladder.plan import FRESH, Runs
from parallel3d.extras.scaling.ladder.runner import LOGS, TRAIN

_JOB = """\
#!/bin/bash
# Add the options that your cluster needs (account, partition, time) here, or pass them to sbatch.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks={ranks}
#SBATCH --output={logs}/%x-%a.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
# A stopped run saves its state, and continues when the job is submitted again.
CONFIGS=({configs})
FOLDERS=({folders})
RESUME=({resume})
CONFIG=${{CONFIGS[$SLURM_ARRAY_TASK_ID]}}
FROM=${{RESUME[$SLURM_ARRAY_TASK_ID]}}
{forecast}export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
# Resume from the newest checkpoint. A fork names it by number, since with "auto" it would start at
# step 0 if its checkpoints were damaged.
OWN=$(compgen -G "${{FOLDERS[$SLURM_ARRAY_TASK_ID]}}/checkpoints/step-*/manifest.json" |
  sed -nE 's#.*/step-([0-9]+)/manifest.json$#\\1#p' | sort -n | tail -n1)
if [ -n "$OWN" ]; then
  case "$FROM" in {fresh}) FROM=auto ;; *) FROM=$OWN ;; esac
fi
srun python {train} --config "$CONFIG" --parallel3d.checkpoint.resume "$FROM"
"""
_FORECAST = """\
FORECASTS=({forecasts})
PARAMS=({params})
TOKENS=({tokens})
HELD_OUT=({held_out})
FORECAST=${{FORECASTS[$SLURM_ARRAY_TASK_ID]}}
if [ ! -e "$FORECAST" ]; then
  # Leave the other held-out runs out of the fit: their tasks may run at the same time.
  OTHERS=()
  for OTHER in "${{HELD_OUT[@]}}"; do if [ -e "$OTHER" ]; then OTHERS+=("$OTHER"); fi; done
  FIT=${{FORECAST%.json}}-fit
  python {scale} fit {directory} --out "$FIT" --no-report "${{OTHERS[@]/#/--forecasts=}}" || exit 2
  python {scale} predict --fit "$FIT/fit.json" --params ${{PARAMS[$SLURM_ARRAY_TASK_ID]}} \\
    --tokens ${{TOKENS[$SLURM_ARRAY_TASK_ID]}} --register "$FORECAST" || exit 2
fi
"""


def write(ladder: Runs) -> list[Path]:
    """Write a job array for each kind of run and number of ranks, and submit.sh to chain them.

    Returns the files, with submit.sh as the last.
    """
    ladder.write_configs()
    (ladder.directory / LOGS).mkdir(exist_ok=True)
    stages = []
    files = []
    # Runs after those that tune have configs that depend on their losses: submit these first.
    for kind in ("trunk", "fit", "held-out") if ladder.is_tuned else ("tune",):
        jobs = []
        rungs = [r for r in ladder.rungs if r.run.kind == kind and r.state.name != "finished"]
        for ranks in sorted({rung.run.devices for rung in rungs}):
            runs = [rung.run for rung in rungs if rung.run.devices == ranks]
            path = ladder.directory / f"{kind}-{ranks}.sbatch"
            path.write_text(_script(ladder, kind, ranks, runs), encoding="utf-8")
            jobs.append(path)
        files += jobs
        stages.append(jobs)
    submit = ladder.directory / "submit.sh"
    submit.write_text("\n".join([*_chain(stages), ""]), encoding="utf-8")
    submit.chmod(0o755)
    return [*files, submit]


def _script(ladder: Runs, kind: str, ranks: int, runs: Sequence[LadderRun]) -> str:
    directory = ladder.directory.absolute()
    forecast = ""
    if kind == "held-out":
        forecast = _FORECAST.format(
            forecasts=_words(ladder.forecast_file(run).absolute() for run in runs),
            held_out=_words(
                ladder.forecast_file(rung.run).absolute()
                for rung in ladder.rungs
                if rung.run.kind == "held-out"
            ),
            params=_words(run.counts.with_head for run in runs),
            tokens=_words(run.tokens for run in runs),
            scale=quote(str(TRAIN.with_name("scale.py"))),
            directory=quote(str(directory)),
        )
    return _JOB.format(
        name=f"{directory.name}-{kind}",
        last=len(runs) - 1,
        ranks=ranks,
        forecast=forecast,
        logs=directory / LOGS,
        train=quote(str(TRAIN)),
        fresh="|".join(FRESH),
        folders=_words(run.folder.absolute() for run in runs),
        configs=_words(ladder.config_file(run).absolute() for run in runs),
        resume=_words(run.config.checkpoint.resume for run in runs),
    )


def _words(values: Iterable[object]) -> str:
    return " ".join(quote(str(value)) for value in values)


def _chain(stages: Sequence[Sequence[Path]]) -> Iterator[str]:
    """Yield the lines of submit.sh, which submits each stage after the one before."""
    yield "#!/bin/bash"
    yield "# Submit from the folder that the ladder was written from: paths of runs are relative."
    yield "set -e"
    yield f"cd {quote(str(Path.cwd()))}"
    after = ""
    for number, jobs in enumerate(stages):
        names = []
        for place, job in enumerate(jobs):
            name = f"job_{number}_{place}"
            yield f"{name}=$(sbatch --parsable {after}{quote(str(job.absolute()))})"
            names.append(f"${name}")
        if names:
            after = f"--dependency=afterok:{':'.join(names)} "
