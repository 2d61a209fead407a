"""The shards of streams in any file system, by paths or URLs such as s3://bucket/file.

They are read through fsspec, a dependency of `datasets`. The file system of a protocol is a
separate package (s3fs, gcsfs), which also handles credentials.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from parallel3d.base.errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def is_url(path: str) -> bool:
    """True if `path` has a protocol."""
    return "://" in path


def is_file(path: str) -> bool:
    """True if a file with this path or URL exists."""
    if not is_url(path):
        return os.path.isfile(path)
    with system_of(path) as (system, inner):
        return bool(system.isfile(inner))


def matching_urls(pattern: str) -> list[str]:
    """Return the sorted URLs of the files that match a URL or glob; raise DataError if none do."""
    with system_of(pattern) as (system, path):
        paths = [path] if system.isfile(path) else system.glob(path)
        urls = sorted(str(system.unstrip_protocol(p)) for p in paths if system.isfile(p))
    if not urls:
        raise DataError(
            f"data.paths: {pattern!r} matches no file; use the URL of a file, or a glob"
        )
    return urls


@contextmanager
def system_of(url: str) -> Iterator[tuple["AbstractFileSystem", str]]:
    """Yield the file system of a URL or path, and the path in it; turn errors into DataErrors."""
    try:
        # The import takes half a second; a run whose data are not streamed does not need it.
        from fsspec.core import url_to_fs

        yield url_to_fs(url)
    except ImportError as error:
        raise DataError(
            f"{url} cannot be read: {error}; run `pip install parallel3d[remote]`, or install"
            " fsspec's package for this protocol"
        ) from error
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be read ({reason}); check its name, your credentials and the network"
        ) from error
