"""What a corpus says of each token: its id, and how much it counts in the loss."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.data.ids.blocks import SET_BYTES, BlockCache
from parallel3d.data.ids.counting import TokenWeights
from parallel3d.data.ids.remote import is_url
from parallel3d.data.ids.spans import Spans, check_sizes
from parallel3d.data.ids.through_cache import RemoteFiles


def tokens_of(
    directory: Path, meta: Mapping[str, Any], bounds: np.ndarray, remote_cache_bytes: int
) -> list[np.ndarray] | list[Spans]:
    """Give the ids of the training and the held-out part."""
    num_train, dtype = meta["num_train_documents"], np.dtype(meta["dtype"])
    if "files" not in meta:
        tokens = np.asarray(np.memmap(directory / "tokens.bin", dtype=dtype, mode="r"))
        return np.split(tokens, [int(bounds[num_train])])
    starts = np.memmap(directory / "starts.bin", dtype=np.int64, mode="r")
    remote = _remote(directory, meta["files"], remote_cache_bytes)
    return _spans(
        directory, meta["files"], bounds, starts, num_train, meta["end_of_text"], dtype, remote
    )


def weights_of(
    directory: Path, meta: Mapping[str, Any], bounds: np.ndarray, remote_cache_bytes: int
) -> list[TokenWeights] | list[None]:
    """Give how much the tokens of both parts count, where not all count alike."""
    if "weights" not in meta:
        return [None, None]
    files, are_labels = meta["weights"], meta["found"]["weights"].startswith("labels")
    starts = np.memmap(directory / "weight_starts.bin", dtype=np.int64, mode="r")
    remote = _remote(directory, files, remote_cache_bytes)
    dtype = np.dtype(np.int64 if are_labels else np.float64)
    num_train = meta["num_train_documents"]
    # Between documents stands an end-of-text, which counts.
    found = _spans(directory, files, bounds, starts, num_train, 1, dtype, remote)
    return [TokenWeights(numbers, are_labels) for numbers in found]


def _spans(
    directory: Path,
    files: Sequence[dict[str, Any]],
    bounds: np.ndarray,
    starts: np.ndarray,
    num_train: int,
    between: int,
    dtype: np.dtype,
    remote: RemoteFiles | None,
) -> list[Spans]:
    """Give what other programs' files have of the documents of the training and the other part."""
    check_sizes(files)
    places = np.load(directory / "places.npy", mmap_mode="r", allow_pickle=False)["file"]
    return [
        Spans(
            files=files,
            places=places[first:end],
            starts=starts[first:end],
            bounds=bounds[first : end + 1],
            end_of_text=between,
            dtype=dtype,
            remote=remote,
        )
        for first, end in ((0, num_train), (num_train, len(places)))
    ]


def _remote(
    directory: Path, files: Sequence[Mapping[str, Any]], cache_bytes: int
) -> RemoteFiles | None:
    """Give the files that are named by a URL; their blocks are kept beside all corpora."""
    if not (sizes := {file["path"]: file["size"] for file in files if is_url(file["path"])}):
        return None
    cache = None
    if cache_bytes >= SET_BYTES:
        cache = BlockCache(directory.parents[1] / "remote" / "blocks", cache_bytes)
    return RemoteFiles(sizes, directory.name, cache)
