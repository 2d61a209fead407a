"""Generate text with a trained model: `parallel3d generate runs/first --prompt "def main("`.

PATH is a run's folder (its weights/, or else its newest checkpoint), a checkpoint (step-N), or a
transformers folder. The same seed produces the same text on the same machine.
"""

import argparse
import sys
from collections.abc import Callable, Iterator

from parallel3d.base.arguments import DONE, Parser, path_of, prints_errors_as, whole_number

SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0}  # 0 and 1.0: sample from all tokens


@prints_errors_as("generate")
def main() -> int:
    """Run the command `generate`; return 1 if the export of a checkpoint fails, 2 for bad input."""
    args = parse_args()
    from parallel3d.huggingface.generate import Generator, model_folder

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    with model_folder(args.path, say) as folder:
        generator = Generator(
            folder, tokens=args.max_new_tokens, seed=args.seed, options=options_of(args), say=say
        )
        if args.chat:
            generator.chat(turns_of(args.prompt))
        else:
            generator.complete(args.prompt)
    return DONE


def turns_of(prompt: str | None) -> Iterator[str]:
    """Yield the user's turns: the prompt, or else each line of standard input."""
    if prompt is not None:
        yield prompt
        return
    if sys.stdin.isatty():
        print("one line is one turn; Ctrl-D ends the conversation", file=sys.stderr)
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")


def options_of(args: argparse.Namespace) -> dict[str, object]:
    """Return the arguments for transformers' `generate`."""
    if args.greedy:
        return {"do_sample": False, **dict.fromkeys(SAMPLING)}
    return {"do_sample": True, **{name: getattr(args, name) for name in SAMPLING}}


def number(least: float, most: float, remedy: str) -> Callable[[str], float]:
    """Return a function that parses a number from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not least <= value <= most:
            rule = f"must be at least {least:g} and at most {most:g}"
            raise argparse.ArgumentTypeError(f" = {text[:40]}: {rule}; {remedy}")
        return value

    return read


def utf8(text: str) -> str:
    """Return the text if it is valid UTF-8; Python reads other bytes as surrogates."""
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise argparse.ArgumentTypeError(f" = {text[:40]!a}: must be UTF-8; change its encoding")
    return text


def parse_args() -> argparse.Namespace:
    """Read the command line of `generate`."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("path", type=path_of, metavar="PATH", help="a run, a checkpoint or a transformers folder")
    add("--prompt", type=utf8, metavar="TEXT", help="the text to continue")
    text = "answer as the assistant: --prompt, or each line of standard input as a turn"
    add("--chat", action="store_true", help=text)
    text = "largest number of new tokens (default: 100)"
    add("--max-new-tokens", type=whole_number(), default=100, metavar="N", help=text)
    temperature, top_k, top_p = SAMPLING.values()
    text = "values below 1 favour likely tokens (default: 0.8)"
    coldest = number(0.01, 100, "use 0.8, or --greedy for the likeliest tokens")
    add("--temperature", type=coldest, default=temperature, metavar="T", help=text)
    text = "sample from the K likeliest tokens only (default: all)"
    add("--top-k", type=whole_number(), default=top_k, metavar="K", help=text)
    text = "sample from the likeliest tokens whose probabilities sum to P (default: all)"
    add("--top-p", type=number(1e-6, 1, "use 0.8"), default=top_p, metavar="P", help=text)
    add("--seed", type=whole_number(0), default=0, metavar="S", help="random seed (default: 0)")
    add("--greedy", action="store_true", help="always choose the likeliest token; no sampling")
    args = parser.parse_args()
    if args.prompt is None and not args.chat:
        parser.error("--prompt: is missing; give a text, or use --chat")
    return args


if __name__ == "__main__":
    sys.exit(main())
