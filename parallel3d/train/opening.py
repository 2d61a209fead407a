"""The corpus of a run on every rank: prepared once a node, equal on all of them."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from parallel3d.base.errors import DataError, TrainingError
from parallel3d.config import RunConfig
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus
from parallel3d.data.pieces import EMPTY
from parallel3d.data.prepare import prepare
from parallel3d.data.progress import shown_progress
from parallel3d.data.sources import silent
from parallel3d.data.summary import reasons
from parallel3d.mesh.agree import agree, gather_json
from parallel3d.mesh.join import STARTUP_TIMEOUT
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes, find_nodes
from parallel3d.train.progress import in_words


def open_corpus(config: RunConfig, mesh: Mesh, console: Console) -> Corpus:
    """The corpus on every rank; the first rank of each node prepares it, if nobody has yet.

    Raises Parallel3DError on all ranks if it cannot be used on one.
    """

    nodes = find_nodes(mesh)
    first = nodes.first(mesh.rank)

    def prepared() -> dict[str, Any] | None:
        if mesh.rank != first:
            return None
        with nullcontext(silent) if console.quiet else shown_progress() as progress:
            corpus = prepare(config.data, progress)
        check_length(corpus, config.data.sequence_length, config.global_batch_size)
        return corpus.place()

    try:
        places = gather_json(mesh, agree(mesh, prepared), aside=True)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise TrainingError(
            f"rank {mesh.rank} on {nodes.hosts[mesh.rank]} has waited for "
            f"{in_words(STARTUP_TIMEOUT.total_seconds())} for the corpus of another node: prepare "
            "it before the run, `parallel3d prepare --config ...` on each node, or once in a "
            "parallel3d.data.cache that all nodes share"
        ) from None
    refuse_different(places, nodes)
    corpus = Corpus.at(places[first], config.data.remote_cache_bytes)
    console.print(*described(corpus), sep="\n")
    return corpus


def described(corpus: Corpus) -> Iterator[str]:
    """The lines that a run begins with: its corpus, and what was left out of it."""
    train, held_out = len(corpus.train), len(corpus.held_out)
    yield (
        f"corpus  {corpus.num_documents:,} documents, {train:,} tokens + {held_out:,} held out (of "
        f"{corpus.held_out.num_documents:,} documents)"
    )
    yield f"        vocabulary {corpus.vocab_size:,}, unigram entropy {corpus.unigram_entropy:.4f}"
    if lost := max(part.found.get("unknown_share", 0.0) for part in corpus.parts or (corpus,)):
        yield f"WARNING: the tokenizer does not know {lost:.0%} of the text; use another"
    yield from _left_out(corpus, "left out")
    for name, part in corpus.validation.items():
        documents = part.held_out.num_documents
        yield f"        validation {name}: {documents:,} documents, {len(part.held_out):,} tokens"
        yield from _left_out(part, f"left out of validation {name}")
        if common := part.found["num_in_training"]:
            yield (
                f"WARNING: {common:,} of the {documents:,} documents of data.validation.{name} are "
                "trained on, too: its loss is too low; take them out of one of the two"
            )


def _left_out(corpus: Corpus, what: str) -> Iterator[str]:
    if skipped := corpus.found.get("skipped"):
        # Documents without text are counted alone.
        where = " (prepare.py lists the first 20)" if skipped.keys() - {EMPTY} else ""
        yield f"        {what}: {reasons(skipped)}{where}"


def refuse_different(places: list[dict[str, Any] | None], nodes: Nodes) -> None:
    """Raise DataError, on all ranks, unless every node has prepared the same text.

    `places` are what the first rank of each node says of its corpus. A file that one node cannot
    read, with data.on_error = "skip", makes every sample after it another one there.
    """
    keys = {rank: _keys(place) for rank, place in enumerate(places) if place is not None}
    for rank, found in keys.items():
        if wrong := sorted({name for name, _ in keys[0].items() ^ found.items()}):
            raise DataError(
                f"{wrong[0]} is not the same on {nodes.hosts[0]} and {nodes.hosts[rank]}: "
                "a file, or a data set, was read on one of the two alone. Run `parallel3d prepare "
                "--config ...` on both and compare, or share a folder: parallel3d.data.cache"
            )


def _keys(place: dict[str, Any]) -> dict[str, str]:
    sets = {f"data.validation.{name}": part["key"] for name, part in place["validation"].items()}
    return {"the corpus": place["key"], **sets}
