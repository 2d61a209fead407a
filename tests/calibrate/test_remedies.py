"""Each remedy of the messages about measuring a machine is applied as it is written."""

import re

import pytest

from parallel3d.extras.calibrate import describe, dial
from parallel3d.extras.calibrate.describe import calibrate
from tests.calibrate.test_calibrate import plant, planted
from tests.calibrate.test_dial import chosen, machine, narrow, place  # noqa: F401
from tests.remedies import refused

pytestmark = pytest.mark.gloo


@pytest.mark.slow  # two fits of a machine's curves
def test_folder_of_the_users_own_files_is_moved(tmp_path, monkeypatch):
    plant(monkeypatch)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with refused("set XDG_CONFIG_HOME to a writable folder"):
        calibrate(lambda text: None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "other"))
    calibrate(lambda text: None)
    assert (tmp_path / "other/parallel3d/hardware/this-machine.json").exists()


@pytest.mark.slow  # a fit of a machine's curves
def test_disturbed_measurement_is_tried_again(tmp_path, monkeypatch):
    plant(monkeypatch)
    path = tmp_path / "machine.json"
    disturbed = [row | {"bandwidth": 0.0} for row in planted(2)]
    with monkeypatch.context() as once, refused("Try again while nothing else runs"):
        once.setattr(describe, "_measure", lambda ranks, effort: disturbed)
        calibrate(lambda text: None, path)
    assert not path.exists()
    calibrate(lambda text: None, path)
    assert path.exists()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("params", [None, 1e6])
def test_minutes_that_are_named_are_enough(place, params):  # noqa: F811
    with refused("use --minutes") as refusal:
        chosen(minutes=0.5, params=params)
    least = re.search(r"use --minutes (\d+)", refusal.text)
    assert least
    config, _, _ = chosen(minutes=int(least[1]), params=params)
    assert config.num_steps >= dial._FEWEST_STEPS


@pytest.mark.usefixtures("narrow")
def test_smaller_model_has_time_for_its_steps(place, monkeypatch):  # noqa: F811
    """Where a step takes as long as the model is large."""

    def pace(config):
        return config.model.hidden_size**2 * 1e-4, 1.0

    monkeypatch.setattr(dial, "pace", pace)
    with refused("or a smaller --params"):
        chosen(minutes=2, params=5e6)
    config, _, _ = chosen(minutes=2, params=1e5)
    assert config.num_steps >= dial._FEWEST_STEPS
