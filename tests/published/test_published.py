"""Published tables become rows: conventions undone, blanks named, nonsense refused in one line."""

import csv
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmarks.published import programs
from benchmarks.published.cells import OPTIONAL
from benchmarks.published.flops import model_flops
from benchmarks.published.rows import LeftOut, PublishedRun, read
from parallel3d.model.recompute import FULL

pytestmark = pytest.mark.pure

SAMPLE = Path(__file__).with_name("published_sample.csv")  # rows of published_throughput.csv
SHARED = Path(__file__).parents[3] / "shared/data/throughput/published_throughput.csv"


@cache
def read_sample() -> tuple[list[PublishedRun], list[LeftOut]]:
    """The sample, read once."""
    return read(SAMPLE)


def sample() -> dict[tuple[str, str], PublishedRun]:
    """(source, model) -> the first such row of the sample."""
    rows: dict[tuple[str, str], PublishedRun] = {}
    for row in read_sample()[0]:
        rows.setdefault((row.source, row.model), row)
    return rows


def test_hardware_flops_are_converted_by_equation_3_of_megatron() -> None:
    row = sample()["megatron_sc21_t1", "GPT-18.4B"]
    batch = 1024
    seq = 2048
    layers = 40
    hidden = 6144
    vocab = 51200
    # arXiv:2104.04473, equation 3
    flops = 96 * batch * seq * layers * hidden**2
    flops *= 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    assert row.seconds == pytest.approx(flops / (256 * 135e12), rel=1e-9)
    assert row.setting.flow.recompute == FULL
    assert row.setting.workload.software.attention == "classic"


def test_model_flops_do_not_count_recomputation() -> None:
    row = sample()["megatron_core_h100_weak", "16B"]
    batch = 192
    seq = 4096
    layers = 32
    hidden = 6144
    vocab = 131072
    forward = 24 * layers * hidden**2 + 4 * layers * seq * hidden + 2 * hidden * vocab
    assert model_flops(row.setting) == 3 * batch * seq * forward
    assert row.seconds == pytest.approx(3 * batch * seq * forward / (192 * 489.1e12))


def test_tokens_per_second_and_seconds_take_precedence_over_flops() -> None:
    rows = sample()
    foundry = rows["llm_foundry", "MPT-7b"]
    assert foundry.measured == "tokens/s of a device"
    assert foundry.seconds == pytest.approx(6 * 2048 / 10475)
    assert rows["nvidia_dgxc", "Llama 3.1 8B"].seconds == 12.27


def test_nanotron_counts_attention_in_full_against_989_teraflops() -> None:
    row = sample()["nanotron_playbook_best", "Llama-like 3.57B"]
    hidden = 3072
    layers = 28
    inner = 8192
    seq = 4096
    forward = 2 * layers * (4 * hidden**2 + 3 * hidden * inner) + 4 * layers * seq * hidden
    forward += 2 * hidden * 131072
    assert row.seconds == pytest.approx(3 * forward * 256 * 4096 / (8 * 0.4668 * 989e12))


def test_parameter_counts_equal_those_of_the_sources() -> None:
    stated = {
        ("megatron_sc21_t1", "GPT-145.6B"): 145.6,
        ("megatron_core_h100_weak", "7.1B"): 7.1,  # only without tied embeddings
        ("nanotron_playbook_best", "Llama-like 3.57B"): 3.57,  # only with tied ones
        ("torchtitan_bench_202412", "Llama 3.1 8B"): 8.03,
        ("nvidia_dgxc", "Nemotron4 15B"): 15.6,
        ("llm_foundry", "MPT-30b"): 29.98,
    }
    rows = sample()
    for key, billions in stated.items():
        assert rows[key].setting.workload.num_params / 1e9 == pytest.approx(billions, rel=0.01), key


def test_filled_blanks_are_noted() -> None:
    row = sample()["megatron_core_h100_weak", "16B"]
    assert "micro_batch = 4" in row.notes and "recompute = none" in row.notes
    assert any("published config" in note for note in sample()["olmo_core", "Llama3 8B"].notes)


def test_every_row_is_used_or_skipped_with_a_reason() -> None:
    rows, left_out = read_sample()
    lines = [row.line for row in rows] + [out.line for out in left_out]
    with SAMPLE.open() as file:
        assert sorted(lines) == list(range(2, len(file.readlines()) + 1))
    reasons = {out.source: out.reason for out in left_out}
    assert reasons["megatron_core_h100_strong"].startswith("no mesh is stated; fill tp, pp")
    assert "ANOMALY" in reasons["bigscience_gpt2_v100"]
    assert "TPU" in reasons["palm_t3"]
    oom = [row for row in rows if row.out_of_memory]
    assert [row.seconds for row in oom] == [None]


def test_clusters_differ_from_the_machines_of_vendors() -> None:
    jean_zay = sample()["bigscience_gpt2_v100", "GPT-52B"].hardware
    assert jean_zay.devices_per_node and jean_zay.devices_per_node.value == 4
    assert jean_zay.network and jean_zay.network.one_ring
    capped = sample()["torchtitan_bench_202412", "Llama 3.1 8B"]
    assert capped.hardware.peak("bf16") == 9.12e14 and capped.chip == "H100 500 W"
    assert sample()["llm_foundry", "MPT-7b"].hardware.peak("bf16") == 9.89e14


def test_programs_differ_within_a_source() -> None:
    rows = {row.line: row for row in read_sample()[0]}
    programs = {
        row.setting.workload.software.name for row in rows.values() if row.source == "llm_foundry"
    }
    assert programs == {"FSDP, PURE", "FSDP, DEFAULT"}
    tables = [row for row in rows.values() if row.source == "megatron_sc21_t2"]
    assert {(r.setting.state.zero_stage, r.setting.workload.software.one_ring) for r in tables} == {
        (3, True),
        (0, False),
    }


def test_unknown_source_requires_a_program(tmp_path: Path) -> None:
    table = edited(tmp_path, lambda cells: cells.update(source_id="mine", notes=""))
    assert "the program that ran" in next(o.reason for o in read(table)[1] if o.source == "mine")
    row = next(row for row in read(table, "megatron core")[0] if row.source == "mine")
    assert row.group == "mine" and row.setting.workload.software is programs.MEGATRON_CORE
    assert row.assumed["program"] == "Megatron-Core"
    # A described source has its own program, whatever is given for the others.
    described = {row.source: row for row in read(table, "JAX")[0]}["olmo_core"]
    assert described.setting.workload.software is programs.FSDP2


def test_optional_columns_replace_assumptions(tmp_path: Path) -> None:
    def state(cells: dict[str, str]) -> None:
        cells |= {"program": "NeMo", "network_gbps": "100", "attention_kernel": "Flash-Attention 2"}
        cells |= {"pp": "4", "dp": "8", "virtual_stages": "3"}

    plain = read_sample()[0][0]
    assert plain.line == 2 and plain.assumed["program"].startswith("Megatron-LM 2021")
    assert plain.assumed["network_gbps"] == 200
    assert plain.setting.workload.software.attention == "classic"
    row = read(edited(tmp_path, state))[0][0]
    assert row.line == 2 and not {"program", "network_gbps", "virtual_pp"} & set(row.assumed)
    assert row.hardware.network and row.hardware.network.bandwidth.value == 12.5e9
    software = row.setting.workload.software
    assert (software.name, software.attention, software.hopper) == ("NeMo", "flash", False)
    assert (row.setting.order.stages_per_rank, row.setting.order.schedule) == (3, "interleaved")


@pytest.mark.parametrize(
    ("model", "words", "entries"),
    [
        ("Llama 3.1 8B", "as published", 128256),  # by the model's name
        ("Llama-2-7b-hf", "", 32000),
        ("a llama of mine", "Llama 3 tokenizer", 128256),  # by the words themselves
        ("Qwen2.5-7B", "tiktoken", 152064),
    ],
)
def test_vocabulary_in_words_or_blank_is_that_of_the_architecture(
    tmp_path: Path, model: str, words: str, entries: int
) -> None:
    sizes = {"source_id": "mine", "model_name": model, "vocab": words, "params_b": ""}
    row = next(
        r for r in read(edited(tmp_path, lambda c: c.update(sizes)), "NeMo")[0] if r.line == 2
    )
    head = row.setting.workload.layers[0].params[0]
    assert row.assumed["vocab"] == entries and head.shape[0] == entries


@pytest.mark.parametrize(("billions", "family"), [("6.74", "llama"), ("5.2", "gpt")])
def test_number_of_parameters_selects_the_family_of_an_unknown_name(
    tmp_path: Path, billions: str, family: str
) -> None:
    sizes = {
        "source_id": "mine",
        "model_name": "Foo 7B",
        "params_b": billions,
        "n_layers": "32",
        "hidden": "4096",
        "heads": "32",
        "kv_heads": "32",
        "ffn_hidden": "11008",
        "vocab": "32000",
    }
    row = next(
        r for r in read(edited(tmp_path, lambda c: c.update(sizes)), "NeMo")[0] if r.line == 2
    )
    assert row.assumed["family"] == family
    assert row.setting.workload.num_params / 1e9 == pytest.approx(float(billions), rel=0.03)


def test_blank_number_format_is_one_of_the_chip(tmp_path: Path) -> None:
    change = {"source_id": "mine", "precision": "", "gpu": "V100-SXM2-32GB", "params_b": ""}
    path = edited(tmp_path, lambda cells: cells.update(change, measured_tflops_per_gpu="50"))
    row = next(row for row in read(path, "Megatron-LM 2021")[0] if row.source == "mine")
    assert row.setting.workload.precision == row.assumed["precision"] == "fp16"


def edited(folder: Path, change: Callable[[dict[str, str]], None]) -> Path:
    """The sample, its first row changed."""
    with SAMPLE.open(newline="") as file:
        cells = [row | dict.fromkeys(OPTIONAL, "") for row in csv.DictReader(file)]
    change(cells[0])
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(cells[0]))
        writer.writeheader()
        writer.writerows(cells)
    return path


@pytest.mark.slow
def test_whole_table_is_read() -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not there")
    rows, left_out = read(SHARED)
    assert len(rows) + len(left_out) == 2116
    assert len(left_out) == 24 and len({row.source for row in rows}) == 22
    assert all(row.seconds is None or row.seconds > 0 for row in rows)
