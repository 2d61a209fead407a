"""Draw a pipeline schedule: what each rank runs when, its idle time, and its peak in flight.

With --measured, draw a profiled step instead, and above it the same program simulated with the mean
durations of each stage's forwards and backwards.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, Parser, path_of, prints_errors_as, whole_number
from parallel3d.base.errors import ConfigError, ScheduleError
from parallel3d.schedule import draw
from parallel3d.schedule.schedule import (
    Schedule,
    Spans,
    add_sharding,
    bubble,
    peak_in_flight,
    simulate,
    unit_cost,
)
from parallel3d.schedule.schedules import make_schedule, names
from parallel3d.schedule.sharding import Weights

MOST = 200_000  # forwards that can be drawn within seconds


@prints_errors_as("draw")
def main() -> int:
    """Run the command `draw`; return the exit code."""
    args = parse_args()
    idle = None
    if args.measured:
        schedule, spans, panels = measured(args.measured)
    else:
        schedule, spans, panels = planned(args)
        idle = bubble(spans)
    if args.svg:
        args.svg.write_text(draw.figure(panels, idle), encoding="utf-8")
    if args.trace:
        args.trace.write_text(json.dumps(draw.chrome_trace(spans)), encoding="utf-8")
    for file in (args.svg, args.trace):
        if file:
            print(f"written to {file}", file=sys.stderr)
    if args.json:
        terminal.print_json(report(schedule, spans))
        return DONE
    for title, drawn in panels:
        if len(panels) > 1 or drawn != spans:
            print(f"\n{title}")
        print(draw.text_grid(drawn))
        share = bubble(drawn) if idle is None else idle
        print(f"\nbubble          {share:.1%} of the time of all ranks")
    peaks = ", ".join(map(str, peak_in_flight(schedule)))
    print(f"peak in flight  {peaks} (forwards that rank 0, 1, ... holds at once)")
    if args.communication or args.weights:
        print("\nprograms of the ranks")
        print(schedule.show())
    return DONE


def planned(args: argparse.Namespace) -> tuple[Schedule, Spans, list[tuple[str, Spans]]]:
    """Return the named schedule, simulated with costs forward 1, backward 2, gather 1.

    The panel has fewer microbatches than the schedule if all are too many for a picture.
    """

    def timed(num_microbatches: int) -> tuple[Schedule, Spans]:
        schedule = make_schedule(args.schedule, args.pp, num_microbatches, args.stages_per_rank)
        if args.weights:
            schedule = add_sharding(schedule, args.weights, True)
        return schedule, simulate(schedule, unit_cost)

    schedule, spans = timed(args.microbatches)
    count = draw.microbatches_drawn(args.pp, args.microbatches, args.stages_per_rank)
    title = f"{schedule.name}: {args.pp} ranks, {args.microbatches} microbatches"
    if args.weights:
        title += f", weights {args.weights}"
    if count < args.microbatches:
        title += f" ({count} of them drawn)"
    _, drawn = timed(count)
    return schedule, spans, [(title, drawn)]


def measured(file: Path) -> tuple[Schedule, Spans, list[tuple[str, Spans]]]:
    """Return the step in a run's profile/spans.json, simulated with its mean costs and measured.

    Raises ConfigError if the file cannot be read.
    """
    try:
        schedule, spans = draw.spans_from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, ScheduleError) as error:
        raise ConfigError(f"--measured {file}: {error}; use a run's profile/spans.json") from None
    panels = []
    both = {"simulated": simulate(schedule, draw.mean_costs(spans)), "measured": spans}
    for kind, drawn in both.items():
        title = f"{schedule.name}, {kind}: {1e3 * draw.seconds(drawn):.0f} ms"
        panels.append((title, drawn))
    return schedule, spans, panels


def report(schedule: Schedule, spans: Spans) -> dict[str, object]:
    """Return the schedule as an object for --json."""
    return {
        "name": schedule.name,
        "num_microbatches": schedule.num_microbatches,
        "pp_coord_of_stage": schedule.pp_coord_of_stage,
        "programs": [[str(action) for action in program] for program in schedule.programs],
        "bubble": bubble(spans),
        "peak_in_flight": peak_in_flight(schedule),
    }


def parse_args() -> argparse.Namespace:
    """Return the options of `draw`."""
    parser = Parser(__doc__)
    add = parser.add_argument
    count = whole_number(most=MOST)
    add("--schedule", default="gpipe", metavar="NAME", help=", ".join(names()))
    add("--pp", type=count, default=4, metavar="N", help="pipeline ranks")
    add("--microbatches", type=count, default=8, metavar="N", help="microbatches per step")
    add(
        "--stages-per-rank",
        type=count,
        default=1,
        metavar="N",
        help="stages on each rank: 2 or more for interleaved, 2 for v_shape",
    )
    weights = get_args(Weights)
    add("--weights", choices=weights, help="show what ZeRO-3 gathers, holds and reduces")
    text = "draw the spans.json of a profiled run (see train.profile)"
    add("--measured", type=path_of, metavar="FILE", help=text)
    add("--communication", action="store_true", help="print the programs with sends and receives")
    parser.add_pictures("the timeline")
    parser.add_json()
    args = parser.parse_args()
    if args.pp * args.microbatches * args.stages_per_rank > MOST:
        parser.error(
            f"--microbatches = {args.microbatches}: the ranks have more than {MOST:,} forwards in "
            "all; lower --microbatches, --pp or --stages-per-rank"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
