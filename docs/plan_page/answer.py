"""Answers of the planner's page, in the browser: the command's own functions, shown as HTML."""

import io
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from parallel3d.base import terminal
from parallel3d.base.errors import ConfigError
from parallel3d.config import RunConfig, hardware
from parallel3d.launch import plan as command
from parallel3d.models.transformers import facts, spec
from parallel3d.plan.report import plan_rows, plan_table, timeline
from parallel3d.plan.request import Request
from parallel3d.plan.search.best_first import search
from parallel3d.plan.search.plans import Plan

CONFIGS = Path(command.__file__).parents[1] / "configs"
# Colours that can be read on white and on dark.
_GREY = (120, 130, 140)
_ANSI = [
    _GREY,
    (224, 62, 62),
    (47, 158, 68),
    (210, 140, 10),
    (59, 110, 230),
    (174, 62, 201),
    (16, 152, 173),
    _GREY,
]
_THEME = TerminalTheme(_GREY, _GREY, _ANSI, _ANSI)
Post = Callable[[str, str], None]  # a part of the page, and its HTML or text


def use_answers(path: Path) -> None:
    """Let models of transformers be read from a file (`build.answers`): torch is not here."""
    known = json.loads(path.read_text())

    def asked(module: str, request: str, purpose: str) -> str:
        text = known.get(json.dumps([module, request]))
        if text is None:
            raise facts.Unsupported("is not in this page", remedy="use the command, on a computer")
        return str(text)

    facts.asked = asked
    spec.asked = asked


ANSWERS = Path(__file__).with_name("answers.json")
if ANSWERS.exists():
    use_answers(ANSWERS)


def choices() -> str:
    """Return the configs that can be picked, with their texts, and the hardware, as JSON."""
    texts = {path.stem: path.read_text() for path in sorted(CONFIGS.glob("*.json"))}
    return json.dumps({"configs": texts, "hardware": hardware.names()})


def answer(config: str, words: str, mesh: str, width: int, post: Post) -> None:
    """Plan a config's text with the command's options in `words`, and post each part when ready.

    `mesh` is the mesh to compare with row 1, as PPxDPxTP or PPxDPxCPxTP, or empty.
    """
    Path("config.json").write_text(config)
    sys.argv = ["plan", "--config", "config.json", *shlex.split(words)]
    messages = io.StringIO()
    try:
        with redirect_stderr(messages):
            _answer(mesh, width, post)
    except SystemExit:
        post("error", messages.getvalue())
    except (ConfigError, OSError) as error:
        post("error", f"plan: {error}")


def _answer(mesh: str, width: int, post: Post) -> None:
    args, overrides = command.parse_args()
    run = RunConfig.from_json(args.config, overrides)
    machine = plan_rows.hardware_of(run, args.hardware)
    devices = args.devices if args.devices is not None else plan_rows.devices_of(run, machine)
    request = plan_rows.make_request(run, machine, devices, args.fix)

    ranking = plan_rows.rank_plans(request, args.rows)
    wide = max(width, 76)  # two lines for a row: a narrower page scrolls it
    post("table", _html(wide, lambda out: plan_table.show(ranking, request, out)))
    post("json", json.dumps(plan_rows.to_json(ranking, request)))
    best = ranking.rows[0]
    number = args.explain or 1
    if number > len(ranking.rows):
        raise ConfigError(f"--explain {number}: must be at most {len(ranking.rows)}")
    row = ranking.rows[number - 1]
    post("parts", _html(width, lambda out: plan_table.explain(row, out)))
    if mesh:
        post("why", _html(width, lambda out: why_not(mesh, best, request, args.fix, out)))
    post("drawing", timeline.drawing(row)[0])


def why_not(mesh: str, best: Plan, request: Request, fix: list[str], out: Console) -> None:
    """Print why `best` is chosen rather than the best plan of `mesh`."""
    sizes = mesh.lower().replace("×", "x").split("x")
    axes = ("pp", "dp", "tp") if len(sizes) == 3 else ("pp", "dp", "cp", "tp")
    fixed = [word for word in fix if word.partition("=")[0] not in axes]
    fixed += [f"{axis}={size.strip()}" for axis, size in zip(axes, sizes, strict=False)]
    try:
        asked = plan_rows.make_request(request.config, request.hardware, request.devices, fixed)
        found = search(asked, rows=1)
    except ConfigError as error:
        terminal.say(out, f"Not possible: {error}")
        return
    other = found.rows[0]
    if not found.plans:
        out.print("Its smallest plan does not fit.\n", style="red")
    elif other.setting.choices == best.setting.choices:
        out.print("That mesh is the best one's.\n", style="green")
    else:
        ratio = 100 * (other.time.seconds / best.time.seconds - 1)
        out.print(
            f"Its best plan takes {ratio:.1f} % longer.\n"
            if ratio >= 0
            else f"Its best plan is {-ratio:.1f} % faster, but offloads or has cp, which must save "
            "more to be ranked first.\n"
        )
        for name, part in other.time.parts.items():
            own = best.time.parts.get(name, 0.0)
            if abs(part - own) > 1e-3 * best.time.seconds:
                shown = f"{plan_table.three(part)} s, the best one {plan_table.three(own)} s"
                out.print(f"  {name:<15}{shown}")
        out.print()
    plan_table.explain(other, out)


def _html(width: int, show: Callable[[Console], object]) -> str:
    out = Console(
        file=io.StringIO(),
        record=True,
        width=width,
        highlight=False,
        markup=False,
        soft_wrap=True,
        force_terminal=True,
        color_system="standard",
    )
    show(out)
    return out.export_html(theme=_THEME, code_format="{code}", inline_styles=True)
