"""The page of `parallel3d report`: whole in one file, with what the run's own files say."""

import json
import re
import sys
from html import unescape

import pytest

from launch import report
from parallel3d.config import RunConfig
from parallel3d.extras.report import runs
from parallel3d.plan.memory.peak import per_rank
from tests.config.configs import raw

pytestmark = pytest.mark.pure

DONE = 0
BAD_INPUT = 2
PEAKS = [500 * 2**20, 400 * 2**20, 300 * 2**20, 200 * 2**20]


def run_in(folder, *, meshes=("2x1x2",), steps=10, speed=1000.0, device="cpu", **settings):
    """Write a run of two validation sets, launched once per mesh: `steps` by all together."""
    folder.mkdir(parents=True)
    vocabulary = {"parallel3d.model.vocab_size": 4096}
    config = RunConfig.from_dict(raw(**vocabulary | settings)).resolve(4)
    (folder / "config.json").write_text(json.dumps(config.to_public_dict()))
    lines = [
        {
            "step": step,
            "loss": 8.0 / step,
            "grad_norm": 1.0,
            "lr": 1e-3 * step,
            "mfu": None,
            "tokens": 1024 * step,
            "tokens_per_second": speed,
            "step_seconds": 1024 / speed,
            "validation": {"held_out": {"loss": 9 / step}, "web": {"loss": 10 / step}},
        }
        for step in range(1, steps + 1)
    ]
    del lines[0]["validation"]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "metrics.jsonl").write_text(f'{text}{{"step": 11, "lo')  # a killed writer's
    events = []
    for launch, mesh in enumerate(meshes):
        first = launch * steps // len(meshes)
        events.append({"event": "launch", "step": first, "mesh": mesh, "device": device})
    events.append({"event": "end", "step": steps, "stopped": False, "peak_memory_bytes": PEAKS})
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """`parallel3d report`: its exit code and its two outputs."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
        code = report.main()
        return code, capsys.readouterr()

    return call


@pytest.fixture
def undrawn(monkeypatch):
    """Draw no plots: the test reads the page's tables."""
    monkeypatch.setattr(runs, "pictures", lambda *_: {})


@pytest.fixture
def bare(monkeypatch):
    """Draw the plots that other tests see without content."""
    for name in ("_losses", "_stacked", "_memory"):
        monkeypatch.setattr(runs, name, lambda plt, *_: plt.figure(figsize=(1, 1)))


def rows_of(page):
    """The cells of each row of the page's tables by the first."""
    rows = [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>.*?</tr>", page)]
    return {unescape(name): list(map(unescape, cells)) for name, *cells in rows}


def test_page_of_two_runs_is_one_complete_file(tmp_path, command):
    first = run_in(tmp_path / "first", meshes=("1x2x2", "2x1x2"))
    changes = {"optimizer.params.lr": 2e-3, "parallel3d.train.seed": 7}
    second = run_in(tmp_path / "a<b>", speed=2000.0, **changes)
    code, printed = command(first, second, "--json")
    plots = {path.stem: path.read_bytes() for path in (first / "report").iterdir()}
    assert code == DONE and json.loads(printed.out) == {
        "page": str(first / "report.html"),
        "plots": ["loss", "memory", "rates", "speed"],
    }
    assert set(plots) == {"loss", "memory", "rates", "speed"}
    assert all(image.startswith(b"\x89PNG") and len(image) > 5000 for image in plots.values())

    page = (first / "report.html").read_text()
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 4 and all(s.startswith("data:image/png;base64,") for s in sources)
    fetches = r"https?:|<script|<link|@import|url\(|(?:href|srcset)="
    assert not re.search(fetches, re.sub(r'src="[^"]*"', "", page)), "nothing is fetched"
    assert "a<b>" not in page and "a&lt;b&gt;/config.json" in page

    rows = rows_of(page)
    assert rows["steps"] == ["10 of 10"] * 2 and rows["loss of web"] == ["1.0000"] * 2
    # The mean of 8 / step over the steps 6 to 10 of the last launch, and over all ten.
    assert rows["training loss"] == ["1.0330", "2.3432"] and rows["MFU"] == ["-"] * 2
    assert rows["tokens/s"] == ["1,000", "2,000"] and rows["launches"] == ["2", "1"]
    assert rows["mesh, pp×dp×tp"] == ["1×2×2 → 2×1×2", "2×1×2"]
    assert rows["optimizer.params.lr"] == ["0.001", "0.002"] and rows["train.seed"] == ["0", "7"]
    assert "zero_optimization.stage" not in rows, "a setting that does not differ"
    for words in ("dotted lines mark restarts", "includes Python and its libraries"):
        assert words in page
    assert page.count("is not measured yet; run `parallel3d plan --calibrate` first") == 2


@pytest.mark.usefixtures("bare")
def test_layers_around_a_jump_are_drawn_and_the_first_one_is_named(tmp_path, command):
    run = run_in(tmp_path / "run")
    names = ["embedding", "blocks.0", "blocks.1", "head"]
    steps = [*range(1, 31)]
    quantities = {}
    for name in ("gradient_norm", "update_over_weight", "largest_output"):
        quantities[name] = [[1 + 0.1 * (step % 3) for _ in names] for step in steps]
    for place in range(22, 30):
        quantities["update_over_weight"][place][2] = 10.0
    quantities["largest_output"][27][1] = None
    record = {"step": 25, "reason": "the loss spikes to 9", "layers": names, "steps": steps}
    record |= {"first_samples": [16 * step for step in steps], **quantities}
    (run / "layers").mkdir()
    older = record | {"step": 9, "reason": "an older one"}
    for each in (record, older):
        (run / f"layers/step-{each['step']}.json").write_text(json.dumps(each))
    code, printed = command(run, "--json")
    assert code == DONE and json.loads(printed.out)["plots"][0] == "layers"
    page = unescape((run / "report.html").read_text())
    assert "step 25 of run" in page and "the loss spikes to 9: blocks.1 left its own range" in page
    assert "at step 23" in page and "an older one" not in page
    assert (run / "report/layers.png").read_bytes().startswith(b"\x89PNG")


def test_restarts_are_shown_at_their_steps(tmp_path):
    run = runs.read(run_in(tmp_path / "run", meshes=("1x2x2", "1x2x2", "2x1x2"), steps=9))
    assert run.restarts() == [(3 * 1024, ""), (6 * 1024, "2×1×2")]
    with runs.style() as plt:
        figure = runs._losses(plt, [run])
        axes = figure.axes[0]
        dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
        assert dotted == [3 * 1024, 6 * 1024]
        assert [text.get_text().strip() for text in axes.texts] == ["2×1×2"]
        assert {"training", "held_out", "web"} == set(axes.get_legend_handles_labels()[1])
        plt.close(figure)


@pytest.mark.usefixtures("bare")
def test_measurements_are_those_of_the_newest_launch(tmp_path):
    folder = run_in(tmp_path / "run", meshes=("1x2x2", "2x1x2"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    for line in lines[5:]:
        line["tokens_per_second"] = 7.0 if line["step"] == 6 else 50.0  # 6: it also warms up
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert runs.read(folder).measured("tokens_per_second") == 50.0
    (folder / "events.jsonl").unlink()  # an older version wrote none
    run = runs.read(folder)
    assert run.measured("mfu") != run.measured("mfu"), "no step has it"
    assert run.measured("tokens_per_second") == 50.0 and run.restarts() == run.memory() == []
    page, plots = runs.page([run], ["none"], {})
    sizes = "×".join(map(str, run.config.mesh.sizes.shown.values()))
    assert "memory" not in plots and rows_of(page)["mesh, pp×dp×tp"] == [sizes]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_is_shown_beside_the_measurements(tmp_path, device):
    """Memory as it was counted: resident on a CPU, in torch's allocator on a GPU."""
    offload = {"zero_optimization.offload_optimizer": {"device": "cpu"}}
    run = runs.read(run_in(tmp_path / "run", device=device, **{"bf16.enabled": True}, **offload))
    plan = runs.planned(run, "a100-80gb")
    rows = rows_of(runs.page([run], [plan], {})[0])
    assert rows["step, s"] == ["1.02", f"{plan.time.seconds:.3g}"]
    memory = max(per_rank(plan.setting), key=lambda memory: memory.total + memory.host)
    most = memory.total + memory.host
    if device == "cuda":
        most = plan.memory.total - plan.memory.parts["margin"]
    assert rows["fullest rank, MiB"] == ["500", f"{most / 2**20:.3g}"]
    parts = {name: value for name, value in plan.time.parts.items() if value}
    assert parts and all(rows[f"· {name}"] == ["", f"{x:.3g}"] for name, x in parts.items())


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("own", "recognised"),
    [
        pytest.param("A100-SXM4-80GB", None, marks=pytest.mark.slow),
        ("auto", "A100-SXM4-80GB"),
    ],
)
def test_hardware_of_unknown_fp32_speed_has_no_plan(tmp_path, own, recognised):
    folder = run_in(tmp_path / "run", **{"parallel3d.run.hardware": own})
    launch = {"event": "launch", "step": 0, "mesh": "2x1x2", "device": "cuda"}
    end = {"event": "end", "step": 10, "peak_memory_bytes": PEAKS}
    events = json.dumps(launch | {"hardware": recognised}), json.dumps(end)
    (folder / "events.jsonl").write_text("\n".join(events))
    run = runs.read(folder)
    why = runs.planned(run, None)
    assert isinstance(why, str) and "no FLOP/s is known for fp32" in why
    page, _ = runs.page([run], [why], {})
    assert f"The time is not planned: {why}" in unescape(page) and "dashed" not in page
    assert rows_of(page)["fullest rank, MiB"] == ["500"]


@pytest.mark.usefixtures("undrawn")
def test_generated_text_is_escaped(tmp_path):
    run = runs.read(run_in(tmp_path / "run"))
    texts = {"after step 5": "if a < b:\n    return <1>", "after step 10": "print()"}
    page, _ = runs.page([run], ["none"], {"run": texts})
    shown = dict(re.findall(r"<p>(after step \d+)</p><pre>(.*?)</pre>", page, re.DOTALL))
    assert {at: unescape(text) for at, text in shown.items()} == texts and "<1>" not in page


def test_folder_without_a_run_is_refused(tmp_path, command):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty/config.json: No such file or directory; name the" in refusal(command, empty)
    run = run_in(tmp_path / "run")
    assert "--hardware" in refusal(command, run, "--hardware", "nope")
    (run / "metrics.jsonl").write_text("")
    assert "run/metrics.jsonl: has no loss yet; wait" in refusal(command, run)


@pytest.mark.parametrize("loss", ["null", "NaN", "Infinity"])
def test_run_without_a_number_is_not_told_to_wait(tmp_path, command, loss):
    run = run_in(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"loss": [^,}]+', f'"loss": {loss}', lines))
    assert "has 10 steps whose loss is not a number, and no other; docs" in refusal(command, run)


def refusal(command, *words):
    code, printed = command(*words)
    assert code == BAD_INPUT and printed.err.startswith("report: ") and not printed.out
    return printed.err


@pytest.mark.usefixtures("bare")
def test_scores_on_tasks_are_drawn_over_steps(tmp_path, monkeypatch):
    folder = run_in(tmp_path / "run")
    *lines, _ = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in (rows[4], rows[9]):
        row["scores"] = {
            "questions": {"acc": row["step"] / 20, "acc_stderr": 0.01},
            "texts": {"perplexity": 30.0 - row["step"]},
        }
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = runs.read(folder)
    assert run.scores() == {
        "questions, acc": [(5, 0.25, 0.01), (10, 0.5, 0.01)],
        "texts, perplexity": [(5, 25.0, 0.0), (10, 20.0, 0.0)],
    }
    drawn = []
    from matplotlib.axes import Axes

    errorbar = Axes.errorbar

    def noted(self, steps, values, errors, **options):
        drawn.append((options["label"], steps, values, errors))
        return errorbar(self, steps, values, errors, **options)

    monkeypatch.setattr(Axes, "errorbar", noted)
    page, plots = runs.page([run], [runs.planned(run, None)], {})
    assert "scores" in plots
    assert drawn == [
        ("questions", (5, 10), (0.25, 0.5), (0.01, 0.01)),
        ("texts", (5, 10), (25.0, 20.0), (0.0, 0.0)),
    ]
    assert rows_of(page)["questions, acc"] == ["0.5000"]


@pytest.mark.usefixtures("undrawn")
def test_measured_parts_stand_beside_the_plan_with_the_largest_excess(tmp_path, command):
    folder = run_in(tmp_path / "run", bf16={"enabled": True})
    parts = dict.fromkeys(("forward", "backward", "waiting", "reduction", "optimizer"), 1e-4)
    ranks = [{"pp_coord": rank // 2, "data": 0.75, "rest": 0.0, **parts} for rank in range(4)]
    event = {"event": "step_parts", "step": 10, "steps": 5, "ranks": ranks}
    with (folder / "events.jsonl").open("a") as journal:
        journal.write(f"{json.dumps(event)}\n")
    code, _ = command(folder, "--hardware", "h100")
    page = unescape((folder / "report.html").read_text())
    assert code == DONE and rows_of(page)["· data"] == ["0.75", "0"]
    assert "largest excess: data, 0.750 s; setting to change: parallel3d.data.cache" in page
