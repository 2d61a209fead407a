"""A run whose mesh changes is struck by faults of every type, and ends with the weights of one
that was not; each fault is located in its journal."""

import pytest

from tests.soak.faults import FAULTS, KINDS, NAMED_KINDS
from tests.soak.soak import TOLERANCE, Soak, counts, drawn

pytestmark = pytest.mark.drill


def check(soak, with_one_mesh=True):
    assert soak.run_all()
    differences = soak.compare(with_one_mesh)
    table, missed = soak.table()
    print(table, differences, sep="\n")
    assert missed == 0, [r for r in soak.judged() if not (r["located"] and r["as_expected"])]
    assert differences["same meshes"] == 0
    assert differences.get("one mesh", 0) <= TOLERANCE


@pytest.mark.slow
def test_sample_of_faults(tmp_path):
    """Two that nothing else would notice: a rank with other settings, and a wrong token."""
    kinds = ["config drift", "corpus shard flipped"]
    check(Soak(tmp_path / "soak", 2, 5, kinds), with_one_mesh=False)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_type_twice(tmp_path, seed):
    check(Soak(tmp_path / "soak", 42, seed))


@pytest.mark.parametrize("seed", range(1, 9))
def test_each_type_is_drawn_as_often_as_it_must(seed):
    assert len(NAMED_KINDS) == 21
    for number, least, kinds in ((42, 2, NAMED_KINDS), (200, 5, KINDS)):
        met = counts(drawn(number, seed))
        assert min(met[kind] for kind in kinds) >= least, met


def test_every_kind_has_a_judge():
    """A fault that costs steps is located, not only survived."""
    assert all(fault.located for fault in FAULTS if fault.effect != "goes on")
