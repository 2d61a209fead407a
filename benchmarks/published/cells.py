"""The cells of a table of published runs, checked."""

import codecs
import csv
import io
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.base.errors import ConfigError

COLUMNS = (
    "source_id",
    "model_name",
    "params_b",
    "n_layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "cp",
    "dp",
    "zero_stage",
    "virtual_pp",
    "micro_batch",
    "global_batch_seqs",
    "recompute",
    "precision",
    "measured_tflops_per_gpu",
    "tflops_convention",
    "measured_mfu",
    "measured_iter_time_s",
    "measured_memory_gb",
    "notes",
    "measured_tokens_per_s_per_gpu",
    "offload",
    "attn_flops_convention",
)
OPTIONAL = (
    "program",
    "network_gbps",
    "devices_per_node",
    "attention_kernel",
    "kernels",
    "virtual_stages",
    "ep",
    "seq_parallel",
)
ABOUT = ("source_title", "source_ref", "verified_how")  # say where a row is from, not how it ran

# The most that a cell may hold: several times what anybody has published, so that what lies above
# is a slip of the pen, and the planner need not build it to find that out.
WHOLE = {
    "n_layers": 2_000,
    "hidden": 1_000_000,
    "heads": 10_000,
    "kv_heads": 10_000,
    "ffn_hidden": 10_000_000,
    "vocab": 100_000_000,
    "seq_len": 100_000_000,
    "n_gpus": 10_000_000,
    "tp": 10_000,
    "pp": 10_000,
    "cp": 10_000,
    "dp": 10_000_000,
    "ep": 10_000,
    "virtual_pp": 10_000,
    "virtual_stages": 10_000,
    "devices_per_node": 10_000,
    "micro_batch": 1_000_000,
    "global_batch_seqs": 10_000_000,
}
REAL = {
    "params_b": 1e6,
    "measured_tflops_per_gpu": 1e5,
    "measured_mfu": 100.0,
    "measured_iter_time_s": 1e7,
    "measured_memory_gb": 1e4,
    "measured_tokens_per_s_per_gpu": 1e9,
    "network_gbps": 1600.0,
}
UNITS = {
    "measured_mfu": " per cent",
    "network_gbps": " Gb/s for one device (a node's by its devices)",
}
LARGEST = 64 * 2**20  # bytes of a table that are read
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_RANGE = re.compile(r"(\d+\.?\d*)-(\d+\.?\d*)(K?)", re.ASCII)


# What a column that a row cannot do without has to say; the report asks once for each column.
QUESTIONS = {
    "program": "the training program, by a name in benchmarks/published/programs.py",
    "gpu": "the chip, by the name of a file in configs/hardware",
    "n_gpus": "the number of devices",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "zero_stage": "0, 1, 2 or 3, or FSDP",
    "micro_batch": "sequences of a microbatch on one data-parallel rank",
    "global_batch_seqs": "sequences of a step on all devices",
    "model_name": "a known model, or gpt or llama for one that is built alike",
    "n_layers": "transformer blocks",
    "hidden": "width of the residual stream",
    "heads": "attention heads",
    "vocab": "number of entries of the vocabulary",
    "seq_len": "tokens of a sequence",
    "tflops_convention": '"hardware" if the FLOP/s count recomputation, else "model"',
}


class UnusableRow(Exception):
    """The reason why a row cannot be used.

    `rule`: the same reason without what is the row's own. `asks`: columns, of QUESTIONS, that would
    make the row usable if they were filled.
    """

    def __init__(self, reason: str, rule: str = "", asks: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.rule = rule or reason
        self.asks = tuple(asks)


class CsvLine(NamedTuple):
    """A row of the file: its line number, its cells by column, and what is wrong with all of it."""

    number: int
    cells: dict[str, str]
    wrong: UnusableRow | None


def cells_of(path: Path) -> list[CsvLine]:
    """Every row of a csv table, blank lines left out.

    Commas, semicolons or tabs separate; UTF-8 or UTF-16, with or without a byte order mark. Raises
    ConfigError where the file cannot be read, lacks columns or holds no row.
    """
    text = _text(path)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text), strict=True)
    try:
        columns = _columns(path, next(filter(any, reader), []))
        lines = [_line(reader.line_num, columns, row) for row in reader if row]
    except csv.Error as problem:
        raise ConfigError(
            f"{path}, line {reader.line_num}: cannot be read as a csv table ({problem}); close the "
            "quotation marks, and double those within a cell"
        ) from None
    if not lines:
        raise ConfigError(f"{path}: has no row below its header; write one run a line")
    return lines


def _text(path: Path) -> str:
    remedy = "give the path of a table with the columns of published_throughput.csv"
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = raw.decode("utf-16" if wide else "utf-8-sig")
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise ConfigError(f"{path}: cannot be read as a csv table ({reason}); {remedy}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(
            f"{path}: cannot be read as a csv table (no UTF-8 text: {problem.reason} at byte "
            f"{problem.start}); save it as UTF-8, or {remedy}"
        ) from None
    except ValueError as problem:  # a NUL in the path
        raise ConfigError(f"{str(path)!r}: cannot be read ({problem}); {remedy}") from None
    if len(raw) > LARGEST:
        raise ConfigError(f"{path}: is larger than {LARGEST // 2**20} MiB; {remedy}")
    return text


def _delimiter(text: str) -> str:
    header = next((line for line in text[:65536].splitlines() if line.strip()), "")
    return max(",;\t", key=header.count)


def _columns(path: Path, header: Sequence[str]) -> list[str]:
    """The names of the first line, checked."""
    names = [name.strip() for name in header]
    place = f"{path}, line 1"
    known = (*COLUMNS, *OPTIONAL)
    if not set(names) & set(known):
        raise ConfigError(
            f"{place}: the file is empty or names no column of a table of published runs; the "
            f"first line is to hold: {', '.join(COLUMNS)}"
        )
    if twice := sorted({name for name in names if name in known and names.count(name) > 1}):
        raise ConfigError(f"{place}: the columns {', '.join(twice)} stand twice; leave one of each")
    needed = [name for name in COLUMNS if name != "virtual_pp" or "virtual_stages" not in names]
    if absent := [name for name in needed if name not in names]:
        raise ConfigError(
            f"{place}: the columns {', '.join(absent)} are missing; add them, with empty cells "
            "where nothing is known"
        )
    for name in names:
        near = get_close_matches(name.lower(), OPTIONAL, 1, 0.8)
        if name not in known and near and near[0] not in names:
            raise ConfigError(f"{place}: the column {name} is not known; is it {near[0]}?")
    return names


def _line(number: int, columns: Sequence[str], row: Sequence[str]) -> CsvLine:
    texts = [text.strip() for text in row]
    cells = dict.fromkeys((*COLUMNS, *OPTIONAL), "")
    cells |= {name: text for name, text in zip(columns, texts, strict=False) if name}
    wrong = None
    if not any(texts):
        wrong = UnusableRow("the row is empty")
    elif len(texts) != len(columns):
        wrong = UnusableRow(
            f"line {number} has {len(texts)} cells, the header {len(columns)}; put a text that "
            "holds the separator in quotation marks, and write empty cells as such",
            "it has more or fewer cells than the header",
        )
    elif any("\0" in text for text in texts):
        wrong = UnusableRow(f"line {number} holds a NUL character; remove it", "a NUL character")
    return CsvLine(number, cells, wrong)


def numbers_of(line: int, cells: Mapping[str, str]) -> dict[str, Any]:
    """The columns of a row that hold numbers, checked; a vocabulary in words is not among them."""
    found: dict[str, Any] = {}
    for name, most in (*WHOLE.items(), *REAL.items()):
        text = cells[name]
        if not text or (name == "vocab" and in_words(text)):
            continue
        whole = name in WHOLE
        value = _number(text, ranges=not whole)
        if value is None or not 0 < value < float("inf") or (whole and value != int(value)):
            rule = f"is not {'a whole number' if whole else 'a number'} above 0"
            remedy = "correct the cell or empty it"
            if "," in text:
                remedy = "write a decimal point, and no separator of thousands"
            raise UnusableRow(f'line {line}: {name} = "{text}" {rule}; {remedy}', f"{name} {rule}")
        if value > most:
            rule = f"is above {most:,.0f}{UNITS.get(name, ', more than anybody has run')}"
            raise UnusableRow(
                f'line {line}: {name} = "{text}" {rule}; correct the cell', f"{name} {rule}"
            )
        found[name] = int(value) if whole else value
    return found


def in_words(text: str) -> bool:
    """Whether a cell says in words what other rows say in a number ("Llama 3's")."""
    words = re.search(r"[A-Za-z]{3}", text) or _THOUSANDS.fullmatch(text)
    return bool(words) and text.lower().lstrip("+-") not in _NO_NUMBERS


_NO_NUMBERS = {"nan", "inf", "infinity"}
_EXACT = re.compile(r"(?<![\w.,])(\d{1,3}(?:,\d{3})+|\d{4,})(?![\w.])", re.ASCII)
_THOUSANDS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?(?:k|thousand)\b", re.ASCII | re.IGNORECASE)


def number_in(text: str) -> int | None:
    """The size that words state: "50,257 tokens", or rounded to thousands, "a 250k vocabulary"."""
    if match := _EXACT.search(text):
        return int(match.group(1).replace(",", ""))
    return round(float(match.group(1)) * 1000) if (match := _THOUSANDS.search(text)) else None


def _number(text: str, ranges: bool) -> float | None:
    """A number, or the middle of a range such as 45-46K."""
    if _NUMBER.fullmatch(text):
        return float(text)
    if ranges and (match := _RANGE.fullmatch(text)):
        low, high, thousands = match.groups()
        return (float(low) + float(high)) / 2 * (1000 if thousands else 1)
    return None
