"""Remedies of `verify` about its meshes, applied as they are written."""

import pytest

from parallel3d.verify.shrink import MOST_RANKS, parse_meshes
from tests.remedies import refused

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("wrong", "remedy", "right"),
    [
        ("9x8x1", "use a smaller mesh", "8x8x1"),
        ("2x2", "--meshes ", "2x2x1"),
        ("2x0x1", "--meshes ", "2x1x1"),
    ],
)
def test_mesh_is_smaller_or_written_out(wrong, remedy, right):
    with refused(remedy):
        parse_meshes(f"1x1x1,{wrong}")
    *_, last = parse_meshes(f"1x1x1,{right}")
    assert last.ranks <= MOST_RANKS
