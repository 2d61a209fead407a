"""Published runs of mixtures of experts: read with ep, and reported apart from the other runs."""

import csv
import io
from pathlib import Path

import pytest

from benchmarks.published import rows as published
from benchmarks.published.flops import model_flops
from benchmarks.published.rows import read
from benchmarks.published.validate import validate
from tests.published.test_published import SAMPLE

pytestmark = pytest.mark.pure

EXPERTS = Path(published.__file__).with_name("experts.csv")
PAGE = Path(__file__).parents[2] / "docs/planner/validation.md"
SHOWN = ("mean_error", "worst_error", "bias", "constant_mean_error")


def test_sizes_equal_the_published_ones() -> None:
    rows, left_out = read(EXPERTS)
    assert len(rows) == 15 and len(left_out) == 3
    billions = {"Qwen3_30B_a3B": (30.532, 3.353), "Qwen3_235B_a22B": (235.094, 22.191)}
    for row in rows:
        total, active = billions[row.model]
        setting = row.setting
        assert setting.workload.num_params / 1e9 == pytest.approx(total, abs=1e-3)
        assert setting.workload.num_active_params / 1e9 == pytest.approx(active, abs=1e-3)
        assert setting.flow.ep > 1 and setting.mesh.dp % setting.flow.ep == 0
        assert setting.workload.ep_imbalance == 1  # the tokens of these runs were dealt evenly
    reasons = [out.rule for out in left_out]
    assert sorted(reasons) == [
        "ep does not divide dp and the experts",
        "ep does not divide dp and the experts",
        "flagged ANOMALY in the table",
    ]


@pytest.mark.parametrize(
    ("line", "tflops", "tokens", "layers", "width"),
    [(2, 699, 30376, 48, 32 * 128), (3, 974, 6583, 94, 64 * 128)],
)
def test_flops_count_only_the_experts_of_a_token(
    line: int, tflops: float, tokens: float, layers: int, width: int
) -> None:
    """NVIDIA prints both rates; its attention has only the half that is not masked."""
    row = next(row for row in read(EXPERTS)[0] if row.line == line)
    masked = 6 * layers * width * 4096
    own = model_flops(row.setting) / row.setting.tokens_per_step - masked
    assert own == pytest.approx(tflops * 1e12 / tokens, rel=0.005)


def test_expert_rows_change_no_figure_of_other_runs(tmp_path: Path) -> None:
    """Two sources in one table: the lines above are those of the table without experts."""
    dense = tmp_path / "dense.csv"
    both = tmp_path / "both.csv"
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        others = [row for row in csv.DictReader(file) if row["source_id"] == "nvidia_dgxc"]
    with EXPERTS.open(newline="", encoding="utf-8") as file:
        sparse = list(csv.DictReader(file))
    names = list(dict.fromkeys([*others[0], *sparse[0]]))
    for path, rows in ((dense, others), (both, [*others, *sparse[:2]])):
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8")
    alone = validate(dense)
    mixed = validate(both)
    assert alone["experts"] == {} and mixed["experts"]["all, by row"]["rows"] == 2
    for name in ("groups", "memory", "overall", "assumed"):
        assert mixed[name] == alone[name], name
    assert mixed["rows"][: len(alone["rows"])] == alone["rows"]


def test_page_shows_the_current_errors() -> None:
    """The rows of each device by a time of experts that was fitted on those of the others."""
    lines = validate(EXPERTS)["experts"]
    page = PAGE.read_text(encoding="utf-8")
    names = ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "in fp8", "in bf16", "all")
    assert lines["all, by row"]["mean_error"] <= 0.15
    for name, line in zip(names, lines.values(), strict=True):
        errors = " | ".join(f"{100 * line[key]:.1f} %" for key in SHOWN)
        assert f"| {name} | {line['rows']} | {errors} |" in page
