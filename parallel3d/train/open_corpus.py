"""The corpus of a run: prepared once per node, opened on every rank, and the same on all nodes."""

from collections.abc import Iterator
from contextlib import nullcontext

from rich.console import Console

from parallel3d.base.errors import DataError, TrainingError
from parallel3d.config import ResolvedConfig
from parallel3d.data.batches import check_length
from parallel3d.data.corpus import Corpus, Place
from parallel3d.data.prepare import pack, prepare
from parallel3d.data.prepare_progress import shown_progress
from parallel3d.data.show import describe_skips
from parallel3d.data.sources import no_progress
from parallel3d.data.streams import open_shard_cache
from parallel3d.mesh.agree import agree, gather_json
from parallel3d.mesh.join import STARTUP_TIMEOUT
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import Nodes
from parallel3d.mesh.pulse import rank as pulse
from parallel3d.train.progress import in_words


def open_corpus(config: ResolvedConfig, mesh: Mesh, nodes: Nodes, console: Console) -> Corpus:
    """Return the corpus on every rank; the first rank of each node prepares it if necessary.

    Raises Parallel3DError on all ranks if one of them cannot use it.
    """
    pulse.doing("opening the corpus, or waiting for it to be prepared")
    first = nodes.first(mesh.rank)
    data = config.parallel3d.data

    def prepared() -> Place | None:
        if mesh.rank != first:
            return None
        with nullcontext(no_progress) if console.quiet else shown_progress() as progress:
            corpus = prepare(data, progress)
        check_length(corpus, data.sequence_length, config.largest_batch)
        return corpus.place()

    try:
        places = gather_json(mesh, agree(mesh, prepared), aside=True)
    except RuntimeError as error:
        if "timed out" not in str(error).lower():
            raise
        raise TrainingError(
            f"rank {mesh.rank} on {nodes.hosts[mesh.rank]} has waited for "
            f"{in_words(STARTUP_TIMEOUT.total_seconds())} until another node prepares the corpus. "
            "Prepare it before the run: `parallel3d prepare --config ...` on each node, or once in "
            "a parallel3d.data.cache that all nodes share"
        ) from None
    refuse_different(places, nodes)
    corpus = Corpus.at(places[first], open_shard_cache(data))
    corpus = pack(corpus, data)
    console.print(*corpus_lines(corpus), sep="\n")
    return corpus


def corpus_lines(corpus: Corpus) -> Iterator[str]:
    """Yield the lines about a run's corpus, and about what was left out of it."""
    train = len(corpus.train)
    held_out = len(corpus.held_out)
    yield (
        f"corpus  {corpus.num_documents:,} documents, {train:,} tokens + {held_out:,} held out (of "
        f"{corpus.held_out.num_documents:,} documents)"
    )
    yield f"        vocabulary {corpus.vocab_size:,}, unigram entropy {corpus.unigram_entropy:.4f}"
    unknown_share = max(part.facts.unknown_share or 0.0 for part in corpus.parts or (corpus,))
    if unknown_share:
        unknown = f"{unknown_share:.0%} of the text"
        yield f"WARNING: the tokenizer does not know {unknown}; use another one"
    for name, part in corpus.validation.items():
        documents = part.held_out.num_documents
        yield f"        validation {name}: {documents:,} documents, {len(part.held_out):,} tokens"
        common = part.facts.num_in_training
        if common:
            yield (
                f"WARNING: {common:,} of the {documents:,} documents of data.validation.{name} are "
                "also in the training text, so its loss is too low; remove them from one of the two"
            )
    for name, part in {"": corpus, **corpus.validation}.items():
        if part.facts.skipped:
            where = f" of validation {name}" if name else ""
            counts = describe_skips(part.facts.skipped)
            yield f"        left out{where}: {counts} (prepare.py lists the first 20)"


def refuse_different(places: list[Place | None], nodes: Nodes) -> None:
    """Raise DataError on all ranks unless every node has prepared the same text.

    `places` has the description of the corpus by the first rank of each node, None for other ranks.
    With data.on_error = "skip", a file that one node cannot read changes every sample after it.
    """
    keys = {rank: _keys(place) for rank, place in enumerate(places) if place is not None}
    for rank, rank_keys in keys.items():
        differing = sorted({name for name, _ in keys[0].items() ^ rank_keys.items()})
        if differing:
            raise DataError(
                f"{differing[0]} is not the same on {nodes.hosts[0]} and {nodes.hosts[rank]}: "
                "only one of them could read some file or data set. Run `parallel3d prepare "
                "--config ...` on both and compare, or share a folder: parallel3d.data.cache"
            )


def _keys(place: Place) -> dict[str, str]:
    sets = {f"data.validation.{name}": part["key"] for name, part in place["validation"].items()}
    return {"the corpus": place["key"], **sets}
