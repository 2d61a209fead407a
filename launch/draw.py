"""Prints a pipeline schedule: who runs what when, how long ranks idle, what they hold."""

import argparse
import json
import sys
from pathlib import Path

from parallel3d.errors import Parallel3DError
from parallel3d.pipeline import draw
from parallel3d.pipeline.schedule import bubble, peak_in_flight, simulate, unit_cost
from parallel3d.pipeline.schedules import make_schedule, names


def main() -> int:
    """Draw the schedule that the command line asks for; gives the exit code."""
    args = parse_args()
    try:
        schedule = make_schedule(args.schedule, args.pp, args.microbatches, args.stages_per_rank)
    except Parallel3DError as error:
        print(f"draw: {error}", file=sys.stderr)
        return 2
    spans = simulate(schedule, unit_cost)
    title = f"{schedule.name}: {args.pp} ranks, {args.microbatches} microbatches"
    try:
        if args.svg:
            args.svg.write_text(draw.svg(spans, title), encoding="utf-8")
        if args.trace:
            args.trace.write_text(json.dumps(draw.chrome_trace(spans)), encoding="utf-8")
    except OSError as error:
        print(f"draw: cannot write: {error}", file=sys.stderr)
        return 2
    programs = [[str(action) for action in program] for program in schedule.programs]
    if args.json:
        report = {
            "name": schedule.name,
            "num_microbatches": schedule.num_microbatches,
            "pp_coord_of_stage": schedule.pp_coord_of_stage,
            "programs": programs,
            "bubble": bubble(spans),
            "peak_in_flight": peak_in_flight(schedule),
        }
        print(json.dumps(report))
        return 0
    print(draw.text_grid(spans))
    print(f"\nbubble          {bubble(spans):.1%} of the time of all ranks")
    print("peak in flight ", *peak_in_flight(schedule), "forwards that a rank holds at once")
    if args.communication:
        print("\nprograms, as they run")
        print(schedule.show())
    return 0


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", default="gpipe", help=", ".join(names()))
    parser.add_argument("--pp", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches in one batch")
    parser.add_argument("--stages-per-rank", type=int, default=1, help="for interleaved, 2 or more")
    parser.add_argument("--communication", action="store_true", help="print sends and receives")
    parser.add_argument("--svg", type=Path, help="write a drawing to this file")
    parser.add_argument("--trace", type=Path, help="write a trace for Perfetto to this file")
    parser.add_argument("--json", action="store_true", help="print the schedule as one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
