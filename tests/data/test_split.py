"""What is held out: by content alone, in both parts something, copies together."""

import numpy as np
import pytest

from parallel3d.data.split import split_documents
from parallel3d.errors import DataError
from tests.data.documents import digests_of

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1), (0.01, 1), (0.3, 3), (0.99, 9), (1.0, 9)]
)
def test_both_parts_have_a_document(fraction, expected):
    [held_out] = split_documents([digests_of(*"abcdefghij")], fraction)
    assert (len(held_out), held_out.sum()) == (10, expected)


def test_the_split_goes_by_content_and_keeps_copies_together():
    """What has the lowest digests is held out, by a plain sort of the bytes."""
    digests = digests_of(*"abcdefghij" * 2)
    [held_out] = split_documents([digests], 0.3)
    lowest = sorted({digest.tobytes() for digest in digests})[:3]
    assert held_out.tolist() == [digest.tobytes() in lowest for digest in digests]
    [reversed_] = split_documents([digests[::-1]], 0.3)
    assert reversed_.tolist() == held_out[::-1].tolist()


def test_what_is_held_out_of_one_part_is_held_out_of_all():
    texts = sorted("abcdefghij", key=lambda text: digests_of(text).tobytes())
    all_of_them, highest = digests_of(*texts), digests_of(*texts[:5:-1])
    first, second = split_documents([all_of_them, highest], 0.2)
    # The highest four hold out the lowest of themselves, which alone the ten would train on.
    assert np.flatnonzero(first).tolist() == [0, 1, 6]
    assert np.flatnonzero(second).tolist() == [3]
    assert split_documents([highest, all_of_them], 0.2)[1].tolist() == first.tolist()
    with pytest.raises(DataError, match=r"data\.mixture\.1 has only documents that are held out"):
        split_documents([all_of_them, all_of_them[:2]], 0.2)
    with pytest.raises(DataError, match=r"data\.mixture\.1 has 1 documents, 1 of them distinct"):
        split_documents([all_of_them, all_of_them[:1]], 0.2)


def test_one_distinct_document_cannot_be_split():
    with pytest.raises(DataError, match=r"2 documents, 1 of them distinct.*cut one file in two"):
        split_documents([digests_of("a", "a")], 0.1)
