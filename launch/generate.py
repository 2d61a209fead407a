"""Have a trained model write on: `parallel3d generate runs/first --prompt "def main("`.

PATH is a run's folder (its weights/, or where it has none its newest checkpoint), that of a
checkpoint, step-N, or one of transformers. The same seed gives the same text on the same machine.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel3d.base.arguments import DONE, Parser, named, whole_number

SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}  # 0 and 1.0: of all tokens


@named("generate")
def main() -> int:
    """Run the command `generate`: 0, 1 if a checkpoint cannot be exported, 2 for wrong input."""
    args = parse_args()
    from parallel3d.huggingface.generate import generate, model_folder

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with model_folder(args.path, say) as folder:
        generate(
            folder, args.prompt, tokens=args.max_new_tokens, seed=args.seed,
            options=options_of(args), say=say,
        )  # fmt: skip
    return DONE


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that transformers' `generate` is given."""
    if args.greedy:
        return {"do_sample": False, **dict.fromkeys(SAMPLING)}
    given = {name: getattr(args, name) for name in SAMPLING}
    sampling = {name: SAMPLING[name] if v is None else v for name, v in given.items()}
    return {"do_sample": True, **sampling}


def number(most: float) -> Callable[[str], float]:
    """Read a number above 0 and up to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            rule = f"must be above 0 and at most {most:g}"
            raise argparse.ArgumentTypeError(f" = {text[:40]}: {rule}; use 0.8")
        return value

    return read


def utf8(text: str) -> str:
    """Return the text; Python reads bytes that are not UTF-8 as surrogates."""
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise argparse.ArgumentTypeError(f" = {text[:40]!a}: must be UTF-8; encode it so")
    return text


def parse_args() -> argparse.Namespace:
    """Read the command line of `generate`."""
    parser = Parser(__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="a run, a checkpoint or a model")
    parser.add_argument(
        "--prompt", type=utf8, required=True, metavar="TEXT", help="what it goes on from"
    )
    parser.add_argument(
        "--max-new-tokens", type=whole_number(), default=100, metavar="N", help="at most (100)"
    )
    parser.add_argument(
        "--temperature", type=number(100), metavar="T", help="below 1: likelier tokens (0.8)"
    )
    parser.add_argument(
        "--top-k", type=whole_number(), metavar="K", help="of the K likeliest tokens alone (all)"
    )
    parser.add_argument(
        "--top-p", type=number(1), metavar="P", help="of the likeliest that sum to P alone (all)"
    )
    parser.add_argument("--seed", type=whole_number(0), default=0, metavar="S", help="(0)")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    args = parser.parse_args()
    if args.greedy:
        for name in SAMPLING:
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                parser.error(f"{flag}: not with --greedy, which samples nothing; take one of them")
    return args


if __name__ == "__main__":
    sys.exit(main())
