"""What the tests of many ranks share."""

import pytest

from parallel3d.config import RunConfig
from parallel3d.verify.measure import compile_operators
from tests.gloo.configs import config_of


@pytest.fixture(scope="session")
def operators():
    """DeepSpeed's compiled operators: minutes where there are none yet, on no rank's time."""
    compile_operators(RunConfig.from_dict(config_of(offload="nvme+nvme")))
