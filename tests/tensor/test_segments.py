"""Documents that share a sample: positions restart, and nothing crosses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel3d.tensor.segments import Segments

pytestmark = pytest.mark.gloo


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_segments_by_a_slow_loop(ends):
    documents = []
    for row in ends:
        ordinals, current = [], 0
        for end in row:
            ordinals.append(current)
            current += end
        documents.append(ordinals)
    positions, mask = Segments.of(torch.tensor(documents))
    assert mask.shape == (len(documents), 1, 9, 9)
    for b, row in enumerate(documents):
        for query, document in enumerate(row):
            assert positions[b, query] == query - row.index(document)
            for key, other in enumerate(row):
                assert mask[b, 0, query, key] == (key <= query and other == document)
