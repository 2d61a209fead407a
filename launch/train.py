"""Train a model: `deepspeed launch/train.py --config ds.json` (or torchrun, srun, plain python)."""

import sys
from argparse import Namespace
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from parallel3d.base.arguments import DONE, STOPPED, Parser, whole_number
from parallel3d.config import ResolvedConfig, RunConfig, help_text
from parallel3d.launch import _guards as guards
from parallel3d.launch import quick
from parallel3d.train.claim import Claim, check_restarts, claim_on_first, resolve_config
from parallel3d.train.ending import Ending, StopRequest, end_with, join, meet_at_the_end

if TYPE_CHECKING:  # torch and DeepSpeed are loaded after the config and the folder are checked
    from parallel3d.mesh.mesh import Mesh


def train(
    requested: RunConfig,
    config: ResolvedConfig,
    mesh: "Mesh",
    claimed: Claim | None,
    stop: StopRequest,
    as_json: bool,
) -> int:
    """Train from a config, as it was read and resolved, to the summary; return the exit code."""
    # These load DeepSpeed, which is slow; an invalid config has been refused before.
    from parallel3d.engine import EngineSettings
    from parallel3d.engine.selftest import self_test
    from parallel3d.train.assembly import assemble
    from parallel3d.train.flight import record_collectives
    from parallel3d.train.observers import observed_trainer
    from parallel3d.train.output import Output, console_of, print_placement
    from parallel3d.train.saving import saver_of
    from parallel3d.train.start import find_start, restore

    console = console_of(mesh)
    tasks = guards.load_tasks(config, mesh)
    start = find_start(requested, config, mesh, claimed, console, guards.open_places)
    settings = EngineSettings.from_config(start.config)
    self_test(settings, mesh, console.print)
    guards.warn_of_slow_links(start.config, mesh, console.print)
    parts = assemble(start.config, mesh, say=console.print, settings=settings)
    print_placement(console, start.config, parts)
    restore(start, mesh, parts)
    with closing(Output(start, mesh, console)) as output:
        guards.leave_memory(start, mesh)
        saver = saver_of(start, mesh, parts, console.print)
        keep_records = partial(record_collectives, start.folder / "flight", mesh.rank)
        stop.hold(start.folder if mesh.rank == 0 else None, output.close, keep_records)
        watching = guards.observers_of(start, mesh, parts, tasks, stop, output.progress)
        trainer = observed_trainer(
            start, mesh, parts, output=output, saver=saver, stop=stop, guards=watching
        )
        result = trainer.run()
        output.finish(result, parts.engine)
    parts.engine.close()
    output.print_summary(result, as_json)
    return STOPPED if result.stopped else DONE


def run(args: Namespace, overrides: list[str], end: Ending, stop: StopRequest) -> int:
    """Read the config, then train or do the dry run; return the exit code."""
    launch = end.launch
    requested = RunConfig.from_json(args.config, overrides)
    if args.dry_run is not None:
        from parallel3d.train.dry_run import dry_run  # it loads the planner

        return dry_run(requested, launch, devices=args.dry_run, as_json=args.json)
    check_restarts(requested, launch)
    config = resolve_config(requested, launch)
    claimed = claim_on_first(requested, config, launch, end)
    mesh = join(config, launch)
    code = train(requested, config, mesh, claimed, stop, args.json)
    meet_at_the_end(mesh)
    return code


def main() -> NoReturn:
    """Run the command `train`, and exit with its code; only rank 0 prints."""
    if quick.is_meant_by(sys.argv[1:]):
        sys.exit(quick.main())
    args, overrides = parse_args()
    end_with(partial(run, args, overrides))


def parse_args() -> tuple[Namespace, list[str]]:
    """Return the options of `train`, and the rest of the command line: settings by their path."""
    parser = Parser(__doc__, help_text)
    parser.add_config(required=False)
    parser.add_json()
    text = "print mesh, memory, time and checkpoint size without training"
    parser.add_argument(
        "--dry-run", type=whole_number(0), nargs="?", const=0, metavar="DEVICES", help=text
    )
    text = "as --run.hardware: the device that a dry run plans for, a name or a file's path"
    parser.add_argument("--hardware", metavar="NAME", help=text)
    args, overrides = parser.parse_known_args()
    if args.hardware is not None:
        overrides += ["--run.hardware", args.hardware]
    if args.config is None:
        parser.error("--config: is missing; add it, or let `parallel3d quick --minutes 20` choose")
    return args, overrides


if __name__ == "__main__":
    main()
