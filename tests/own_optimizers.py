"""Optimizer files in a scratch folder, which are known for as long as a test runs."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from parallel3d.base import user_folders
from parallel3d.model import optimizers

GUIDE = Path(__file__).parents[1] / "docs/add-an-optimizer.md"
(SGD,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


@contextmanager
def scratch(folder, **files):
    """Write optimizer files, and forget all that was learnt of them; the guide's is there, too."""
    folder.mkdir(exist_ok=True)
    for name, text in {"sgd": SGD, **files}.items():
        (folder / f"{name}.py").write_text(text)
    with (
        patch.object(optimizers, "__path__", list(optimizers.__path__)),
        patch.dict("os.environ", {user_folders.OPTIMIZERS: ""}),
    ):
        try:
            yield str(folder)
        finally:
            for cached in (optimizers.load, optimizers.kinds, optimizers.state_bytes):
                cached.cache_clear()
            for name in ("sgd", *files):
                sys.modules.pop(f"{optimizers.__name__}.{name}", None)
