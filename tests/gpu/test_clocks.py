"""The clocks of a profile on devices: what is computed on was sent before, on another rank."""

import pytest

from tests.gpu import here
from tests.train.test_profiler import (  # noqa: F401
    test_clocks_of_ranks_agree,
    test_each_rank_has_lane_of_steps_and_actions,
    written,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_ranks():
    here.enough(2)
