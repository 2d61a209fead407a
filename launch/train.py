"""Train a model: `deepspeed launch/train.py --config ds.json` (or torchrun, srun, plain python)."""

import argparse
import json
from contextlib import closing
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from parallel3d.base.arguments import Parser, whole_number
from parallel3d.base.errors import Parallel3DError, TrainingError
from parallel3d.config import RunConfig, help_text
from parallel3d.mesh.launch import Launch
from parallel3d.pulse import rank as pulse
from parallel3d.train import ending
from parallel3d.train.claim import Claim, claim, ready
from parallel3d.train.stopping import Stopped, StopRequest

if TYPE_CHECKING:  # torch and DeepSpeed wait for a config that is right and a folder that is ours
    from parallel3d.mesh.mesh import Mesh


def train(
    config: RunConfig, mesh: "Mesh", claimed: Claim | None, stop: StopRequest, as_json: bool
) -> int:
    """Train from a valid config to the closing summary; gives the exit code."""
    from parallel3d.checkpoint.save import Saver
    from parallel3d.engine import EngineSettings
    from parallel3d.engine.selftest import self_test
    from parallel3d.train import machines, opening, report, startup
    from parallel3d.train.assembly import assemble
    from parallel3d.train.mfu import peak
    from parallel3d.train.trainer import Trainer

    console = Console(
        stderr=True, quiet=mesh.rank != 0, highlight=False, markup=False, soft_wrap=True
    )
    startup.begin(config, mesh, console)
    place = startup.find_folder(config, mesh, claimed)
    report.print_place(console, config, place.folder)
    machines.check_machine(config, mesh, console.print)
    pulse.doing("opening the corpus, or waiting for who prepares it")
    corpus = opening.open_corpus(config, mesh, console)
    pulse.doing("looking for a checkpoint")
    start = startup.find_start(config, mesh, place=place, corpus=corpus, say=console.print)
    config = start.config
    self_test(EngineSettings.from_config(config), mesh, console.print)
    pulse.doing("building the model")
    parts = assemble(config, mesh, say=console.print)
    report.print_placement(console, config, parts)
    pulse.doing("loading the checkpoint")
    startup.restore(start, mesh, parts)
    with closing(startup.Output(start, mesh, console)) as output:
        saver = Saver(
            parts.engine, mesh, parts.layers, folder=output.checkpoints,
            keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous,
            say=console.print, tokenizer=start.tokenizer, always=config.checkpoint.at,
        )  # fmt: skip
        peak_name, peak_flops = peak(config, mesh)
        profiler = startup.make_profiler(config, mesh, parts=parts, directory=output.directory)
        stop.hold(output.directory if mesh.rank == 0 else None, output.close)
        result = Trainer(
            config, mesh, corpus=corpus, parts=parts, position=start.position,
            peak_flops=peak_flops, writer=output.writer, progress=output.progress,
            profiler=profiler, saver=saver, stop=stop,
        ).run()  # fmt: skip
        if config.run.save_weights and not result.stopped:
            from parallel3d.convert.from_ranks import save_weights

            mesh.set_timeouts(startup.SAVING_TIMEOUT)
            pulse.doing("writing the weights")
            save_weights(parts.engine, mesh, output.directory, config=config, corpus=corpus)
        output.end(result.stopped)
    parts.engine.close()
    summary = report.summarise(
        config, result, corpus=corpus, peak_name=peak_name, directory=output.directory,
        is_said=mesh.rank == 0,
    )  # fmt: skip
    report.print_summary(summary, console, report.command_to_go_on(config, output.directory))
    if as_json and mesh.rank == 0:
        print(json.dumps(summary.to_json()))
    return ending.STOPPED if result.stopped else ending.DONE


def main() -> NoReturn:
    """Run the command `train`, and end with its exit code; the first rank alone speaks."""
    args, overrides = parse_args()
    end = ending.Ending()
    stop = StopRequest(end.judged)
    try:
        with stop.listening():
            end.launch = launch = Launch.from_environment()
            claimed = None
            asked = RunConfig.from_json(args.config, overrides)
            if args.dry_run is not None:
                from parallel3d.train.dry_run import dry_run

                code = dry_run(asked, launch, devices=args.dry_run, as_json=args.json)
            else:
                config = ready(asked, launch)
                if launch.rank == 0:
                    claimed = claim(asked, config, launch, ending.say)
                    end.at_end.append(claimed.release)
                from parallel3d.mesh.mesh import Mesh
                from parallel3d.mesh.waiting import SharedFlag

                sizes = config.mesh.pp, int(config.mesh.dp), config.mesh.tp
                mesh = Mesh(*sizes, launch, watched=True)
                stop.share(SharedFlag("stop"), mesh.rank)
                code = train(config, mesh, claimed, stop, args.json)
                mesh.close()
    except Stopped:
        code = stop.part()
    except (Parallel3DError, TrainingError) as error:
        code = ending.end_all(end.launch, error)
    except Exception as error:
        code = ending.died(end.launch, error, stop.explains_loss, stop.part)
    end.leave(code)


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line of `train`, and what it sets in the config."""
    parser = Parser(__doc__, f"Every value of the config can be set by its path:\n\n{help_text()}")
    parser.add_config()
    parser.add_json()
    parser.add_argument(
        "--dry-run", type=whole_number(0), nargs="?", const=0, metavar="DEVICES",
        help="print mesh, memory, time and checkpoint of the startup, and train nothing",
    )  # fmt: skip
    parser.add_argument("--devices", type=whole_number(), metavar="N", help="of a dry run")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # deepspeed's launcher appends it
    args, overrides = parser.parse_known_args()
    if args.devices and args.dry_run is None:
        parser.error(f"--devices = {args.devices}: is for a dry run; add --dry-run")
    args.dry_run = args.devices or args.dry_run
    return args, overrides


if __name__ == "__main__":
    main()
