"""The first weights of a run, from a published model into this mesh's shards."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel3d.base.errors import ConfigError, DataError
from parallel3d.checkpoint.load import boxes_to_fill, reading
from parallel3d.config.pretrained import SETTINGS, WEIGHTS, digest_of, downloaded
from parallel3d.data.tokenizer import encode, load_tokenizer
from parallel3d.engine import Engine
from parallel3d.huggingface.published_weights import PublishedWeights
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.model.spec import LayerSpec, tied_names


def find_weights(config: Any, mesh: Mesh) -> Path:
    """The folder of published weights that `config`, of a model, starts from, once checked.

    Collective. The first rank of each node fetches a model on the hub. Raises ConfigError or
    CheckpointError on all ranks where the folder is missing, or is not what the config has found.
    """
    origin = config.from_pretrained
    nodes = find_nodes(mesh)

    def fetched() -> Path:
        if origin.revision is None:
            return Path(origin.folder)
        return downloaded(origin.folder, origin.revision, (*SETTINGS, *WEIGHTS))

    def look() -> None:
        if mesh.rank != nodes.first(mesh.rank):
            return
        folder = fetched()
        if not os.path.isdir(folder):
            raise ConfigError(
                f'parallel3d.model.from_pretrained = "{folder}": is no folder any more; put it '
                "back, or go on from a checkpoint"
            )
        if origin.weights and digest_of(folder) != origin.weights:
            raise ConfigError(
                f"{folder} holds other weights than when the config was read; name it in "
                "parallel3d.model.from_pretrained again, or put them back"
            )
        PublishedWeights(folder, config).check_tied()

    agree(mesh, look)
    return agree(mesh, fetched)


def load_weights(
    folder: Path, config: Any, *, engine: Engine, mesh: Mesh, layers: Sequence[LayerSpec]
) -> None:
    """Fill the engine's fp32 masters with a published model's weights; the optimizer is new.

    Collective. Each rank reads the byte ranges that its own shards need, into their memory. Raises
    CheckpointError on all ranks where a file cannot be read.
    """

    def read() -> None:
        weights = PublishedWeights(folder, config)
        for boxes in boxes_to_fill(engine, tied_names(layers)):
            for name, box, outs in boxes:
                weights.read(name, box, outs["master"])

    agree(mesh, lambda: reading(read))
    engine.states.finish_loading()
    engine.states.set_counters({"optimizer_steps": 0, "loss_scale": None})


_SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n The quick fox, in 1999.  \U0001f98a 東京"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def remark(model: Path, tokenizer: Path, shown: str) -> str:
    """A remark where a corpus' `tokenizer` is not the one in a model's folder; else "".

    `shown`: what the user calls the model. They are one if the same ids stand for the same tokens,
    and a sample of text becomes the same ids.
    """
    use = f"set parallel3d.data.tokenizer to {shown}"
    if not any((model / name).is_file() for name in _FILES):
        return f"WARNING: {shown} has no tokenizer: whether data.tokenizer is its own is not known"
    if not any(tokenizer.iterdir()):
        return ""  # token ids alone, whose tokenizer nobody has named
    try:
        theirs, ours = load_tokenizer(model), load_tokenizer(tokenizer)
    except DataError as error:
        return f"WARNING: the tokenizer of {shown} cannot be compared ({error})"
    if theirs.get_vocab() != ours.get_vocab() or (
        encode(theirs, [_SAMPLE]) != encode(ours, [_SAMPLE])
    ):
        return (
            f"WARNING: data.tokenizer is not the one of {shown}: the model takes the ids for other "
            f"tokens than they are; {use}, unless that is what you want"
        )
    return ""
