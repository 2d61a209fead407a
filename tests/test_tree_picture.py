"""docs/tree.svg, held against the code: every folder, on a floor from which its imports go down."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.tree_picture import COLOURS, picture
from tests.test_floors import FILES, ROOM, imports_of, room_of

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawn():
    """The picture's root element."""
    return ElementTree.parse(ROOT / "docs/tree.svg").getroot()


def places_of(drawn):
    """The centre's height and the ground of each folder's first box."""
    places = {}
    for group in drawn.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        centre = float(box.get("y")) + float(box.get("height")) / 2
        places.setdefault(group.get("data-room"), (centre, box.get("fill")))
    return places


def floors_of(drawn):
    """The floor of each folder, by its height in the picture; the headings are on none."""
    bands = {}
    for band in drawn.iter(f"{SVG}rect"):
        if floor := band.get("data-floor"):
            top = float(band.get("y"))
            bands[int(floor)] = (top, top + float(band.get("height")))
    floors = {}
    for room, (centre, _) in places_of(drawn).items():
        for floor, (top, bottom) in bands.items():
            if top < centre < bottom:
                floors[room] = floor
    return floors


def upward_imports(floors):
    """Imports by which a folder uses one that is drawn above it."""
    upward = []
    for path in FILES:
        for name in imports_of(path):
            high = floors.get(ROOM.get(name))
            low = floors.get(room_of(path))
            if high is not None and low is not None and high > low:
                upward.append(f"{path} imports {name}")
    return upward


def test_picture_is_what_the_script_draws():
    own = (ROOT / "docs/tree.svg").read_text()
    assert own == f"{picture()}\n", "run: python -m docs.tree_picture > docs/tree.svg"


def test_every_folder_with_code_is_drawn_on_one_floor(drawn):
    folders = {room_of(path) for path in FILES}
    assert places_of(drawn).keys() == folders
    assert folders - floors_of(drawn).keys() == {"parallel3d", "parallel3d/extras"}


def test_imports_go_down_in_the_picture(drawn):
    floors = floors_of(drawn)
    assert not upward_imports(floors)
    assert upward_imports(floors | {"parallel3d/config": 6}), "a wrong floor is seen"
    for path in FILES:
        if floors.get(room_of(path)) == 0:
            assert "torch" not in imports_of(path), path


def test_extras_are_drawn_in_a_colour_of_their_own(drawn):
    grounds = {side: ground for side, (ground, _) in COLOURS.items()}
    for room, (_, ground) in places_of(drawn).items():
        if re.match("parallel3d/extras(/[^/]+)?$", room):
            assert ground == grounds["extras"], room
    for path in FILES:
        room = room_of(path)
        if room != "launch" and places_of(drawn)[room][1] == grounds["core"]:
            used = [name for name in imports_of(path) if name.startswith("parallel3d.extras")]
            assert not used, path
