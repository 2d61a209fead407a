"""What is in a corpus: its summary, the samples a model will see, statistics of documents."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel3d.data.batches import Batches
from parallel3d.data.corpus import Corpus
from parallel3d.data.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rich.console import RenderableType

LENGTHS = {"shortest": 0, "5%": 5, "median": 50, "95%": 95, "longest": 100}


def samples(corpus: Corpus, sequence_length: int, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the first `count` samples of a run, as `--json` writes them.

    A sample is the window of a `part` that starts at the token `start`. Its `fragments` are the
    parts of documents there: whether the document `begins` and `ends` in the sample, its ids with
    end-of-text, and its text, None without a tokenizer.
    """
    parts = corpus.parts or (corpus,)
    batches = Batches(corpus.train, sequence_length, seed)
    directory = corpus.tokenizer_directory
    tokenizer = load_tokenizer(directory) if any(directory.iterdir()) else None
    found = []
    for index, (part, window) in enumerate(zip(*batches.windows(0, count), strict=True)):
        stream, first = batches.streams[part], int(window)
        bounds = stream.bounds
        fragments = []
        document = int(np.searchsorted(bounds, first, side="right")) - 1
        after = int(np.searchsorted(bounds, first + sequence_length))
        for number in range(document, after):
            begin, end = int(bounds[number]), int(bounds[number + 1])
            start, stop = max(first, begin), min(first + sequence_length, end)
            ids = np.asarray(stream.tokens[start:stop]).tolist()
            plain = ids[:-1] if stop == end else ids
            fragment = {
                "document": parts[part].name(number),
                "num_tokens": stop - start,
                "begins": start == begin,
                "ends": stop == end,
                "text": str(tokenizer.decode(plain)) if tokenizer else None,
                "ids": ids,
            }
            fragments.append(fragment)
        label = corpus.labels[part] if corpus.labels else ""
        found.append({"index": index, "part": label, "start": first, "fragments": fragments})
    return found


def described(corpus: Corpus) -> dict[str, Any]:
    """Return lengths, bytes per token and repeated documents of a corpus, or of each part."""
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


def on_terminal(corpus: Corpus, found: list[dict[str, Any]], isolated: bool) -> "RenderableType":
    """Return samples and description as a terminal shows them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.rule import Rule
    from rich.text import Text

    lines: list[Any] = []
    for sample in found:
        tokens = sum(part["num_tokens"] for part in sample["fragments"])
        of = f" of {sample['part']}" if sample["part"] else ""
        title = f"sample {sample['index']}{of}: {tokens:,} tokens from token {sample['start']:,} on"
        lines.append("")
        lines.append(Rule(Text(title, style="bold"), align="left", style="dim"))
        for number, part in enumerate(sample["fragments"]):
            if number and isolated:
                lines.append(Text("positions restart; nothing before is seen from here", "dim"))
            how = "" if part["begins"] else ", from its middle"
            count = f"{part['num_tokens']:,} token{'s' * (part['num_tokens'] != 1)}"
            lines.append(Text(f"┌ {part['document']}{how}: {count}", "cyan"))
            text = " ".join(map(str, part["ids"])) if part["text"] is None else part["text"]
            lines.append(Padding(Text(_printable(text)), (0, 0, 0, 2)))
            lines.append(Text("└ end of text" if part["ends"] else "… goes on", "cyan"))
    lines += ["", Rule(style="dim"), _table(corpus)]
    return Group(*lines)


def _table(corpus: Corpus) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found = described(corpus)
    parts = found.get("parts") or [{"part": "the corpus", **found}]
    table.add_column("")
    for part in parts:
        table.add_column(part["part"], justify="right", overflow="fold")
    rows = {
        "documents": "num_documents",
        "of them repeated": "num_repeated_documents",
        "tokens": "num_tokens",
        "bytes per token": "bytes_per_token",
    }
    for name, key in rows.items():
        table.add_row(name, *(_shown(part[key]) for part in parts))
    for name in parts[0]["document_tokens"]:
        lengths = [_shown(part["document_tokens"][name]) for part in parts]
        table.add_row(f"tokens of a document: {name}", *lengths)
    return table


def _printable(text: str) -> str:
    """Escape the control characters of a text, which a terminal would obey."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


_LISTS = ("mixture", "validation", "written", "skipped", "skipped_first", "show")  # not on a line


def describe(corpus: Corpus, tokens: float | None) -> dict[str, Any]:
    """Return the summary of a corpus, with the epochs of each part in a run of `tokens` tokens."""
    summary = corpus.summary()
    summary["epochs"] = None if tokens is None else tokens / len(corpus.train)
    for part, described in zip(corpus.parts, summary.get("mixture", ()), strict=True):
        share = described["weight"] / len(part.train)
        described["epochs"] = None if tokens is None else tokens * share
    return summary


def as_text(summary: dict[str, Any]) -> str:
    """Return the summary as text: a value a line, a mixture as a table."""
    mixture = summary.get("mixture", ())
    lines = [f"{name:<24}{_shown(x)}" for name, x in summary.items() if name not in _LISTS]
    if mixture:
        columns = ["weight", "num_documents", "num_tokens", "epochs"]
        width = max(len("mixture"), *(len(part["label"]) for part in mixture))
        lines += ["", f"{'mixture':<{width}}" + "".join(f"{name:>16}" for name in columns)]
        for part in mixture:
            cells = "".join(f"{_shown(part[name]):>16}" for name in columns)
            lines.append(f"{part['label']:<{width}}{cells}")
        for part in mixture:
            if "check_ids" in part:
                read = f"{part['num_checked_ids']:,} ids read"
                lines += ["", f"{part['label']}: check_ids {part['check_ids']}, {read}"]
    for name, found in summary.get("validation", {}).items():
        numbers = f"{found['num_documents']:,} documents, {found['num_tokens']:,} tokens"
        lines += ["", f"validation {name}: {numbers}"]
        if common := found["num_in_training"]:
            lines[-1] += f"; WARNING: {common:,} of the documents are trained on, too"
    sources = [(f" of {part['label']}", part) for part in mixture] or [("", summary)]
    sources += [(f" of validation {x}", y) for x, y in summary.get("validation", {}).items()]
    for where, part in sources:
        if part.get("unknown_share"):
            lines += [
                "",
                f"WARNING: the tokenizer does not know {part['unknown_share']:.0%} of the text"
                f"{where}; use one that was made for it",
            ]
        if part.get("skipped"):
            lines += ["", f"left out{where}: {reasons(part['skipped'])}"]
            lines += [f"  {skipped['message']}" for skipped in part["skipped_first"]]
    for pair in summary.get("written", ()):
        lines += ["", *(f"{name:<24}{_shown(x)}" for name, x in pair.items())]
    if summary["epochs"] is None:
        lines += ["", "epochs are known once parallel3d.mesh.dp or train_batch_size is a number"]
    return "\n".join(lines)


def reasons(skipped: Mapping[str, int]) -> str:
    """Return the reasons for which documents were left out, with counts, in words."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "?" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
