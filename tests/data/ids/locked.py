"""A file system of the protocol "locked", which wants a user and a password in its URLs.

Like that of https, its paths are whole URLs: locked://user:secret@host/path of a local file.
"""

import fsspec

from tests.data.ids.slow import SlowFiles

OPEN = "locked://user:secret@host"


class LockedFiles(SlowFiles):
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
        return super().info(path.removeprefix(OPEN), **options) | {"name": path}

    def _open(self, path, mode="rb", **options):
        return super()._open(path.removeprefix(OPEN), mode)

    def cat_file(self, path, start=None, end=None, **options):
        return super().cat_file(path.removeprefix(OPEN), start, end)


fsspec.register_implementation("locked", LockedFiles, clobber=True)
