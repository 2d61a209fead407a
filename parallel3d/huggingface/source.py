"""Read the weights of a checkpoint one by one, in one process and without a GPU."""

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
from parallel3d.data.sources import Progress, no_progress
from parallel3d.data.tokenizer import load_tokenizer
from parallel3d.huggingface.card import About, line_after, tokenizer_files
from parallel3d.model.spec import named_params


class CheckpointSource:
    """The fp32 master weights in a checkpoint of any mesh, with its config and state.

    path: a checkpoint or a run's folder, whose newest checkpoint is taken (see `find_checkpoints`).

    Files are hashed as they are read. After reading, call `check` to verify the hashes. Raises
    CheckpointError if the checkpoint is missing, damaged or incomplete.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder = find_checkpoints(path)[0]
        files, self.state = read_sound_state(folder)
        self.config = RunConfig.from_dict(self.state["config"], str(folder / STATE))
        specs = named_params(models.layers(self.config.model))
        self._shapes = {name: spec.shape for name, spec in specs.items()}
        if self._shapes != shapes_of(self.state):
            raise CheckpointError(
                f"{folder / STATE}: the parameters do not match the config; use another checkpoint"
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
        """Return a full parameter in fp32, by its name in parallel3d."""
        value = empty(self._shapes[name], torch.float32)
        for file, chunk in self._chunks[name]:
            out = value
            for dim, (first, size) in enumerate(zip(*chunk.box, strict=True)):
                out = out.narrow(dim, first, size)
            file.read(chunk, out)
        return value

    def check(self, progress: Progress = no_progress) -> None:
        """Verify the hash of each file; raise CheckpointError if one is damaged.

        Bytes that `read` has read in order are not read again.
        """
        for done, file in enumerate(self._files):
            progress("comparing hashes (files)", done, len(self._files))
            if reason := file.check():
                raise CheckpointError(f"{file.path}: {reason}; use another checkpoint")

    def about(self, tokenizer: Path | None = None, architecture: str | None = None) -> About:
        """Return the facts that an export writes next to the weights.

        tokenizer: folder of the tokenizer; None to search for it.
        architecture: transformers class to use; None for the default of the model family.

        Raises CheckpointError if the tokenizer is not found, or is not the checkpoint's.
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

    def _tokenizer(self, named: Path | None) -> Path:
        """Return the folder of the checkpoint's tokenizer; `named` is the user's, if any."""
        data, digest = self.config.data, self.state["tokenizer"]
        run = self.folder.absolute().parent.parent
        cached = cache_root(data.cache) / "corpora"
        candidates = [named] if named is not None else [
            self.folder / TOKENIZER, run / "weights", Path(data.tokenizer).expanduser(),
            *sorted(cached.glob("*/tokenizer")),
        ]  # fmt: skip
        for folder in candidates:
            if tokenizer_files(folder) and tokenizer_digest(folder) == digest:
                return folder
        problem = f"not the one in {named}" if named is not None else "and was not found"
        raise CheckpointError(
            f"{self.folder}: needs the tokenizer that it was trained with, {problem}; name its "
            "folder with --tokenizer"
        )

    def _check(self, name: str) -> None:
        """Raise CheckpointError unless the chunks of a parameter have each element exactly once."""
        boxes = [chunk.box for _, chunk in self._chunks[name]]
        stored, expected = sum(box.numel for box in boxes), torch.Size(self._shapes[name]).numel()
        if stored != expected or overlapping(boxes):
            raise CheckpointError(
                f"{self.folder}: has {stored:,} elements of {name}, which has {expected:,}, or "
                "overlapping chunks; use another checkpoint"
            )
