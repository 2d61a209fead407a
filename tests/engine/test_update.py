"""New weights leave the host by parts: the same bits, and no buffer before its part has left."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from parallel3d.engine.quirks import updating
from parallel3d.verify.local_ranks import run_locally
from tests.cases import Case, Trainer

pytestmark = pytest.mark.gloo

GROUPS = (5, 1, 4)  # elements of each


class Buffers:
    """Buffers that tell when they are waited for, and when a copy out of them is on its way."""

    def __init__(self):
        self.events = []
        self.made = 0

    def make(self, size, like):
        number = self.made
        self.made += 1

        def wait():
            self.events.append(f"wait {number}")

        def mark():
            self.events.append(f"mark {number}")

        event = SimpleNamespace(synchronize=wait, record=mark)
        return torch.empty(size, dtype=like.dtype), event


def optimizer(events):
    """What of ZeRO-3's optimizer an update touches; its own way to copy is told."""
    source = [torch.arange(n, dtype=torch.float32) + 10 * n for n in GROUPS]
    return SimpleNamespace(
        fp32_partitioned_groups_flat=source,
        fp16_partitioned_groups_flat=[torch.zeros(n, dtype=torch.bfloat16) for n in GROUPS],
        fp16_partitioned_groups_flat_numel=list(GROUPS),
        _unflatten_partitioned_parameters=lambda group: events.append(f"group {group}"),
        _reassign_or_swap_out_partitioned_parameters=lambda group: events.append(f"own {group}"),
    )


def test_two_buffers_take_turns_and_are_waited_for():
    buffers = Buffers()
    zero = optimizer(buffers.events)
    with patch.object(updating, "_buffer", buffers.make), patch.object(updating, "PART", 2):
        updating.copy_weights_in_parts(zero, torch.device("cpu"))
        for group in range(len(GROUPS)):
            buffers.events.append("adam")
            zero._reassign_or_swap_out_partitioned_parameters(group)
    parts = [f"{action} {n % 2}" for n in range(6) for action in ("wait", "mark")]
    assert buffers.events == [
        "adam",
        *parts[:6],
        "group 0",
        "adam",
        *parts[6:8],
        "group 1",
        "adam",
        *parts[8:],
        "group 2",
    ]
    masters = zero.fp32_partitioned_groups_flat
    for master, weight in zip(masters, zero.fp16_partitioned_groups_flat, strict=True):
        assert weight.tolist() == master.bfloat16().tolist()


def test_weights_elsewhere_are_copied_by_deepspeed():
    events = []
    zero = optimizer(events)
    updating.copy_weights_in_parts(zero, torch.device("meta"))
    zero._reassign_or_swap_out_partitioned_parameters(1)
    assert events == ["own 1"]


def trained_on_rank(rank, cases):
    """The weights after some steps, and in how many parts they have left the host."""
    results = []
    for case in cases:
        parts = [0]
        make = updating._buffer

        def counted(size, like, parts=parts, make=make):
            memory, copied = make(size, like)

            def mark():
                parts[0] += 1

            return memory, SimpleNamespace(synchronize=copied.synchronize, record=mark)

        with patch.object(updating, "_buffer", counted), patch.object(updating, "PART", 300):
            trainer = Trainer(case)
            trainer.run()
        weights = {h.name: trainer.engine.full_parameter(h) for h in trainer.engine.held}
        trainer.close()
        results.append((weights, parts[0]))
    return results


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_overlapped_update_gives_the_same_weights(precision, operators, cpu_adam):
    case = Case(
        mesh=(1, 2, 1),
        offload="cpu",
        weights="per_step",
        steps=2,
        precision=precision,
        batch=2,
        microbatches=1,
        model={"num_hidden_layers": 1},
        changes={"zero_optimization.sub_group_size": 7000},
    )
    on = replace(case, changes=case.changes | {"parallel3d.train.overlap_update": True})
    for (plain_weights, plain_parts), (weights, parts) in run_locally(
        trained_on_rank, 2, [case, on], timeout=100
    ):
        assert plain_parts == 0 and parts > 2 * 10  # two steps
        assert all(torch.equal(weights[name], value) for name, value in plain_weights.items())
