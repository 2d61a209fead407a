"""Load the initial weights of a run from a published model into the shards of this mesh."""

import os
from collections.abc import Sequence
from pathlib import Path

from parallel3d.base.errors import ConfigError, DataError
from parallel3d.checkpoint.load import boxes_to_fill, reading
from parallel3d.config.pretrained import SETTINGS, WEIGHTS, digest_of, download
from parallel3d.data.tokenizer import encode, load_tokenizer
from parallel3d.engine import Engine
from parallel3d.huggingface.source import PublishedWeights
from parallel3d.mesh.agree import agree
from parallel3d.mesh.mesh import Mesh
from parallel3d.mesh.nodes import find_nodes
from parallel3d.model import optimizers
from parallel3d.model.config import ModelConfig
from parallel3d.model.spec import LayerSpec, tied_names
from parallel3d.models.common import Pretrained


def find_weights(config: ModelConfig, origin: Pretrained, mesh: Mesh) -> Path:
    """Check the published weights that a model config names, and return their folder.

    Collective. The first rank of each node downloads a model from the hub. Raises ConfigError or
    CheckpointError on all ranks if the folder is missing or has changed since the config was read.
    """
    nodes = find_nodes(mesh)

    def fetched() -> Path:
        if origin.revision is None:
            return Path(origin.folder)
        return download(origin.folder, origin.revision, (*SETTINGS, *WEIGHTS))

    def look() -> None:
        if mesh.rank != nodes.first(mesh.rank):
            return
        folder = fetched()
        if not os.path.isdir(folder):
            raise ConfigError(
                f'parallel3d.model.from_pretrained = "{folder}": the folder no longer exists; '
                "restore it, or resume from a checkpoint"
            )
        if origin.weights and digest_of(folder) != origin.weights:
            raise ConfigError(
                f"{folder}: the weights have changed since the config was read; set "
                "parallel3d.model.from_pretrained again, or restore them"
            )
        PublishedWeights(folder, config).check_tied()

    agree(mesh, look)
    return agree(mesh, fetched)


def load_weights(
    folder: Path, config: ModelConfig, *, engine: Engine, mesh: Mesh, layers: Sequence[LayerSpec]
) -> None:
    """Load published weights into the engine's fp32 master weights; the optimizer state is new.

    Averages of the weights start there, too.

    Collective. Each rank reads only the byte ranges of its own shards. Raises CheckpointError on
    all ranks if a file cannot be read.
    """

    def read() -> None:
        weights = PublishedWeights(folder, config)
        for boxes in boxes_to_fill(engine, tied_names(layers)):
            for name, kind, box, out in boxes:
                if kind in (optimizers.MASTER, optimizers.EMA):
                    weights.read(name, box, out)

    agree(mesh, lambda: reading(read))
    engine.states.finish_loading()
    engine.states.set_counters({"optimizer_steps": 0, "loss_scale": None})


_SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n The quick fox, in 1999.  \U0001f98a 東京"


def tokenizer_warning(model: Path, tokenizer: Path, shown: str) -> str:
    """Return a warning if the corpus and the model have different tokenizers; else "".

    Two tokenizers count as equal if they have the same vocabulary and encode a sample text equally.

    - `model`: folder of the model.
    - `tokenizer`: folder of the corpus' tokenizer.
    - `shown`: name of the model for the warning.
    """
    if not any(tokenizer.iterdir()):
        return ""  # a corpus of token ids, whose tokenizer is not known
    try:
        model_tokenizer = load_tokenizer(model)
        corpus_tokenizer = load_tokenizer(tokenizer)
    except DataError as error:
        return f"WARNING: the tokenizer of {shown} cannot be compared ({error})"
    if model_tokenizer.get_vocab() != corpus_tokenizer.get_vocab() or (
        encode(model_tokenizer, [_SAMPLE]) != encode(corpus_tokenizer, [_SAMPLE])
    ):
        return (
            f"WARNING: data.tokenizer differs from the tokenizer of {shown}, so the model will "
            f"read ids as the wrong tokens; set parallel3d.data.tokenizer to {shown}, unless this "
            "is intended"
        )
    return ""
