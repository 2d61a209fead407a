"""Write a page on training runs: `parallel3d report runs/first` writes runs/first/report.html.

The page has losses, rates, speed and memory beside the plan, restarts, and the config; for several
runs also the settings in which they differ. It is one file that fetches nothing; its plots also
stand beside it as PNGs.
"""

import argparse
import io
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from parallel3d.base import terminal
from parallel3d.base.arguments import (
    DONE,
    Parser,
    output_file,
    path_of,
    prints_errors_as,
    whole_number,
)
from parallel3d.extras.report.page import write_page


@prints_errors_as("report")
def main() -> int:
    """Run the command `report`; return 2 for bad input."""
    args = parse_args()
    from parallel3d.extras.report import runs

    read = [runs.read(folder) for folder in args.runs]
    plans = [runs.planned(run, args.hardware) for run in read]
    samples = {}
    if args.prompt is not None:
        for run, folder in zip(read, args.runs, strict=True):
            samples[run.name] = samples_of(folder, args.prompt, args.max_new_tokens)
    text, drawn = runs.page(read, plans, samples)
    path = (args.to or args.runs[0] / "report").with_suffix(".html")
    write_page(path, text, drawn)
    print(f"wrote {path}", file=sys.stderr)
    if args.json:
        terminal.print_json({"page": str(path), "plots": sorted(drawn)})
    return DONE


def samples_of(run: Path, prompt: str, tokens: int) -> dict[str, str]:
    """Return the text that each checkpoint of a run generates after a prompt, oldest first."""
    from parallel3d.checkpoint.manifest import step_folders
    from parallel3d.huggingface.generate import Generator, model_folder
    from parallel3d.launch.generate import SAMPLING

    texts = {}
    say = partial(print, file=sys.stderr)
    for step, checkpoint in reversed(step_folders(run / "checkpoints")):
        out = io.StringIO()
        with model_folder(checkpoint, say) as folder, redirect_stdout(out):
            options = {"do_sample": True, **SAMPLING}
            generator = Generator(folder, tokens=tokens, seed=0, options=options, say=say)
            generator.complete(prompt)
        texts[f"after step {step:,}"] = out.getvalue()
    return texts


def parse_args() -> argparse.Namespace:
    """Read the command line of `report`."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", type=path_of, nargs="+", metavar="RUN", help="the folder of a run")
    text = "the page to write (default: report.html in the first run's folder)"
    add("--to", type=output_file, metavar="FILE", help=text)
    text = "hardware for the plan (default: the run's, or this machine if measured)"
    add("--hardware", metavar="NAME", help=text)
    text = "add the text that each kept checkpoint generates after it"
    add("--prompt", metavar="TEXT", help=text)
    text = "largest number of new tokens after the prompt (default: 60)"
    add("--max-new-tokens", type=whole_number(), default=60, metavar="N", help=text)
    parser.add_json()
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
