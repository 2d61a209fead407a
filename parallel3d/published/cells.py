"""The cells of a table of published runs, checked (floor 0)."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel3d.errors import ConfigError

COLUMNS = (
    "source_id", "model_name", "params_b", "n_layers", "hidden", "heads", "kv_heads", "ffn_hidden",
    "vocab", "seq_len", "gpu", "n_gpus", "tp", "pp", "cp", "dp", "zero_stage", "virtual_pp",
    "micro_batch", "global_batch_seqs", "recompute", "precision", "measured_tflops_per_gpu",
    "tflops_convention", "measured_mfu", "measured_iter_time_s", "measured_memory_gb", "notes",
    "measured_tokens_per_s_per_gpu", "offload", "attn_flops_convention",
)  # fmt: skip
WHOLE = (
    "n_layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len", "n_gpus", "tp",
    "pp", "cp", "dp", "virtual_pp", "micro_batch", "global_batch_seqs",
)  # fmt: skip
REAL = (
    "params_b", "measured_tflops_per_gpu", "measured_mfu", "measured_iter_time_s",
    "measured_memory_gb", "measured_tokens_per_s_per_gpu",
)  # fmt: skip


class Unusable(Exception):
    """Why a row cannot be used."""


def cells_of(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line in the file, column -> text) of every row."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            if absent := [name for name in COLUMNS if name not in columns]:
                raise ConfigError(
                    f"{path}, line 1: the columns {', '.join(absent)} are missing; a table of "
                    f"published runs has: {', '.join(COLUMNS)}"
                )
            return [
                (reader.line_num, {name: (row[name] or "").strip() for name in columns if name})
                for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(
            f"{path}: cannot be read as a csv table ({problem}); give the path of a table with the "
            "columns of published_throughput.csv"
        ) from None


def numbers_of(line: int, cells: Mapping[str, str]) -> dict[str, Any]:
    """The columns that hold numbers, checked."""
    found: dict[str, Any] = {}
    for name in (*WHOLE, *REAL):
        if text := cells[name]:
            kind = "a whole number above 0" if name in WHOLE else "a number above 0"
            value = _number(text)
            if value is None or value <= 0 or (name in WHOLE and value != int(value)):
                raise Unusable(
                    f'line {line}: {name} = "{text}" is not {kind}; correct the cell or empty it'
                )
            found[name] = int(value) if name in WHOLE else value
    return found


def _number(text: str) -> float | None:
    """A number, or the middle of a range such as 45-46K."""
    match = re.fullmatch(r"([\d.]+)-([\d.]+)(K?)", text)
    try:
        if match:
            low, high, thousands = match.groups()
            scale = 1000 if thousands else 1
            return (float(low) + float(high)) / 2 * scale
        value = float(text)
    except ValueError:
        return None
    return value if value < float("inf") else None
