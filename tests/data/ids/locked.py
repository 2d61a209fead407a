"""A file system of the protocol "locked", which wants a user and a password in its URLs.

Like that of https, its paths are whole URLs: locked://user:secret@host/path of a local file.
"""

import os

import fsspec

OPEN = "locked://user:secret@host"


class LockedFiles(fsspec.AbstractFileSystem):
    """Local files behind OPEN; others raise an error that shows the URL, as other libraries do."""

    protocol = "locked"

    @classmethod
    def _strip_protocol(cls, path):
        return path

    def unstrip_protocol(self, name):
        return name

    def info(self, path, **options):
        if not path.startswith(f"{OPEN}/"):
            raise PermissionError(f"401, message='Unauthorized', url='{path}'")
        local = path.removeprefix(OPEN)
        kind = "directory" if os.path.isdir(local) else "file"
        return {"name": path, "size": os.stat(local).st_size, "type": kind}

    def _open(self, path, mode="rb", **options):
        return open(path.removeprefix(OPEN), mode)


fsspec.register_implementation("locked", LockedFiles, clobber=True)
