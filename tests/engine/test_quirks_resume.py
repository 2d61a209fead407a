"""Takes away what makes a resumed run exact, and sees the fault that docs/deepspeed.md tells."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest

from parallel3d.engine.quirks import updating
from tests.cases import unpatched
from tests.engine.test_states import EXACT
from tests.train.resuming import differences, run_resumed, run_unbroken

pytestmark = pytest.mark.gloo


@contextmanager
def running_products():
    with patch.object(updating, "recompute_bias_correction", lambda optimizer: None):
        yield


@pytest.mark.parametrize("name", [pytest.param("zero3+cpu", marks=pytest.mark.slow), "zero1+cpu"])
@unpatched
def test_resumed_cpu_adam_differs_without_fresh_bias_correction(name, cpu_adam):
    if not cpu_adam:
        pytest.skip("DeepSpeed's cpu_adam cannot be compiled")
    case = EXACT[name]
    saved, ends = run_unbroken(case, running_products)
    others = run_resumed(case, saved, fault=running_products)
    differing_kinds = differences(ends, others)
    # The moments know no bias correction: they go wrong through the weights, a step later.
    assert "master" in differing_kinds
    worst = 0.0
    for (_, blocks, _), (_, other_blocks, _) in zip(ends, others, strict=True):
        for block, other_block in zip(blocks, other_blocks, strict=True):
            for kinds, other_kinds in zip(block, other_block, strict=True):
                difference = kinds["master"] - other_kinds["master"]
                worst = max(worst, float(difference.abs().max()))
    print(f"{name}: the masters differ by up to {worst:.1e}")
    assert worst < 1e-6
