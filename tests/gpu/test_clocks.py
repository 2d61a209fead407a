"""The clocks of a profile on devices: what is computed on was sent before, on another rank."""

import pytest

from tests.gpu import here
from tests.train.test_profiler import (  # noqa: F401
    test_a_lane_for_each_rank_with_its_steps_and_actions,
    test_the_clocks_of_the_ranks_agree,
    written,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_ranks():
    here.enough(2)
