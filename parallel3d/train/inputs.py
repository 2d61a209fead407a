"""Files and folders of a config that a run here cannot use: found without ranks or tokens."""

import os
from collections.abc import Iterator

from parallel3d.base.errors import DataError
from parallel3d.base.hub_access import is_path
from parallel3d.base.paths import no_folder, unwritable
from parallel3d.config import RunConfig
from parallel3d.data.tokenised import paths_of
from parallel3d.data.tokenizer import check_name


def missing_inputs(config: RunConfig) -> Iterator[str]:
    """Yield one message for each file, folder or checkpoint that would stop a run here.

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
    yield from _unwritable_folders(config)


def _unwritable_folders(config: RunConfig) -> Iterator[str]:
    """Yield one message for each folder of the config to which a run here cannot write."""
    zero = config.zero_optimization
    folders: dict[str, str | None] = {"parallel3d.run.directory": config.run.directory}
    for name, offload in (
        ("offload_optimizer", zero.offload_optimizer),
        ("offload_param", zero.offload_param),
    ):
        if offload.device == "nvme":
            folders[f"zero_optimization.{name}.nvme_path"] = offload.nvme_path
    if config.checkpoint.in_memory_every:
        folders["parallel3d.checkpoint.in_memory_folder"] = config.checkpoint.in_memory_folder
    for path, folder in folders.items():
        if folder and (reason := unwritable(folder)):
            yield f'{path} = "{folder}": cannot be written ({reason}); use a writable folder'
    # Another user may have filled a cache that this one reads.
    if config.data.cache != "auto" and (reason := no_folder(config.data.cache)):
        yield f'parallel3d.data.cache = "{config.data.cache}": {reason}; name a folder'
