"""The weights of a checkpoint, one after the other, in one process and without a GPU."""

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from parallel3d import models
from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.arrays import empty
from parallel3d.checkpoint.box import overlapping
from parallel3d.checkpoint.chunks import Chunk
from parallel3d.checkpoint.describe import find_checkpoints
from parallel3d.checkpoint.hashed import HashedChunks
from parallel3d.checkpoint.manifest import (
    STATE,
    TOKENIZER,
    read_sound_state,
    shapes_of,
)
from parallel3d.checkpoint.safe_files import tokenizer_digest
from parallel3d.config import RunConfig
from parallel3d.data.cache import cache_root
from parallel3d.data.sources import Progress, silent
from parallel3d.data.tokenizer import load_tokenizer
from parallel3d.huggingface.card import About, line_after, tokenizer_files
from parallel3d.model.spec import named_params


class CheckpointSource:
    """The fp32 masters in a checkpoint's folder, of any mesh, and what its state says of them.

    `path`: as `find_checkpoints` takes it; of several it is the newest. The files are hashed while
    they are read: what came of them is good when `check` has returned. Raises CheckpointError.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder = find_checkpoints(path)[0]
        files, self.state = read_sound_state(folder)
        self.config = RunConfig.from_dict(self.state["config"], str(folder / STATE))
        specs = named_params(models.layers(self.config.model))
        self._shapes = {name: spec.shape for name, spec in specs.items()}
        if self._shapes != shapes_of(self.state):
            raise CheckpointError(
                f"{folder / STATE}: its parameters are not those of its config; use another "
                "checkpoint"
            )
        self._files = [
            HashedChunks(folder / name, entry) for name, entry in files.items() if name != STATE
        ]
        self._chunks: dict[str, list[tuple[HashedChunks, Chunk]]] = defaultdict(list)
        for file in self._files:
            for chunk in file.chunks:
                if chunk.kind == "master":
                    self._chunks[chunk.name].append((file, chunk))
        for name in self._shapes:
            self._check(name)

    def read(self, name: str) -> Tensor:
        """A whole parameter by its name in this project, in fp32."""
        whole = empty(self._shapes[name], torch.float32)
        for file, chunk in self._chunks[name]:
            out = whole
            for dim, (first, size) in enumerate(zip(*chunk.box, strict=True)):
                out = out.narrow(dim, first, size)
            file.read(chunk, out)
        return whole

    def check(self, progress: Progress = silent) -> None:
        """Compare each file with its hash, read to its end, and each byte of it once if in order.

        Raises CheckpointError where one is damaged.
        """
        for done, file in enumerate(self._files):
            progress("comparing hashes (files)", done, len(self._files))
            if reason := file.check():
                raise CheckpointError(f"{file.path}: {reason}; use another checkpoint")

    def about(self, tokenizer: Path | None = None, architecture: str | None = None) -> About:
        """Facts about a checkpoint's model; `tokenizer`: a folder, or None to look for one.

        Raises CheckpointError where the tokenizer is not found, or is another one.
        """
        data = self.config.data
        if data.tokenizer != "none":
            tokenizer = self._tokenizer(tokenizer)
        end = data.end_of_text_id
        if end is None and tokenizer is not None:
            end = load_tokenizer(tokenizer).eos_token_id
        return About(
            self.config,
            step=self.state["step"],
            tokens=self.state["tokens"],
            end_of_text=end,
            tokenizer=tokenizer,
            line=line_after(self.folder.absolute().parent.parent, self.state["step"]),
            architecture=architecture,
        )

    def _tokenizer(self, given: Path | None) -> Path:
        """The folder of the tokenizer that the checkpoint was trained with."""
        data, digest = self.config.data, self.state["tokenizer"]
        run = self.folder.absolute().parent.parent
        cached = cache_root(data.cache) / "corpora"
        candidates = [given] if given is not None else [
            self.folder / TOKENIZER, run / "weights", Path(data.tokenizer).expanduser(),
            *sorted(cached.glob("*/tokenizer")),
        ]  # fmt: skip
        for folder in candidates:
            if tokenizer_files(folder) and tokenizer_digest(folder) == digest:
                return folder
        found = f"{given} holds another one" if given is not None else "it is not where it was"
        raise CheckpointError(
            f"{self.folder}: the tokenizer that it was trained with is needed, and {found}; give "
            "its folder with --tokenizer"
        )

    def _check(self, name: str) -> None:
        """The chunks of a parameter are all of it, each element once."""
        boxes = [chunk.box for _, chunk in self._chunks[name]]
        there, wanted = sum(box.numel for box in boxes), torch.Size(self._shapes[name]).numel()
        if there != wanted or overlapping(boxes):
            raise CheckpointError(
                f"{self.folder} has {there:,} of the {wanted:,} elements of {name}, or some twice; "
                "use another checkpoint"
            )
