"""Data sets of the Hugging Face hub or of a folder, loaded and cached by `datasets`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.errors import DataError
from parallel3d.base.hub_access import why_unreachable

if TYPE_CHECKING:
    from datasets import Dataset

# Written by Dataset.save_to_disk and DatasetDict.save_to_disk; load_dataset cannot read them.
SAVED = ("state.json", "dataset_dict.json")


def arrow_files(
    name: str, subset: str | None, split: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return paths, names and rows of the Arrow files that hold the split, in order.

    - `name`: a name on the hub, or a folder of jsonl, parquet, text or csv files, or one written by
      `save_to_disk`
    - `split`: a split, a part of one such as "train[:50%]", or a sum of these
    - rows: for each file the first row and the end (exclusive), from 1; empty for complete splits

    Code of data sets is never executed. Raises DataError if the split cannot be loaded.
    """
    place = f"data.name = {name!r}" + (f", subset {subset!r}" if subset else "")
    bases = dict.fromkeys(part.partition("[")[0] for part in split.split("+"))
    files_of = {base: _files(_load(name, subset, base, place), name, base, place) for base in bases}
    if split in files_of:
        paths, names, _ = zip(*files_of[split], strict=True)
        return paths, names, ()
    import datasets

    lengths = {base: sum(count for _, _, count in files) for base, files in files_of.items()}
    try:
        instructions = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f'{place}: split {split!r} is invalid ({error}); write a part as "train[:50%]" or'
            ' "train[1000:2000]"'
        ) from None
    cut = []
    for part in instructions:
        before = 0
        for path, label, count in files_of[part.splitname]:
            first, end = max(part.from_, before), min(part.to, before + count)
            if first < end:
                cut.append((path, label, (first - before + 1, end - before + 1)))
            before += count
    if not cut:
        raise DataError(f"{place}: split {split!r} has no rows; use another split")
    paths, names, rows = zip(*cut, strict=True)
    return paths, names, rows


def _files(table: "Dataset", name: str, split: str, place: str) -> list[tuple[str, str, int]]:
    """Return path, name and number of rows of each Arrow file of a complete split."""
    paths = [file["filename"] for file in table.cache_files]
    if not len(table):
        raise DataError(f"{place}: split {split!r} has no rows; use another split")
    counts = [_num_rows(path) for path in paths]
    if sum(counts) != len(table):
        raise DataError(
            f"{place}: split {split!r} is a selection of its files' rows; call flatten_indices,"
            " then save_to_disk, and use that folder"
        )
    labels = [f"{name} {split}" + (f" ({Path(path).name})" if paths[1:] else "") for path in paths]
    return list(zip(paths, labels, counts, strict=True))


def has_split(name: str, subset: str | None, split: str) -> bool:
    """True if the data set has a split of this name.

    If this cannot be determined, print a warning on standard error and return False.
    """
    import datasets

    folder = Path(name).expanduser()
    if any((folder / file).is_file() for file in SAVED):
        index = folder / "dataset_dict.json"
        return index.is_file() and split in json.loads(index.read_text())["splits"]
    try:
        if not folder.is_dir() and (why := why_unreachable()):
            if any(_cached(name).rglob(f"*-{split}*.arrow")):
                return True
            raise ConnectionError(f"the hub is unreachable: {why}")
        splits = datasets.get_dataset_split_names(str(folder) if folder.is_dir() else name, subset)
        return split in splits
    # Broad, as in _load. Training can continue without this validation set.
    except Exception as error:
        print(
            f"WARNING: data.name = {name!r}: cannot determine whether there is a split {split!r} "
            f"({_reason(error)}); training continues without this validation set. To silence this"
            " warning, set data.validation_split to null",
            file=sys.stderr,
        )
        return False


def arrow_files_of_parquet(paths: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return paths and names of the Arrow files in which `datasets` caches parquet files."""
    place = f"data.paths: {paths[0]!r}" + (f" and {len(paths) - 1} more" if paths[1:] else "")
    table = _load("parquet", None, "train", place, list(paths))
    files = tuple(file["filename"] for file in table.cache_files)
    if not files:
        raise DataError(f"{place} has no rows; leave it out")
    name = paths[0] if not paths[1:] else "parquet"
    return files, tuple(f"{name} ({Path(path).name})" for path in files)


def _load(
    name: str, subset: str | None, split: str, place: str, files: list[str] | None = None
) -> "Dataset":
    import datasets

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise DataError(
            f"{place} is not a folder; use the path of a folder, or a name such as owner/dataset"
        )
    shown = datasets.are_progress_bars_disabled()
    # The progress bars of `datasets` would disturb ours.
    datasets.disable_progress_bars()
    try:
        if any((folder / file).is_file() for file in SAVED):
            saved = datasets.load_from_disk(str(folder))
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise ValueError(f"the splits are {', '.join(saved)}")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        if files:
            return datasets.load_dataset(name, data_files=files, split=split)
        if not folder.is_dir() and (why := why_unreachable()) and not _cached(name).is_dir():
            raise ConnectionError(f"not a local folder, and the hub is unreachable: {why}")
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    # Broad: `datasets` passes on any error of the network, of file formats, of unknown names.
    except Exception as error:
        raise DataError(
            f"{place}: split {split!r} cannot be loaded ({_reason(error)}); check name, subset"
            " and split. Without network access, download the data set elsewhere and set data.name"
            " to its folder"
        ) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _cached(name: str) -> Path:
    """Return the folder in which `datasets` caches a data set of the hub."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___"))


def _reason(error: Exception) -> str:
    """Return the first line of an error."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _num_rows(path: str) -> int:
    import pyarrow as pa

    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as stream:
        return sum(batch.num_rows for batch in stream)
