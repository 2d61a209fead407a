"""Summary of a corpus for prepare.py: values by name, and as text for a terminal."""

from collections.abc import Mapping
from typing import Any

from parallel3d.data.corpus import Corpus

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
