"""Print docs/tree.svg, the folders by floor: `python -m docs.tree_picture > docs/tree.svg`.

The folders and their floors are those that tests/test_floors.py checks.
"""

from html import escape

from parallel3d.__main__ import CORE, EXTRAS
from tests.test_floors import FLOOR, ROOMS

WIDTH = 1000
TOP = 64  # below the legend
LABELS = 128  # width of the column of floors
REGIONS = {"core": (LABELS, 702), "extras": (716, WIDTH - 14)}  # left and right edges
COLOURS = {"core": ("#e7f5ff", "#1971c2"), "extras": ("#fff4e6", "#d9480f")}  # ground, and line
COLUMNS = {"core": 5, "extras": 2}
GAP = 8
HEADINGS = {"parallel3d": "core", "parallel3d/extras": "extras"}
KNOWS = {
    6: ("commands", "the order of things"),
    5: ("a run", "steps, folders on disk"),
    4: ("a step", "programs, own layers"),
    3: ("models", "one family each"),
    2: ("parts", "groups, DeepSpeed"),
    1: ("ranks", "nobody else does"),
    0: ("no torch", "shared with planning"),
}
# In a few words; a folder within another of its floor is named in that one's box.
WORDS = {
    "parallel3d/base": ("errors, files,", "terminal, locks"),
    "parallel3d/model": ("layers and their", "costs, as data"),
    "models": ("families, found", "by their names"),
    "models/*/spec.py": ("a family's layers", "and parameters"),
    "parallel3d/schedule": ("pipeline programs,", "as lists of actions"),
    "parallel3d/schedule/schedules": (),
    "parallel3d/config": ("settings, and the rules", "between them"),
    "parallel3d/plan": ("memory and speed before a run,", "and the best mesh"),
    "parallel3d/plan/layers": (),
    "parallel3d/plan/memory": (),
    "parallel3d/plan/time": (),
    "parallel3d/plan/search": (),
    "parallel3d/plan/report": (),
    "parallel3d/mesh/pulse": ("sentries: a rank", "that died is named"),
    "parallel3d/extras/foreign": ("other frameworks'", "configs"),
    "parallel3d/extras/report": ("a page with", "a run's curves"),
    "parallel3d/extras/scaling": ("scaling laws of runs of several sizes",),
    "parallel3d/extras/scaling/ladder": (),
    "parallel3d/mesh": ("process groups by axis, messages between ranks, agreement on errors",),
    "parallel3d/tensor": ("tensor-parallel layers, attention,", "losses, and their collectives"),
    "parallel3d/engine": ("DeepSpeed's forward, backward,", "step and shards"),
    "parallel3d/engine/quirks": (),
    "parallel3d/engine/optimizers": (),
    "parallel3d/data": ("from text to tokens,", "samples and batches"),
    "parallel3d/data/ids": (),
    "models/*": ("blocks that read like the paper; names of weights in transformers",),
    "parallel3d/pipeline": ("this rank's stages, and the executor of its program",),
    "parallel3d/checkpoint": ("training state on disk,", "for every mesh"),
    "parallel3d/huggingface": ("weights to and from", "transformers"),
    "parallel3d/train": ("the trainer and", "its observers"),
    "parallel3d/verify": ("a config against", "transformers"),
    "parallel3d/extras/guard": ("recomputation, replay,", "memory of hosts"),
    "parallel3d/extras/tasks": ("scores by lm_eval,", "on a run's mesh"),
    "parallel3d/extras/scaling/on_ranks": ("coordinate", "checks"),
    "parallel3d/extras/foreign/checkpoints": ("other programs' runs",),
    "parallel3d/extras/calibrate": ("measures this", "machine"),
    "parallel3d/extras/doctor": ("checks the hosts", "of a launch"),
    "launch": (),
}
LINE = 15  # pixels between lines of text
CHIPS = 26  # height of a row of folders in a folder


def side_of(room: str) -> str:
    """Return "core" or "extras", whose colour a folder has."""
    return "extras" if room.startswith("parallel3d/extras") else "core"


def name_of(room: str) -> str:
    """Return a folder's name in the picture."""
    name = room.removeprefix("parallel3d/").removeprefix("extras/")
    return {"models/*": "models/<family>", "models/*/spec.py": "<family>/spec"}.get(name, name)


def parent_of(room: str) -> str | None:
    """Return the folder in whose box a folder is drawn: the one that holds it, on its floor."""
    parent = room.rpartition("/")[0]
    is_inside = parent in WORDS and FLOOR[parent] == FLOOR[room] and not room.startswith("models/")
    return parent if is_inside else None


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Return a line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(words)}</text>'


class Box:
    """A folder with the folders in it, or the commands of one side."""

    def __init__(self, room: str, title: str, words: tuple[str, ...], side: str) -> None:
        self.room = room
        self.title = title
        self.words = words
        self.side = side
        self.inner = [other for other in WORDS if parent_of(other) == room]
        is_wide = len(self.inner) > 2 or len(title) > 16 or room == "parallel3d/extras/scaling"
        self.columns = 2 if is_wide else 1
        self.height = 30 + LINE * len(words) + CHIPS * bool(self.inner)

    def draw(self, x: float, y: float, width: float, height: float) -> list[str]:
        """Return its elements."""
        ground, line = COLOURS[self.side]
        lines = [
            f'<g data-room="{self.room}">',
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5" '
            f'fill="{ground}" stroke="{line}"/>',
            text(x + 9, y + 19, self.title, f'font-weight="bold" fill="{line}"'),
        ]
        for number, words in enumerate(self.words, 1):
            lines.append(text(x + 9, y + 19 + LINE * number, words, 'font-size="11"'))
        lines.append("</g>")
        left = x + 9
        for room in self.inner:
            name = room.rpartition("/")[2]
            wide = 14 + 5.8 * len(name)
            top = y + height - CHIPS
            lines += [
                f'<g data-room="{room}">',
                f'<rect x="{left:.0f}" y="{top:.0f}" width="{wide:.0f}" height="19" rx="4" '
                f'fill="#ffffff" stroke="{line}" stroke-opacity="0.5"/>',
                text(left + 6, top + 13, name, f'font-size="11" fill="{line}"'),
                "</g>",
            ]
            left += wide + 5
        return lines


def boxes_of(floor: int, side: str) -> list[Box]:
    """Return the boxes of a floor, in the order in which the folders may import each other."""
    if floor == 6:
        commands = {"core": CORE, "extras": EXTRAS}[side]
        return [Box("launch", "launch", (", ".join(commands),), side)]
    boxes = []
    for number, room in ROOMS:
        is_box = room not in HEADINGS and parent_of(room) is None
        if number == floor and side_of(room) == side and is_box:
            boxes.append(Box(room, name_of(room), WORDS[room], side))
    return boxes


def rows_of(boxes: list[Box], columns: int) -> list[list[Box]]:
    """Return the boxes in rows of at most so many columns."""
    rows: list[list[Box]] = []
    free = 0
    for box in boxes:
        if box.columns > free:
            rows.append([])
            free = columns
        rows[-1].append(box)
        free -= box.columns
    return rows


def region(floor: int, side: str, top: float) -> tuple[list[str], float]:
    """Return the boxes of a floor's side as elements, and where they end."""
    left, right = REGIONS[side]
    lines = []
    for row in rows_of(boxes_of(floor, side), COLUMNS[side]):
        height = max(box.height for box in row)
        column = (right - left - GAP * (len(row) - 1)) / sum(box.columns for box in row)
        x: float = left
        for box in row:
            width = column * box.columns
            lines += box.draw(x, top, width, height)
            x += width + GAP
        top += height + GAP
    return lines, top


def picture() -> str:
    """Return the picture as SVG."""
    lines = []
    top: float = TOP
    for floor in sorted(KNOWS, reverse=True):
        name, knows = KNOWS[floor]
        parts = [region(floor, side, top + GAP) for side in REGIONS]
        bottom = max(end for _, end in parts)
        shade = "#f1f3f5" if floor % 2 else "#f8f9fa"
        lines += [
            f'<rect data-floor="{floor}" x="0" y="{top:.0f}" width="{WIDTH}" '
            f'height="{bottom - top:.0f}" fill="{shade}"/>',
            text(12, top + 32, str(floor), 'font-size="20" fill="#adb5bd"'),
            text(32, top + 27, name, 'font-weight="bold"'),
            text(32, top + 42, knows, 'font-size="9" fill="#868e96"'),
        ]
        for drawn, _ in parts:
            lines += drawn
        top = bottom
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 34:.0f}" '
        f'width="{WIDTH}" height="{top + 34:.0f}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13" fill="#343a40">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for room, words in (
        ("parallel3d", "core: what training needs"),
        ("parallel3d/extras", "extras: what a run may want"),
    ):
        left, _ = REGIONS[HEADINGS[room]]
        ground, line = COLOURS[HEADINGS[room]]
        head += [
            f'<g data-room="{room}">',
            f'<rect x="{left}" y="18" width="26" height="26" rx="5" fill="{ground}" '
            f'stroke="{line}"/>',
            text(left + 36, 28, f"{room}/", f'font-weight="bold" fill="{line}"'),
            text(left + 36, 44, words, 'font-size="11"'),
            "</g>",
        ]
    rule = (
        "A folder imports what is below it and, on its own floor, what stands before it. "
        "Only launch imports extras."
    )
    foot = [text(LABELS, top + 22, rule, 'font-size="12" fill="#495057"'), "</svg>"]
    return "\n".join([*head, *lines, *foot])


if __name__ == "__main__":
    print(picture())
