"""Data sets of the Hugging Face hub, or folders of one: found and cached by `datasets`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from parallel3d.base.errors import DataError
from parallel3d.base.hub_access import why_unreachable

if TYPE_CHECKING:
    from datasets import Dataset

# Dataset.save_to_disk and DatasetDict.save_to_disk leave them; load_dataset does not read these.
SAVED = ("state.json", "dataset_dict.json")


def arrow_files(
    name: str, subset: str | None, split: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Return paths of the Arrow files that hold the split, in order, their names, and their rows.

    `name` is a name on the hub or a folder: of jsonl, parquet, text or csv files, or one that
    `save_to_disk` wrote. `split` may be a part of one, "train[:50%]", or a sum; only then each
    file's first row and the end of its part, from 1, come third. No code of a data set is run.
    Raises DataError.
    """
    place = f"data.name={name!r}" + (f", subset {subset!r}" if subset else "")
    bases = dict.fromkeys(part.partition("[")[0] for part in split.split("+"))
    whole = {base: _files(_load(name, subset, base, place), name, base, place) for base in bases}
    if split in whole:
        paths, names, _ = zip(*whole[split], strict=True)
        return paths, names, ()
    import datasets

    lengths = {base: sum(count for _, _, count in files) for base, files in whole.items()}
    try:
        asked = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise DataError(
            f'{place}, split {split!r} is no part of it ({error}); write "train[:50%]" or'
            ' "train[1000:2000]"'
        ) from None
    cut = []
    for part in asked:
        before = 0
        for path, label, count in whole[part.splitname]:
            first, end = max(part.from_, before), min(part.to, before + count)
            if first < end:
                cut.append((path, label, (first - before + 1, end - before + 1)))
            before += count
    if not cut:
        raise DataError(f"{place}, split {split!r} has no rows; use another split")
    paths, names, rows = zip(*cut, strict=True)
    return paths, names, rows


def _files(table: "Dataset", name: str, split: str, place: str) -> list[tuple[str, str, int]]:
    """Return path, name and number of rows of each Arrow file of a whole split."""
    paths = [file["filename"] for file in table.cache_files]
    if not len(table):
        raise DataError(f"{place}, split {split!r} has no rows; use another split")
    counts = [_num_rows(path) for path in paths]
    if sum(counts) != len(table):
        raise DataError(
            f"{place}, split {split!r} is a selection of its files' rows; save it with"
            " save_to_disk after flatten_indices, and give that folder"
        )
    labels = [f"{name} {split}" + (f" ({Path(path).name})" if paths[1:] else "") for path in paths]
    return list(zip(paths, labels, counts, strict=True))


def has_split(name: str, subset: str | None, split: str) -> bool:
    """True if a data set that can be loaded has a split of this name.

    If it cannot be asked, no, with a line on standard error: a validation set may be missing.
    """
    import datasets

    folder = Path(name).expanduser()
    if any((folder / file).is_file() for file in SAVED):
        splits = folder / "dataset_dict.json"
        return splits.is_file() and split in json.loads(splits.read_text())["splits"]
    try:
        if not folder.is_dir() and (why := why_unreachable()):
            if any(_cached(name).rglob(f"*-{split}*.arrow")):
                return True
            raise ConnectionError(f"the hub cannot be asked: {why}")
        found = datasets.get_dataset_split_names(str(folder) if folder.is_dir() else name, subset)
        return split in found
    # Broad, as in _load: a hub that cannot be asked now is no reason not to train.
    except Exception as error:
        print(
            f"WARNING: data.name={name!r} could not be asked for a split {split!r} "
            f"({_reason(error)}): without it there is no such validation set; reach the hub, or set"
            " data.validation_split to null",
            file=sys.stderr,
        )
        return False


def arrow_files_of_parquet(paths: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return paths of the Arrow files in which `datasets` caches parquet files, and names."""
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
        raise DataError(f"{place} is no folder; give a folder, or a name such as owner/dataset")
    shown = datasets.are_progress_bars_disabled()
    # Its bars, one for each step, would tear ours.
    datasets.disable_progress_bars()
    try:
        if any((folder / file).is_file() for file in SAVED):
            saved = datasets.load_from_disk(str(folder))
            if isinstance(saved, datasets.DatasetDict) and split not in saved:
                raise ValueError(f"it has the splits {', '.join(saved)}")
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
        if files:
            return datasets.load_dataset(name, data_files=files, split=split)
        if not folder.is_dir() and (why := why_unreachable()) and not _cached(name).is_dir():
            raise ConnectionError(f"it is no folder here, and the hub cannot be asked: {why}")
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, subset, split=split)
    # Broad, because what goes wrong inside comes as it is: network, file format, unknown names.
    except Exception as error:
        raise DataError(
            f"{place}, split {split!r} cannot be loaded ({_reason(error)}); check name, subset"
            " and split. Without a network, download it where there is one, and give the folder"
        ) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()


def _cached(name: str) -> Path:
    """Return the folder in which `datasets` keeps a data set of the hub."""
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
