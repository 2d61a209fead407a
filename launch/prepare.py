"""Prepare the data of a config without training: `parallel3d prepare --config ds.json [--json]`.

`--to megatron PREFIX` also writes Megatron-LM's files; `--show N` shows samples; `--manifest`
writes the manifests of streams.
"""

import argparse
import sys

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, STOPPED, Parser, prints_errors_as, whole_number
from parallel3d.base.section import Problem, raise_if_any
from parallel3d.config import RunConfig, arithmetic
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.export import export_megatron
from parallel3d.data.prepare import prepare, prepare_manifests
from parallel3d.data.prepare_progress import shown_progress
from parallel3d.data.show import as_text, document_statistics, samples, show_samples, summarise


@prints_errors_as("prepare")
def main() -> int:
    """Run the command `prepare`; return 0, 2 for unusable config or data, 3 after Ctrl-C."""
    args, overrides = parse_args()
    try:
        config = RunConfig.from_json(args.config, overrides)
        counting = None
        if args.show > 0:
            counting = "--show"
        elif args.to:
            counting = "--to"
        check_options(config, args.manifest, counting)
        with shown_progress() as progress:
            if args.manifest:
                prepare_manifests(config.data, progress)
            corpus = prepare(config.data, progress)
            config.with_vocab_size(corpus.vocab_size)  # a run would refuse a smaller model's
            check_length(corpus, config.data.sequence_length, batch_of_run(config))
            written = export_megatron(corpus, args.to[1]) if args.to else []
        summary = summarise(corpus, tokens_of_run(config, corpus))
        if written:
            summary["written"] = written
        shown = []
        if args.show > 0:
            shown = samples(corpus, config.data.sequence_length, config.train.seed, args.show)
            summary["show"] = {"samples": shown, "documents": document_statistics(corpus)}
    except KeyboardInterrupt:
        print("interrupted; the next run continues from the completed shards", file=sys.stderr)
        return STOPPED
    if args.json:
        terminal.print_json(summary)
    else:
        print(as_text(summary))
    if shown and not args.json:
        from rich.console import Console

        show_samples(corpus, shown, Console())
    return DONE


def check_options(config: RunConfig, manifest: bool, option: str | None) -> None:
    """Raise ConfigError if no source is a stream, or `option` needs counts that are not known."""
    each = "mixture.N." if config.data.mixture else ""
    problems = []
    if manifest and not config.data.streams:
        problems.append(
            Problem(
                f"parallel3d.data.{each}stream",
                False,
                "is required by --manifest",
                'add "stream": true, or drop --manifest',
            )
        )
    if option and config.data.counts_as_read:
        problems.append(
            Problem(
                "parallel3d.data.count",
                "as-read",
                f"cannot be combined with {option}, which needs each document's tokens",
                'use "manifest", or the same files without stream',
            )
        )
    raise_if_any(problems)


def tokens_of_run(config: RunConfig, corpus: Corpus) -> float | None:
    """Return the number of tokens of the run; None if it depends on the number of ranks."""
    train = config.train
    if train.max_tokens is not None:
        return train.max_tokens
    if train.epochs is not None:
        return train.epochs * len(corpus.train)
    assert train.steps is not None, "the config requires one of the three"
    if train.batch_schedule:
        phases = arithmetic.batch_phases(train, config.data)
        return arithmetic.samples_of_steps(phases, train.steps) * config.data.sequence_length
    if config.train_batch_size is None and (
        config.is_planned or not isinstance(config.mesh.dp, int)
    ):
        return None
    return train.steps * batch_of_run(config) * config.data.sequence_length


def batch_of_run(config: RunConfig) -> int:
    """Return the samples per step; on the smallest possible mesh if the mesh is not fixed."""
    if config.train_batch_size is not None or config.is_planned:
        return config.train_batch_size or 1
    return config.resolve(config.mesh.sizes.ranks).global_batch_size


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `prepare`, and the rest of the command line: settings by path."""
    parser = Parser(
        "Tokenise the corpus of a config into the cache, and print a summary of it.",
        "Any value of the config can be set by its path: --parallel3d.data.vocab_size 8192",
    )
    parser.add_config()
    parser.add_json()
    add = parser.add_argument
    text = "also write the corpus to PREFIX.bin and PREFIX.idx, in Megatron-LM's format"
    add("--to", nargs=2, metavar=("megatron", "PREFIX"), help=text)
    text = "show the first N samples of the run, and statistics of the documents"
    add("--show", type=whole_number(0), metavar="N", default=0, help=text)
    text = "read the shards of streams once, and write data.manifest"
    add("--manifest", action="store_true", help=text)
    args, overrides = parser.parse_known_args()
    if args.to and args.to[0] != "megatron":
        parser.error(f"--to = {args.to[0]}: unknown format; the only one is megatron")
    return args, overrides


if __name__ == "__main__":
    sys.exit(main())
