"""A view of what the model will see of a corpus: samples, and statistics of their documents."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.base.errors import DataError
from parallel3d.data.batches import num_windows
from parallel3d.data.corpus import Corpus, Mixture
from parallel3d.data.mixing import Mixing
from parallel3d.data.order import GOLDEN, sample_index
from parallel3d.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType
    from transformers import PreTrainedTokenizerBase

LENGTHS = {"shortest": 0, "5%": 5, "median": 50, "95%": 95, "longest": 100}


@dataclass(frozen=True)
class Fragment:
    """The part of a document that is in a sample; `text` is None without a tokenizer.

    `begins` and `ends` say whether the document does within the sample; its end-of-text counts
    among `num_tokens`.
    """

    document: str
    num_tokens: int
    begins: bool
    ends: bool
    text: str | None
    ids: list[int]


@dataclass(frozen=True)
class Sample:
    """A sample by its global index: the window of a part that starts at the token `start`."""

    index: int
    part: str
    start: int
    fragments: tuple[Fragment, ...]


def samples(corpus: Corpus, sequence_length: int, seed: int, count: int) -> list[Sample]:
    """The first `count` samples of a run, as `Batches` gives their tokens.

    Raises DataError where a part is shorter than one sample.
    """
    parts = corpus.parts or (corpus,)
    streams = [part.stream("train") for part in parts]
    shares = corpus.train.weights if isinstance(corpus.train, Mixture) else (1.0,)
    sizes = [num_windows(len(stream), sequence_length) for stream in streams]
    if not min(sizes):
        raise DataError(
            f"a part of the corpus has fewer tokens than one sample of {sequence_length} (+ 1);"
            " add text, or lower data.sequence_length"
        )
    tokenizer = _tokenizer(corpus)
    found = []
    assigned, places = Mixing(shares).assign(np.arange(count))
    for index, part in enumerate(assigned.tolist()):
        place = places[index : index + 1]
        window = int(sample_index(seed + part * GOLDEN, place, sizes[part])[0])
        first = window * sequence_length
        bounds = streams[part].bounds
        fragments = []
        document = int(np.searchsorted(bounds, first, side="right")) - 1
        while bounds[document] < first + sequence_length:
            start = max(first, int(bounds[document]))
            end = min(first + sequence_length, int(bounds[document + 1]))
            ids = np.asarray(streams[part].tokens[start:end]).tolist()
            ends = end == bounds[document + 1]
            text = str(tokenizer.decode(ids[:-1] if ends else ids)) if tokenizer else None
            name = parts[part].name(document)
            begins = start == bounds[document]
            fragments.append(Fragment(name, end - start, bool(begins), bool(ends), text, ids))
            document += 1
        label = corpus.labels[part] if corpus.labels else ""
        found.append(Sample(index, label, first, tuple(fragments)))
    return found


def described(corpus: Corpus) -> dict[str, Any]:
    """Lengths, bytes per token and repeated documents of a corpus, or of each part of one."""
    if corpus.parts:
        parts = zip(corpus.labels, corpus.parts, strict=True)
        return {"parts": [{"part": label, **described(part)} for label, part in parts]}
    streams = [corpus.stream("train"), corpus.stream("held_out")]
    lengths = np.concatenate([np.diff(stream.bounds) - 1 for stream in streams])
    tokens, size = int(lengths.sum()), corpus.found.get("num_bytes")
    return {
        "num_documents": len(lengths),
        "num_tokens": corpus.num_tokens,
        "document_tokens": {
            name: int(np.percentile(lengths, share, method="nearest"))
            for name, share in LENGTHS.items()
        }
        | {"mean": tokens / len(lengths)},
        "bytes_per_token": size / tokens if size and tokens else None,
        "num_repeated_documents": corpus.found.get("num_repeated_documents"),
    }


def as_json(corpus: Corpus, found: list[Sample]) -> dict[str, Any]:
    """Samples and description as `--json` writes them."""
    return {"samples": [asdict(sample) for sample in found], "documents": described(corpus)}


def on_terminal(corpus: Corpus, found: list[Sample], isolated: bool) -> "RenderableType":
    """Samples and description as a terminal shows them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    lines: list[Any] = []
    for sample in found:
        tokens = sum(fragment.num_tokens for fragment in sample.fragments)
        of = f" of {sample.part}" if sample.part else ""
        title = f"sample {sample.index}{of}: {tokens:,} tokens from token {sample.start:,} on"
        lines.append("")
        lines.append(Rule(Text(title, style="bold"), align="left", style="dim"))
        for number, fragment in enumerate(sample.fragments):
            if number and isolated:
                lines.append(Text("positions restart; nothing before is seen from here", "dim"))
            how = "" if fragment.begins else ", from its middle"
            count = f"{fragment.num_tokens:,} token{'s' * (fragment.num_tokens != 1)}"
            lines.append(Text(f"┌ {fragment.document}{how}: {count}", "cyan"))
            text = " ".join(map(str, fragment.ids)) if fragment.text is None else fragment.text
            lines.append(Padding(Text(_printable(text)), (0, 0, 0, 2)))
            lines.append(Text("└ end of text" if fragment.ends else "… goes on", "cyan"))
    lines += ["", Rule(style="dim"), _table(corpus)]
    return Group(*lines)


def _table(corpus: Corpus) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    parts = described(corpus).get("parts") or [{"part": "the corpus", **described(corpus)}]
    table.add_column("")
    for part in parts:
        table.add_column(part["part"], justify="right", overflow="fold")
    rows: list[tuple[str, list[Any]]] = [
        ("documents", [part["num_documents"] for part in parts]),
        ("of them repeated", [part["num_repeated_documents"] for part in parts]),
        ("tokens", [part["num_tokens"] for part in parts]),
        ("bytes per token", [part["bytes_per_token"] for part in parts]),
    ]
    for name in (*LENGTHS, "mean"):
        of = [part["document_tokens"][name] for part in parts]
        rows.append((f"tokens of a document: {name}", of))
    for name, values in rows:
        table.add_row(name, *map(_shown, values))
    return table


def _shown(value: float | None) -> str:
    return "?" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _printable(text: str) -> str:
    """A text whose control characters a terminal does not obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def _tokenizer(corpus: Corpus) -> "PreTrainedTokenizerBase | None":
    directory = corpus.tokenizer_directory
    return load_tokenizer(directory) if any(directory.iterdir()) else None
