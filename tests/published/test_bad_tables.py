"""What no row may hold is left out by line and reason, and what no table may be is one message."""

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.published import __main__ as command
from benchmarks.published.cells import COLUMNS, OPTIONAL
from benchmarks.published.rows import read
from parallel3d.base.errors import ConfigError

pytestmark = pytest.mark.pure

SAMPLE = Path(__file__).with_name("published_sample.csv")
CASES = list(csv.DictReader(Path(__file__).with_name("bad_cells.csv").open(encoding="utf-8")))
NAMES = (*COLUMNS, *OPTIONAL, "lora_rank")
DONE = 0
BAD_INPUT = 2


def good() -> dict[str, str]:
    """A row without pipeline and assumptions of its source: Llama 3.1 8B on eight H100."""
    with SAMPLE.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        row = next(row for row in rows if row["source_id"] == "torchtitan_bench_202412")
    return {name: row.get(name, "") for name in NAMES}


def changed(cells: str) -> dict[str, str]:
    """The good row with "name=text name=text": a text ends where the next name begins."""
    row = good()
    name = ""
    for word in cells.replace(r"\0", "\0").split(" "):
        before, equals, text = word.partition("=")
        if equals and before in NAMES:
            name = before
            row[before] = text
        else:
            row[name] += f" {word}"
    return row


def text_of(rows: Sequence[dict[str, str]], delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, NAMES, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def validate(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str, str]:
    """The command's exit code, standard output and standard error, in this process."""
    monkeypatch.setattr(sys, "argv", ["published", str(path), "--json", *more])
    code = command.main()
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_bad_row_is_skipped_with_line_and_reason(tmp_path: Path, case: dict[str, str]) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text_of([good(), changed(case["cells"])]), encoding="utf-8")
    rows, left_out = read(path)
    assert [row.line for row in rows] == [2]
    assert [out.line for out in left_out] == [3]
    assert case["says"] in left_out[0].reason and left_out[0].rule
    assert "\n" not in left_out[0].reason


def test_bad_rows_do_not_abort_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text_of([*(changed(case["cells"]) for case in CASES), good()]), "utf-8")
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = validate(path, monkeypatch, capsys)
    report = json.loads(out)
    assert code == DONE and report["overall"]["rows"] == 1
    assert [left["row"] for left in report["left_out"]] == list(range(2, len(CASES) + 2))
    # On the screen rows of one reason share a line.
    rules = {left["rule"] for left in report["left_out"]}
    assert len(rules) < len(CASES) - 10
    assert "no hardware is described for the gpu. The first: no hardware is described for" in (
        " ".join(err.split())
    )


def test_missing_cells_are_requested_once_per_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.csv"
    rows = [
        good(),
        changed("micro_batch="),
        changed("micro_batch= global_batch_seqs="),
        good(),
        changed("source_id=mine"),
        changed("source_id=mine micro_batch="),
    ]
    path.write_text(text_of(rows), "utf-8")
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = validate(path, monkeypatch, capsys)
    assert code == DONE
    asked = json.loads(out)["asked"]
    assert {name: column["lines"] for name, column in asked.items()} == {
        "program": [6, 7],
        "micro_batch": [3, 4],
        "global_batch_seqs": [4],
    }
    assert err.count("sequences of a microbatch on one data-parallel rank") == 1


def test_cells_in_words_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    own = "source_id=mine program=torchtitan tp=1 dp=8 n_gpus=8 "
    rows = [
        changed(own + "vocab=a 250k vocabulary"),
        changed(own + "precision=mixed (16-bit)"),
        changed(own + "zero_stage=FSDP, parameters not resharded"),
        changed(own + "zero_stage=3 (HSDP) devices_per_node=4 network_gbps=100"),
        changed(own + "kernels=not compiled"),
    ]
    path.write_text(text_of(rows), "utf-8")
    read_rows, left_out = read(path)
    assert not left_out
    words, mixed, kept, hybrid, eager = (row.setting for row in read_rows)
    assert words.workload.layers[0].num_params == 250_000 * 4096
    assert mixed.workload.precision == "bf16" and mixed.workload.layers == eager.workload.layers
    assert (kept.state.zero_stage, kept.state.weights) == (3, "per_step")
    assert mixed.state.weights == "per_microbatch"
    assert (hybrid.shards, mixed.shards) == (4, 8)
    assert [s.workload.software.kernels for s in (eager, mixed)] == ["eager", "compiled"]
    network = read_rows[3].hardware.network
    node = read_rows[3].hardware.devices_per_node
    assert network and node and (network.bandwidth.value, node.value) == (12.5e9, 4)
    assert "devices_per_node" not in read_rows[3].assumed


HEADER = ",".join(NAMES) + "\n"
GOOD = text_of([good()])
FILES = {
    "empty": (b"", "line 1: the file is empty or names no column of a table of published runs"),
    "only a header": (HEADER.encode(), "has no row below its header; write one run a line"),
    "another table": (b"a,b\n1,2\n", "names no column of a table of published runs"),
    "one column of many": (b"source_id\nme\n", "the columns model_name, params_b"),
    "a column twice": (HEADER.replace(",tp,", ",tp,tp,").encode(), "the columns tp stand twice"),
    "a column nearly right": (
        GOOD.replace(",program,", ",programm,").encode(),
        "the column programm is not known; is it program?",
    ),
    "no text": (bytes(range(256)), "no UTF-8 text: invalid start byte at byte 128); save it as"),
    "half of UTF-16": (GOOD.encode("utf-16")[:-1], "no UTF-8 text"),
    "an open quotation mark": (HEADER.encode() + b'"a,b\n', "line 2: cannot be read as a csv"),
    "an endless cell": (HEADER.encode() + b"a" * 200_000, "field larger than field limit"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_table_gives_one_message(
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content, says = FILES[name]
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    code, out, err = validate(path, monkeypatch, capsys)
    assert (code, out) == (BAD_INPUT, "")
    assert err.startswith(f"published: {path}") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("place", ["nowhere.csv", ".", "a\0b", "/dev/zero"])
def test_invalid_file_gives_one_message(
    tmp_path: Path,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = validate(tmp_path / place, monkeypatch, capsys)
    assert (code, out, err.count("\n")) == (BAD_INPUT, "", 1)
    assert "give the path of a table with the columns of published_throughput.csv" in err


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a,b", "line 3 has 2 cells, the header 40"),
        (GOOD.splitlines()[1] + ",more", "line 3 has 41 cells, the header 40"),
        ("," * (len(NAMES) - 1), "the row is empty"),
    ],
)
def test_row_of_another_length_is_skipped(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(f"{GOOD}{row}\n\n", encoding="utf-8")  # a blank line is none
    rows, left_out = read(path)
    assert [row.line for row in rows] == [2] and [out.line for out in left_out] == [3]
    assert says in left_out[0].reason


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_files_of_spreadsheets_are_read(
    tmp_path: Path, encoding: str, delimiter: str, end: str
) -> None:
    path = tmp_path / "table.csv"
    text = text_of([good() | {"notes": "dix-sept à Zürich"}], delimiter)
    path.write_bytes(text.replace("\n", end).encode(encoding))
    rows, left_out = read(path)
    assert not left_out and rows[0].model == "Llama 3.1 8B" and rows[0].setting.mesh.dp == 8


@pytest.mark.parametrize("name", ["fsdp9", "", "DeepSpeed"])
def test_unknown_program_is_refused_before_any_row(name: str) -> None:
    with pytest.raises(ConfigError, match=r'--program = ".*" is not described; write one of: "'):
        read(SAMPLE, name)
