"""Inputs that a config names and that are not on this machine: found without ranks or tokens."""

import os
from collections.abc import Iterator

from parallel3d.base.errors import DataError
from parallel3d.base.hub_access import is_path
from parallel3d.config import RunConfig
from parallel3d.data.tokenised import paths_of
from parallel3d.data.tokenizer import check_name


def missing_inputs(config: RunConfig) -> Iterator[str]:
    """Yield one message for each file, folder or checkpoint without which a run here would stop.

    Neither hub nor other hosts are asked. A dry run prints them and goes on, because it may plan a
    run on another machine.
    """
    data = config.data
    for section in (*(data.mixture or (data,)), *data.validation.values()):
        if section.paths and not any("://" in path for path in section.paths):
            try:
                paths_of(section)
            except DataError as error:
                yield str(error)
    if is_path(data.tokenizer) and data.tokenizer not in ("train", "none"):
        try:
            check_name(data.tokenizer)
        except DataError as error:
            yield str(error)
    resume = config.checkpoint.resume
    if isinstance(resume, str) and resume not in ("auto", "none") and not os.path.isdir(resume):
        yield f'parallel3d.checkpoint.resume = "{resume}": is not a folder; name a checkpoint'
