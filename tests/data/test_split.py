"""What is held out: by content and size alone, of all sizes something, copies together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.base.errors import DataError
from parallel3d.data.documents import ENTRY, new_digest
from parallel3d.data.split import split_documents
from tests.data.documents import table_of

pytestmark = pytest.mark.gloo


def table_with(sizes, first=0):
    """Documents of these sizes, all of them different."""
    rows = [
        (0, 0, 0, size, new_digest(b"%d" % i).digest()) for i, size in enumerate(sizes, start=first)
    ]
    return np.array(rows, ENTRY)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 0), (0.01, 1), (0.3, 3), (0.99, 9), (1.0, 9), ("auto", 2)]
)
def test_both_parts_have_a_document(fraction, expected):
    [held_out] = split_documents([table_of(*"abcdefghij")], fraction)
    assert (len(held_out), held_out.sum()) == (10, expected)


def test_split_depends_on_content_and_keeps_copies_together():
    """No order moves a document across, and two of each fall where one did."""
    [once] = split_documents([table_of(*"abcdefghij")], 0.3)
    held_out = {text for text, apart in zip("abcdefghij", once, strict=True) if apart}
    shuffled = "jajbhcidegfecbgidfha"
    [again] = split_documents([table_of(*shuffled)], 0.3)
    assert {text for text, apart in zip(shuffled, again, strict=True) if apart} == held_out
    assert again.tolist() == [text in held_out for text in shuffled]


def test_other_seed_holds_out_other_documents():
    table = table_of(*map(str, range(200)))
    splits = [split_documents([table], 0.2, seed)[0] for seed in range(5)]
    assert len({split.tobytes() for split in splits}) == 5
    # Independent: of 40 about 8 are also held out by another seed.
    both = [(splits[0] & other).sum() for other in splits[1:]]
    assert all(split.sum() == 40 for split in splits) and 1 <= min(both) <= max(both) <= 18
    assert np.array_equal(splits[3], split_documents([table], 0.2, 3)[0])


SIZES = np.exp(np.random.default_rng(0).normal(9, 1.5, 700)).astype(int)


@pytest.mark.parametrize("seed", range(3))
def test_held_out_documents_have_the_sizes_of_the_corpus(seed):
    """The bytes come to the fraction, and each size to its share, however long the tail is."""
    table = table_with(SIZES)
    [held_out] = split_documents([table], 0.1, seed)
    sizes = SIZES[held_out]
    all_of_it = SIZES.sum()
    assert sizes.sum() == pytest.approx(0.1 * all_of_it, rel=0.1)
    assert sizes.max() <= all_of_it * 0.1 / 8
    eligible = all_of_it * 0.1 / 8 >= SIZES
    for low in 2 ** np.arange(6, 17):
        here = (low <= SIZES) & (low * 2 > SIZES) & eligible
        expected = held_out.sum() / eligible.sum() * here.sum()
        assert abs(held_out[here].sum() - expected) <= 1, low


def test_auto_is_a_share_of_small_corpora_and_bounded_for_large_ones():
    def held_out(sizes):
        [is_held_out] = split_documents([table_with(sizes)], "auto")
        return is_held_out.sum(), np.asarray(sizes)[is_held_out].sum()

    assert held_out([1000] * 2000)[0] == 100  # 5 %
    assert held_out([1000] * 700)[0] == 64
    assert held_out([4000] * 640) == (64, 256_000)
    # Where a tenth is less than 64 samples are: up to 20 %.
    assert held_out([1000] * 320)[0] == 64
    assert held_out([1000] * 200)[0] == 40
    assert held_out([4000] * 500)[0] == 64
    assert held_out([8000] * 250) == (33, 264_000)  # 64 samples, 256 KiB
    assert held_out([40_000] * 300)[0] == 30  # a tenth is more than they are
    assert held_out([2**26] * 2000) == (2, 2**27)  # 125 GB
    few = held_out([2**20] * 20)
    assert few[0] in (1, 2)


@pytest.mark.parametrize("fraction", ["auto", 0.05, 0.3, 0.5])
@pytest.mark.parametrize(
    "sizes", [[1000] * 1000 + [10**6] * 20, [1000] * 10 + [10**7], [1000] * 500 + [5 * 10**5] * 25]
)
def test_documents_of_every_size_are_trained_on(sizes, fraction):
    """Where most of the text is in documents too large to hold out, the others are no substitute.

    Of small ones at most twice the share is held out, and where that is all, half of the rest.
    """
    table = table_with(sizes)
    small = np.asarray(sizes) == 1000
    [held_out] = split_documents([table], fraction)
    most = 0.1 if sum(sizes) > 2.6e6 else 0.2
    share = max(0.05, min(64 / len(sizes), most)) if fraction == "auto" else fraction
    expected = min(2 * share, (1 + share) / 2) * small.sum()
    assert 1 <= held_out[small].sum() <= expected + 1
    assert (~held_out[~small]).any()


@pytest.mark.parametrize("fraction", ["auto", 0.1])
def test_copies_count_in_the_held_out_share(fraction):
    """A page whose copies are half of the text trains, whatever the seed; few copies may not."""
    sizes = np.random.default_rng(0).integers(600, 1500, 600)
    sizes[0] = 700
    table = np.concatenate([table_with(sizes), *[table_with([700])] * 599])
    share = 0.1  # "auto" is the same share for 600 distinct documents
    for seed in range(40):
        [held_out] = split_documents([table], fraction, seed)
        assert not held_out[600:].any() and not held_out[0], seed
        held = table["num_bytes"][held_out].sum() / table["num_bytes"].sum()
        # Of the others, which are half of the text, twice as much.
        assert held == pytest.approx(share, rel=0.15), seed
    # Everything twice: the same documents as of each once.
    once = table_with(SIZES)
    [held_out] = split_documents([once], fraction)
    [twice] = split_documents([np.concatenate([once, once])], fraction)
    assert twice.tolist() == held_out.tolist() * 2


@given(
    st.lists(st.integers(1, 10**6), min_size=2, max_size=40, unique=True),
    st.floats(0.001, 0.49) | st.just("auto"),
    st.integers(0, 5),
)
def test_neither_part_is_empty_for_any_sizes(sizes, fraction, seed):
    [held_out] = split_documents([table_with(sizes)], fraction, seed)
    assert 1 <= held_out.sum() < len(sizes)


def test_document_held_out_of_one_part_is_held_out_of_all():
    texts = [str(i) for i in range(10, 30)]
    alone = split_documents([table_of(*texts)], 0.2)[0]
    apart = [text for text, held in zip(texts, alone, strict=True) if held]
    others = [text for text in texts if text not in apart]
    second = [apart[0], *others[:9]]
    first_held, second_held = split_documents([table_of(*texts), table_of(*second)], 0.2)
    assert second_held[0], "it is held out of the first"
    for text, held in zip(second, second_held, strict=True):
        assert first_held[texts.index(text)] == held
    # `check_length` refuses a part without training text.
    assert split_documents([table_of(*texts), table_of(*apart[:2])], 0.2)[1].all()
    with pytest.raises(DataError, match=r"data\.mixture\.1 has one document, but"):
        split_documents([table_of(*texts), table_of(texts[0])], 0.2)


@pytest.mark.parametrize("fraction", ["auto", 0.1])
def test_page_that_fills_one_part_is_never_held_out(fraction):
    """In the other it stands once; held out there, it would be most of what is held out here."""
    one = table_with(range(600, 1200))
    page = one[-1:]
    full = np.concatenate([table_with(range(600, 1200), first=1000), *[page] * 599])
    for seed in range(40):
        held_out = split_documents([one, full], fraction, seed)
        assert not held_out[0][-1] and not held_out[1][600:].any(), seed
        for table, apart in zip([one, full], held_out, strict=True):
            assert 0.04 < table["num_bytes"][apart].sum() / table["num_bytes"].sum() < 0.13, seed


def test_part_of_pages_that_fill_another_part_is_still_split():
    pages = table_with([1000] * 2)
    full = np.concatenate([table_with([1000] * 60, first=10), *[pages] * 60])
    held_out = split_documents([full, pages], 0.1)
    assert held_out[1].sum() == 1 and 60 < held_out[0].sum() < 90


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=2, max_size=60), min_size=2, max_size=3),
    st.sampled_from([0.05, 0.3, "auto"]),
    st.integers(0, 3),
)
def test_no_text_is_held_out_in_one_part_and_trained_on_in_another(parts, fraction, seed):
    tables = [table_of(*("x" * n for n in part)) for part in parts]
    try:
        held_out = split_documents(tables, fraction, seed)
    except DataError:
        return
    apart = [set(np.array(part)[held]) for part, held in zip(parts, held_out, strict=True)]
    trained = [set(np.array(part)[~held]) for part, held in zip(parts, held_out, strict=True)]
    assert all(apart) and not set.union(*apart) & set.union(*trained)


def test_single_distinct_document_cannot_be_split():
    remedies = r'data\.documents = "blank_line" or "line".*data\.held_out_fraction = 0$'
    with pytest.raises(DataError, match=rf"has 2 documents, all of the same text, .*{remedies}"):
        split_documents([table_of("a", "a")], 0.1)
    assert not split_documents([table_of("a", "a")], 0)[0].any()
