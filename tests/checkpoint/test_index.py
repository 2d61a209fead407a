"""The index of a checkpoint's chunks: where each is, what is there twice, what belongs nowhere."""

import shutil

import numpy as np
import pytest

from parallel3d.base.errors import CheckpointError
from parallel3d.checkpoint.chunks import Box, ChunkFile
from parallel3d.checkpoint.load import make_index
from parallel3d.mesh.mesh import Peers
from tests.checkpoint.folders import FIRST, KINDS, SECOND, SHAPES, write_tensors

pytestmark = pytest.mark.gloo

FILES = [FIRST, SECOND]


class Rank:
    """A rank of so many that meets no other, but hears what they would say."""

    def __init__(self, rank, count, heard=None):
        self.rank = rank
        self.heard = heard
        self.world = Peers(None, count, rank)
        self.messages = self

    def gather_texts(self, text, aside=False):
        return self.heard if text and self.heard else [text]  # "": nothing went wrong


ALONE = Rank(0, 1)


def overlap(a, b):
    """The box that two boxes share; None if there is none."""
    starts = tuple(map(max, a.offsets, b.offsets))
    ends = [min(i + m, j + n) for i, m, j, n in zip(*a, *b, strict=True)]
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, shape) if min(shape) > 0 else None


@pytest.mark.parametrize("box", [((0, 0), (5, 2)), ((1, 1), (1, 1)), ((1, 0), (3, 1))])
def test_index_finds_every_chunk_of_the_headers(folder, box):
    box = Box(*box)
    index = make_index(folder, FILES, SHAPES, ["embedding.weight"], ALONE, KINDS)
    for kind in KINDS:
        expected = set()
        for number, name in enumerate(FILES):
            with ChunkFile(folder / name) as file:
                for chunk, at in file.chunks.items():
                    if (chunk.name, chunk.kind) == ("embedding.weight", kind):
                        common = overlap(chunk.box, box)
                        if common:
                            expected.add((number, at, chunk, common))
        assert expected and set(index.find("embedding.weight", kind, box)) == expected
    index.check_tiling(folder, SHAPES)


def test_duplicate_elements_are_refused_by_name(folder):
    shutil.copy(folder / FIRST, folder / "again.safetensors")
    index = make_index(folder, [*FILES, "again.safetensors"], SHAPES, list(SHAPES), ALONE, KINDS)
    with pytest.raises(CheckpointError, match=r"each element of embedding\.weight's master once"):
        index.check_tiling(folder, SHAPES)


@pytest.mark.parametrize("key", ["other|master|0", "embedding.weight|master|0"])
def test_chunk_of_unknown_parameter_is_refused(folder, key):
    write_tensors(folder / SECOND, {key: np.ones(2, "<f4")})
    with pytest.raises(
        CheckpointError, match=f"{SECOND}: '{key.split('|')[0]}.* fits no parameter"
    ):
        make_index(folder, FILES, SHAPES, list(SHAPES), ALONE, KINDS)
