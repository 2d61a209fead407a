"""Files with a URL, such as s3://bucket/file, read in ranges through fsspec.

fsspec comes with `datasets`; the file system of a protocol is a package of its own (s3fs, gcsfs).
Credentials are that package's affair, and fsspec's own config files'.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from parallel3d.base.errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Range(NamedTuple):
    """Bytes start .. end - 1 of a file."""

    path: str
    start: int
    end: int


def is_url(path: str) -> bool:
    """Whether a path names a protocol."""
    return "://" in path


def size_of(url: str) -> int | None:
    """A file's size in bytes; None where there is no such file."""
    with _system_of(url) as (system, path):
        return int(system.size(path)) if system.isfile(path) else None


def version_of(url: str) -> str:
    """A value that changes with the file's contents, as far as its file system knows."""
    with _system_of(url) as (system, path):
        return str(system.ukey(path))


def open_url(url: str) -> BinaryIO:
    """Open a file to read its head."""
    with _system_of(url) as (system, path):
        return cast(BinaryIO, system.open(path, "rb", block_size=2**16))


def matching(pattern: str) -> list[str]:
    """The URLs of the files that a URL or a glob of them names, sorted.

    Raises DataError if it names none.
    """
    with _system_of(pattern) as (system, path):
        paths = [path] if system.isfile(path) else system.glob(path)
        found = sorted(str(system.unstrip_protocol(p)) for p in paths if system.isfile(p))
    if not found:
        raise DataError(
            f"data.paths: {pattern!r} matches no file there; give the URL of a file, or a glob"
        )
    return found


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range; those in a folder are requested at once where its system can.

    Raises DataError where a file has fewer.
    """
    found: list[bytes] = []
    for _, group in groupby(ranges, lambda wanted: wanted.path.rpartition("/")[0]):
        urls, starts, ends = zip(*group, strict=True)
        names = [url.rpartition("/")[2] for url in urls]
        with _system_of(urls[0]) as (system, path):
            paths = [path.removesuffix(names[0]) + name for name in names]
            found += system.cat_ranges(paths, list(starts), list(ends), on_error="raise")
    for wanted, data in zip(ranges, found, strict=True):
        if len(data) != wanted.end - wanted.start:
            raise DataError(
                f"{wanted.path} has fewer than the {wanted.end:,} bytes that belong to its"
                " documents: it shrank since it was prepared; write it again"
            )
    return found


@contextmanager
def _system_of(url: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """The file system of a URL, and the path there; names the URL in whatever is raised."""
    try:
        # Half a second to import, for those who name a URL.
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} cannot be read: {error}; pip install parallel3d[remote], or the package that"
            " fsspec has for this protocol"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be read ({reason}); check its name, your credentials and the network"
        ) from error
