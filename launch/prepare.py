"""Prepare the data of a config alone: `parallel3d prepare --config ds.json [--json]`.

`--to megatron PREFIX` writes it for Megatron-LM, too; `--show N` shows samples of it.
"""

import json
import sys

from parallel3d.base.arguments import DONE, STOPPED, Parser, named
from parallel3d.config import RunConfig
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.export import export_megatron
from parallel3d.data.prepare import prepare
from parallel3d.data.prepare_progress import shown_progress
from parallel3d.data.show import as_text, describe, described, on_terminal, samples


@named("prepare")
def main() -> int:
    """Run the command `prepare`: 0, 2 for unusable config or data, 3 after Ctrl-C."""
    parser = Parser(
        "Tokenise the corpus of a config into the cache, and say what is in it.",
        "Every value of the config can be set by its path: --parallel3d.data.vocab_size 8192",
    )
    parser.add_config()
    parser.add_json()
    parser.add_argument(
        "--to", nargs=2, metavar=("megatron", "PREFIX"),
        help="write it to PREFIX.bin and PREFIX.idx as Megatron-LM reads them, too",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=int, metavar="N", default=0,
        help="show the first N samples of the run, and what the documents are like",
    )  # fmt: skip
    args, overrides = parser.parse_known_args()
    if args.to and args.to[0] != "megatron":
        parser.error(f"--to = {args.to[0]}: is no format that is written; use megatron")
    try:
        config = RunConfig.from_json(args.config, overrides)
        with shown_progress() as progress:
            corpus = prepare(config.data, progress)
            check_length(corpus, config.data.sequence_length, batch_of_run(config))
            written = export_megatron(corpus, args.to[1], progress) if args.to else []
        summary = describe(corpus, tokens_of_run(config, corpus))
        if written:
            summary["written"] = written
        shown = []
        if args.show > 0:
            shown = samples(corpus, config.data.sequence_length, config.train.seed, args.show)
            summary["show"] = {"samples": shown, "documents": described(corpus)}
    except KeyboardInterrupt:
        print("interrupted; what is tokenised is kept for the next time", file=sys.stderr)
        return STOPPED
    print(json.dumps(summary) if args.json else as_text(summary))
    if shown and not args.json:
        from rich.console import Console

        Console().print(on_terminal(corpus, shown, config.data.isolate_documents))
    return DONE


def tokens_of_run(config: RunConfig, corpus: Corpus) -> float | None:
    """Tokens that the run trains on; None where that depends on the number of ranks."""
    train = config.train
    if train.max_tokens is not None:
        return train.max_tokens
    if train.epochs is not None:
        return train.epochs * len(corpus.train)
    assert train.steps is not None, "the config has one of the three"
    if config.train_batch_size is None and (
        config.is_planned or not isinstance(config.mesh.dp, int)
    ):
        return None
    return train.steps * batch_of_run(config) * config.data.sequence_length


def batch_of_run(config: RunConfig) -> int:
    """Samples that a step takes; on the smallest mesh where the mesh is open yet."""
    if config.train_batch_size is not None or config.is_planned:
        return config.train_batch_size or 1
    mesh = config.mesh
    dp = mesh.dp if isinstance(mesh.dp, int) else 1
    return config.resolve(mesh.pp * dp * mesh.tp).global_batch_size


if __name__ == "__main__":
    sys.exit(main())
