"""Descriptions of a corpus: its summary, samples as the model sees them, document statistics."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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


def samples(corpus: Corpus, sequence_length: int, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the first `count` samples of a run, in the format of `--json`.

    A sample is from the mixture part `part`, and starts at its token `start`. Of each of its
    `fragments`, which are documents or parts of them: `begins` and `ends` are true if the document
    does so within the sample, `ids` has the end-of-text, and `text` is None without a tokenizer.
    Where tokens count unequally there are their `weights`, and `marked`, the text with those that
    count in brackets.
    """
    parts = corpus.parts or (corpus,)
    batches = Batches(corpus.train, sequence_length, seed)
    directory = corpus.tokenizer_directory
    tokenizer = load_tokenizer(directory) if any(directory.iterdir()) else None
    rows = []
    for index, (part, places, _) in enumerate(zip(*batches.places(0, count), strict=True)):
        stream = batches.streams[part]
        fragments = []
        numbers = np.searchsorted(stream.bounds, places, side="right") - 1
        cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) != 1)) + 1
        for own in np.split(places, cuts):
            start = int(own[0])
            stop = int(own[-1]) + 1
            if start < 0:
                continue
            number = int(np.searchsorted(stream.bounds, start, side="right")) - 1
            begin, end = stream.bounds[number : number + 2].tolist()
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
            if stream.weights is not None:
                weights = stream.weights[start:stop]
                fragment["weights"] = weights.tolist()
                fragment["marked"] = _marked(plain, weights, tokenizer)
            fragments.append(fragment)
        label = corpus.labels[part] if corpus.labels else ""
        rows.append(
            {"index": index, "part": label, "start": int(places[0]), "fragments": fragments}
        )
    return rows


def _marked(ids: list[int], weights: np.ndarray, tokenizer: Any) -> str:
    """Return the text of the ids, with the runs whose weights are above 0 in brackets."""
    counts = weights[: len(ids)] > 0
    cuts = np.flatnonzero(np.diff(counts)) + 1
    runs = []
    for own in np.split(np.arange(len(ids)), cuts):
        text = " ".join(str(ids[place]) for place in own)
        if tokenizer:
            text = str(tokenizer.decode([ids[place] for place in own]))
        is_trained = len(own) and counts[own[0]]
        runs.append(f"⟦{text}⟧" if is_trained else text)
    return "".join(runs)


def document_statistics(corpus: Corpus) -> dict[str, Any]:
    """Return lengths, bytes per token and repeated documents of a corpus or of each part."""
    if corpus.parts:
        parts = zip(corpus.labels, corpus.parts, strict=True)
        return {"parts": [{"part": label, **document_statistics(part)} for label, part in parts]}
    streams = [corpus.stream("train"), corpus.stream("held_out")]
    lengths = np.concatenate([np.diff(stream.bounds) - 1 for stream in streams])
    tokens = int(lengths.sum())
    size = corpus.facts.num_bytes
    return {
        "num_documents": len(lengths),
        "num_tokens": corpus.num_tokens,
        "document_tokens": {
            name: int(np.percentile(lengths, share, method="nearest"))
            for name, share in LENGTHS.items()
        }
        | {"mean": tokens / len(lengths)},
        "bytes_per_token": size / tokens if size and tokens else None,
        "num_repeated_documents": corpus.facts.num_repeated_documents,
    }


def show_samples(corpus: Corpus, shown: list[dict[str, Any]], out: "Console") -> None:
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
        for part in sample["fragments"]:
            how = "" if part["begins"] else " (continued)"
            out.print(Text(f"┌ {part['document']}{how}: {part['num_tokens']:,} tokens", "cyan"))
            text = part.get("marked", part["text"])
            if text is None:
                text = " ".join(map(str, part["ids"]))
            out.print(Padding(Text(_printable(text)), (0, 0, 0, 2)))
            end = "… continues"
            if part["ends"]:
                is_trained = "weights" in part and part["weights"][-1] > 0
                end = "└ ⟦end of text⟧" if is_trained else "└ end of text"
            out.print(Text(end, "cyan"))
    out.print()
    out.print(Rule(style="dim"))
    statistics = document_statistics(corpus)
    parts = statistics.get("parts") or [{"part": "the corpus", **statistics}]
    rows = []
    for name, key in _ROWS.items():
        rows.append((name, *(_format(part[key]) for part in parts)))
    for name in (*LENGTHS, "mean"):
        lengths = [_format(part["document_tokens"][name]) for part in parts]
        rows.append((f"tokens per document: {name}", *lengths))
    columns = [Column("", right=False), *(Column(part["part"]) for part in parts)]
    terminal.show(out, columns, rows)


def _printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a terminal does not execute them."""
    shown = []
    for character in text:
        if not character.isprintable() and character not in "\n\t":
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


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
    """Return the summary as text, one value per line, and so for each part and validation set."""
    sections = [("", summary)]
    sections += [(f"part: {part['label']}", part) for part in summary.get("mixture", ())]
    sections += [(f"validation: {x}", part) for x, part in summary.get("validation", {}).items()]
    sections += [("written", pair) for pair in summary.get("written", ())]
    lines = []
    for title, section in sections:
        lines += ["", title] if title else []
        lines += [f"{name:<24}{_format(x)}" for name, x in section.items() if name not in _NESTED]
        common = section.get("num_in_training")
        if common:
            lines.append(f"WARNING: {common:,} of the documents are also in the training part")
        share = section.get("unknown_share")
        if share:
            lines.append(
                f"WARNING: the tokenizer does not cover {share:.0%} of the text; use one that was"
                " trained on similar text"
            )
        if section.get("skipped"):
            lines.append(f"left out: {describe_skips(section['skipped'])}")
            lines += [f"  {skipped['message']}" for skipped in section["skipped_first"]]
    if summary["epochs"] is None:
        lines += ["", "epochs: unknown until parallel3d.mesh.dp or train_batch_size is a number"]
    return "\n".join(lines)


def describe_skips(skipped: Mapping[str, int]) -> str:
    """Return the counts and reasons of skipped documents as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items())


def _format(value: object) -> str:
    if value is None:
        return "?"
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
