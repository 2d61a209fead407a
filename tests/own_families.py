"""Families of models in a folder of the tests, which no later test may see."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from parallel3d import models
from parallel3d.base import user_folders

FOLDER = str(Path(__file__).parent / "pipeline/families")


@contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Forget the families of `run.model_folders` after the context."""
    with (
        patch.object(models, "__path__", list(models.__path__)),
        patch.dict("os.environ", {user_folders.MODELS: ""}),
    ):
        yield
    for name in [name for name in sys.modules if name.startswith(f"{models.__name__}.routed")]:
        del sys.modules[name]
