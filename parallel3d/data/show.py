"""Descriptions of a corpus: its summary, samples as the model sees them, document statistics."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from parallel3d.base import terminal
from parallel3d.base.terminal import Column
from parallel3d.data.batches import Batches, mixing_of
from parallel3d.data.corpus import Corpus
from parallel3d.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = {
    "documents": "num_documents",
    "repeated documents": "num_repeated_documents",
    "tokens": "num_tokens",
    "bytes per token": "bytes_per_token",
}
LENGTHS = {"shortest": 0, "5%": 5, "median": 50, "95%": 95, "longest": 100}


class Fragment(TypedDict):
    """A document in a sample, as `--json` prints it."""

    document: str
    num_tokens: int
    begins: bool
    """True if the document begins within the sample."""
    ends: bool
    text: str | None
    """None without a tokenizer."""
    ids: list[int]
    """With the end-of-text."""


class Sample(TypedDict):
    """A sample of the mixture part `part`, starting at its token `start`."""

    index: int
    part: str
    start: int
    fragments: list[Fragment]


def samples(corpus: Corpus, sequence_length: int, seed: int, count: int) -> list[Sample]:
    """Return the first `count` samples of a run, in the format of `--json`."""
    parts = corpus.parts or (corpus,)
    batches = Batches(corpus.train, sequence_length, seed)
    directory = corpus.tokenizer_directory
    tokenizer = load_tokenizer(directory) if any(directory.iterdir()) else None
    rows: list[Sample] = []
    for index, (part, places, _) in enumerate(zip(*batches.places(0, count), strict=True)):
        stream, fragments = batches.streams[part], []
        numbers = np.searchsorted(stream.bounds, places, side="right") - 1
        cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) != 1)) + 1
        for own in np.split(places, cuts):
            start, stop = int(own[0]), int(own[-1]) + 1
            if start < 0:
                continue
            number = int(np.searchsorted(stream.bounds, start, side="right")) - 1
            begin, end = stream.bounds[number : number + 2].tolist()
            ids = np.asarray(stream.tokens[start:stop]).tolist()
            plain = ids[:-1] if stop == end else ids
            fragments.append(
                Fragment(
                    document=parts[part].name(number),
                    num_tokens=stop - start,
                    begins=start == begin,
                    ends=stop == end,
                    text=str(tokenizer.decode(plain)) if tokenizer else None,
                    ids=ids,
                )
            )
        label = corpus.labels[part] if corpus.labels else ""
        rows.append(
            {"index": index, "part": label, "start": int(places[0]), "fragments": fragments}
        )
    return rows


def document_statistics(corpus: Corpus) -> dict[str, Any]:
    """Return lengths, bytes per token and repeated documents of a corpus or of each part."""
    if corpus.parts:
        parts = zip(corpus.labels, corpus.parts, strict=True)
        return {"parts": [{"part": label, **document_statistics(part)} for label, part in parts]}
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


def show_samples(corpus: Corpus, shown: list[Sample], isolated: bool, out: "Console") -> None:
    """Print samples and document statistics."""
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    for sample in shown:
        tokens = sum(part["num_tokens"] for part in sample["fragments"])
        where = f" of {sample['part']}" if sample["part"] else ""
        title = f"sample {sample['index']}{where}: {tokens:,} tokens from {sample['start']:,} on"
        out.print()
        out.print(Rule(Text(title, style="bold"), align="left", style="dim"))
        for number, part in enumerate(sample["fragments"]):
            if number and isolated:
                out.print(Text("positions restart; earlier documents are masked", "dim"))
            how = "" if part["begins"] else " (continued)"
            count = f"{part['num_tokens']:,} token{'s' * (part['num_tokens'] != 1)}"
            out.print(Text(f"┌ {part['document']}{how}: {count}", "cyan"))
            text = " ".join(map(str, part["ids"])) if part["text"] is None else part["text"]
            out.print(Padding(Text(_printable(text)), (0, 0, 0, 2)))
            out.print(Text("└ end of text" if part["ends"] else "… continues", "cyan"))
    out.print()
    out.print(Rule(style="dim"))
    statistics = document_statistics(corpus)
    parts = statistics.get("parts") or [{"part": "the corpus", **statistics}]
    rows = [(name, *(_format(part[key]) for part in parts)) for name, key in _ROWS.items()]
    for name in (*LENGTHS, "mean"):
        lengths = [_format(part["document_tokens"][name]) for part in parts]
        rows.append((f"tokens per document: {name}", *lengths))
    columns = [Column("", right=False), *(Column(part["part"]) for part in parts)]
    terminal.show(out, columns, rows)


def _printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a terminal does not execute them."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


_NESTED = ("mixture", "validation", "written", "skipped", "skipped_first", "show")


def summarise(corpus: Corpus, tokens: float | None) -> dict[str, Any]:
    """Return the summary of a corpus, with each part's epochs in a run of `tokens` tokens."""
    summary = corpus.summary()
    summary["epochs"] = None if tokens is None else tokens / len(corpus.train)
    for number, row in enumerate(summary.get("mixture", ())):
        counts = None if tokens is None else mixing_of(corpus.train, 1).counts(int(tokens))
        length = len(corpus.parts[number].train)
        row["epochs"] = None if counts is None else float(counts[number]) / length
    return summary


def as_text(summary: Mapping[str, Any]) -> str:
    """Return the summary as text: one value per line, a mixture as a table."""
    mixture = summary.get("mixture", ())
    lines = [f"{name:<24}{_format(x)}" for name, x in summary.items() if name not in _NESTED]
    if mixture:
        columns = ["weight", "num_documents", "num_tokens", "epochs"]
        width = max(len("mixture"), *(len(part["label"]) for part in mixture))
        lines += ["", f"{'mixture':<{width}}" + "".join(f"{name:>16}" for name in columns)]
        for part in mixture:
            cells = "".join(f"{_format(part[name]):>16}" for name in columns)
            lines.append(f"{part['label']:<{width}}{cells}")
        for part in mixture:
            if "check_ids" in part:
                read = f"{part['num_checked_ids']:,} ids checked"
                lines += ["", f"{part['label']}: check_ids {part['check_ids']}, {read}"]
    for name, part in summary.get("validation", {}).items():
        numbers = f"{part['num_documents']:,} documents, {part['num_tokens']:,} tokens"
        lines += ["", f"validation {name}: {numbers}"]
        if common := part["num_in_training"]:
            lines[-1] += f"; WARNING: {common:,} of the documents are also in the training part"
    sources = [(f" of {part['label']}", part) for part in mixture] or [("", summary)]
    sources += [(f" of validation {x}", y) for x, y in summary.get("validation", {}).items()]
    for where, part in sources:
        if part.get("unknown_share"):
            lines += [
                "",
                f"WARNING: the tokenizer does not cover {part['unknown_share']:.0%} of the text"
                f"{where}; use one that was trained on similar text",
            ]
        if part.get("skipped"):
            lines += ["", f"left out{where}: {describe_skips(part['skipped'])}"]
            lines += [f"  {skipped['message']}" for skipped in part["skipped_first"]]
    for pair in summary.get("written", ()):
        lines += ["", *(f"{name:<24}{_format(x)}" for name, x in pair.items())]
    if summary["epochs"] is None:
        lines += ["", "epochs: unknown until parallel3d.mesh.dp or train_batch_size is a number"]
    return "\n".join(lines)


def describe_skips(skipped: Mapping[str, int]) -> str:
    """Return the counts and reasons of skipped documents as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "?" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
