"""The communication of real steps has one total order over all groups and ranks.

NCCL runs a rank's operations on streams that may wait for each other in the order in which they
were issued. If two ranks issued two operations of different groups in opposite orders, each could
wait for the other. So every rank's order of issue is recorded, with both ends of an operation taken
as one: the union of these orders must have no cycle.
"""

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer, any_weights

pytestmark = pytest.mark.gloo

SMALL = {"microbatches": 4, "batch": 8, "steps": 2, "model": {"num_hidden_layers": 2}}
# Two steps: from the second on ZeRO-3 fetches ahead.
FEW = SMALL | {"microbatches": 2, "batch": 4}
CASES = [
    Case(mesh=(2, 2, 1), schedule="breadth_first", stages_per_rank=2, weights="per_pass", **FEW),
    Case(mesh=(1, 2, 2), weights="per_step", sequence_parallel=True, **FEW),
]
# ZeRO 0 and 1, more schedules, and stages beside tp, which tests/strict/test_stack.py has as well.
MORE = [
    Case(
        mesh=(2, 1, 2),
        schedule="zb_v",
        stages_per_rank=2,
        weights="per_step",
        sequence_parallel=True,
        **SMALL,
    ),
    Case(mesh=(2, 1, 2), schedule="one_f_one_b", zero_stage=1, **SMALL),
    Case(mesh=(2, 2, 1), schedule="one_f_one_b", weights="per_step", **SMALL),
    Case(mesh=(4, 1, 1), schedule="zero_bubble", zero_stage=0, tied=False, **SMALL),
]
MESH_8 = [
    Case(mesh=(2, 2, 2), schedule="interleaved", stages_per_rank=2, zero_stage=2, **SMALL),
    Case(
        mesh=(2, 2, 2),
        schedule="zb_v",
        stages_per_rank=2,
        weights="per_step",
        sequence_parallel=True,
        **SMALL,
    ),
    Case(mesh=(2, 2, 2), schedule="one_f_one_b", weights="per_step", **SMALL),
]


class Issued(TorchDispatchMode):
    """The operations that this rank issues, in order, under names that both ends give them."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self._counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._note(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _note(self, operation, args):
        group = next(filter(None, map(group_of, tree_leaves(args))))
        if group.size() == 1:
            return
        ranks = dist.get_process_group_ranks(group)
        name = f"{group.group_name} {ranks}"
        if operation in ("send", "recv_"):
            peer = ranks[args[2]]
            me = dist.get_rank()
            name += f" {me}->{peer}" if operation == "send" else f" {peer}->{me}"
        self.operations.append((name, self._counts[name]))
        self._counts[name] += 1


def group_of(value):
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):
        return None


def issued_on_rank(rank, cases):
    of_each = []
    for case in cases:
        with any_weights():
            trainer = Trainer(case)
        with Issued() as issued:
            trainer.run()
        of_each.append(issued.operations)
        trainer.close()
    return of_each


def cycle_in(orders):
    """The operations of a cycle in the union of the ranks' orders; none where there is no cycle."""
    before = {}
    for order in orders:
        for first, then in pairwise(order):
            before.setdefault(then, set()).add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="4 ranks"),
        pytest.param(MORE, id="4 ranks, more", marks=pytest.mark.slow),
        pytest.param(MESH_8, id="8 ranks", marks=pytest.mark.slow),
    ],
)
def test_operations_of_all_groups_have_one_order(cases):
    ranks = run_locally(issued_on_rank, cases[0].world_size, cases)
    for case, orders in zip(cases, zip(*ranks, strict=True), strict=True):
        assert min(map(len, orders)) > 10, case
        names = {name for order in orders for name, _ in order}
        assert len(names) > 1 and any("->" in name for name in names) == (case.mesh[0] > 1), case
        assert not cycle_in(orders), case


def test_opposite_orders_of_two_groups_are_a_cycle():
    first = ("a", 0)
    second = ("b", 0)
    assert cycle_in([[first, second], [second, first]])
    assert not cycle_in([[first, second], [first, second]])
