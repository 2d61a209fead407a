"""The planner's memory against published runs, a few of whose facts stand here."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import memory_compared as published_memory
from benchmarks.published import program_memory
from benchmarks.published import rows as published
from benchmarks.published.cells import COLUMNS
from benchmarks.published.program_memory import Holds
from parallel3d.model.spec import Shape
from parallel3d.models.gpt.spec import Config
from parallel3d.plan.layers.placement import model_of
from parallel3d.plan.setting import Software, layers_of
from tests.plan.settings import new_setting

pytestmark = pytest.mark.pure

TABLE = Path(__file__).parents[3] / "shared/data/throughput/published_throughput.csv"
LLAMA_8B = {
    "model_name": "Llama 3.1 8B",
    "n_layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn_hidden": 14336,
    "vocab": 128256,
    "zero_stage": "3 (FSDP2)",
    "tp": 1,
    "pp": 1,
    "gpu": "H100-SXM 96GB HBM2e 2.4TB/s, 500W cap",
    "source_id": "torchtitan_bench_202412",
}
NANOTRON = {
    "vocab": 131072,
    "seq_len": 4096,
    "gpu": "H100-80GB (hopper-prod partition)",
    "cp": 1,
    "source_id": "nanotron_playbook_best",
    "global_batch_seqs": 256,
    "model_name": "Llama-like",
}
GPT_1B3 = {
    "model_name": "GPT-1.3B",
    "n_layers": 24,
    "hidden": 2048,
    "heads": 16,
    "seq_len": 2048,
    "n_gpus": 8,
    "cp": 1,
    "zero_stage": 1,
    "global_batch_seqs": 512,
    "recompute": "full",
    "precision": "fp16",
    "source_id": "bigscience_1b3_v100",
    "tp": 1,
}
SAC = "selective (per-op SAC)"
LONG = {"precision": "float8 linear", "recompute": "full"}
FACTS = [
    # pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 3
    LLAMA_8B
    | {
        "n_gpus": 8,
        "dp": 8,
        "cp": 1,
        "seq_len": 8192,
        "micro_batch": 2,
        "global_batch_seqs": 16,
        "recompute": SAC,
        "precision": "bf16",
        "measured_memory_gb": 77.0,
    },
    LLAMA_8B
    | {
        "n_gpus": 128,
        "dp": 128,
        "cp": 1,
        "seq_len": 8192,
        "micro_batch": 2,
        "global_batch_seqs": 256,
        "recompute": SAC,
        "precision": "bf16",
        "measured_memory_gb": 62.0,
    },
    LLAMA_8B
    | LONG
    | {
        "n_gpus": 8,
        "dp": 8,
        "cp": 1,
        "seq_len": 32768,
        "micro_batch": 1,
        "global_batch_seqs": 8,
        "measured_memory_gb": 83.9,
    },
    LLAMA_8B
    | LONG
    | {
        "n_gpus": 8,
        "dp": 1,
        "cp": 8,
        "seq_len": 262144,
        "micro_batch": 1,
        "global_batch_seqs": 1,
        "measured_memory_gb": 84.5,
    },
    # huggingface/nanotron docs/benchmark_summary.svg
    NANOTRON
    | {
        "n_layers": 28,
        "hidden": 3072,
        "heads": 32,
        "kv_heads": 32,
        "ffn_hidden": 8192,
        "n_gpus": 512,
        "tp": 4,
        "pp": 1,
        "dp": 128,
        "zero_stage": 1,
        "micro_batch": 2,
        "measured_memory_gb": 16.42,
    },
    NANOTRON
    | {
        "n_layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 32,
        "ffn_hidden": 14336,
        "n_gpus": 8,
        "tp": 1,
        "pp": 4,
        "dp": 2,
        "zero_stage": 1,
        "micro_batch": 1,
        "measured_memory_gb": 63.07,
    },
    NANOTRON
    | {
        "n_layers": 80,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 64,
        "ffn_hidden": 28672,
        "n_gpus": 64,
        "tp": 4,
        "pp": 16,
        "dp": 1,
        "zero_stage": 0,
        "micro_batch": 1,
        "measured_memory_gb": 63.07,
    },
    # bigscience-workshop/bigscience experiments/tr3m-1B3.md
    GPT_1B3
    | {"gpu": "V100-SXM-32GB", "pp": 1, "dp": 8, "micro_batch": 8, "measured_memory_gb": 25},
    GPT_1B3
    | {"gpu": "V100-SXM-32GB", "pp": 4, "dp": 2, "micro_batch": 8, "measured_memory_gb": 13},
    GPT_1B3
    | {
        "gpu": "V100-SXM-32GB",
        "pp": 4,
        "dp": 2,
        "micro_batch": 2,
        "recompute": "none",
        "measured_memory_gb": 30,
    },
    GPT_1B3 | {"gpu": "V100-SXM-32GB", "pp": 2, "dp": 4, "micro_batch": 16, "notes": "OOM"},
    GPT_1B3 | {"gpu": "V100-SXM-16GB", "pp": 2, "dp": 4, "micro_batch": 8, "notes": "OOM"},
    GPT_1B3 | {"gpu": "V100-SXM-16GB", "pp": 4, "dp": 2, "micro_batch": 8, "notes": "OOM"},
    GPT_1B3 | {"gpu": "V100-SXM-16GB", "pp": 8, "dp": 1, "micro_batch": 8, "notes": "OOM"},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "facts.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for fact in FACTS:
            # What the memory is compared for needs no speed, but a row does.
            speed = {} if fact.get("notes") == "OOM" else {"measured_iter_time_s": 10.0}
            writer.writerow(fact | speed)
    rows, left_out = published.read(path)
    assert not left_out
    return rows


def test_memory_agrees_with_published_runs(rows):
    report = published_memory.validate_memory(rows)
    assert report["rows"] == 10 and report["mean_error"] < 0.1 and report["worst_error"] < 0.2
    assert len(report["sources"]) == 3
    for row in rows:
        compared = published_memory.compare(row)
        assert (compared is None) == row.out_of_memory
        assert compared is None or abs(compared.error()) < 0.2, row


def test_runs_out_of_memory_do_not_fit_except_on_a_larger_device(rows):
    lost = [row for row in rows if row.out_of_memory]
    assert len(lost) == 4 and not any(map(published_memory.fits, lost))
    report = published_memory.validate_memory(rows)
    assert report["out_of_memory_rows"] == 4 and report["said_to_fit"] == []
    large = next(row.hardware for row in rows if "H100" in row.gpu)
    assert all(published_memory.fits(replace(row, hardware=large)) for row in lost)


@pytest.mark.slow
def test_memory_errors_of_the_whole_table():
    if not TABLE.exists():
        pytest.skip(f"{TABLE} is not there: only the facts in this file were checked")
    report = published_memory.validate_memory(TABLE)
    assert report["rows"] == 73 and report["mean_error"] <= 0.1, report
    assert report["out_of_memory_rows"] == 4 and report["said_to_fit"] == []
    assert (len(report["ran_but_said_not_to_fit"]), report["ran_rows"]) == (
        17,
        1619,
    )  # the docs say so


def test_allocator_share_is_fitted_without_the_judged_group(rows):
    """A group whose measurements are all doubled moves the others' share, never its own."""
    before = published_memory.validate_memory(rows)["allocator"]
    doubled = [
        replace(row, memory_gb=row.memory_gb and 2 * row.memory_gb)
        if row.group == "nanotron"
        else row
        for row in rows
    ]
    after = published_memory.validate_memory(doubled)["allocator"]
    assert after["nanotron"] == before["nanotron"]
    assert after["torchtitan"] > before["torchtitan"] or after["bigscience"] > before["bigscience"]


GPT = Config(
    family="gpt",
    hidden_size=1024,
    num_hidden_layers=14,
    num_attention_heads=16,
    vocab_size=51200,
    max_position_embeddings=1024,
)


def parts_of(holds, **changes):
    software = Software("a program", gradient_bytes=2)
    plain = {"pp": 1, "dp": 4, "zero_stage": 1, "schedule": "one_f_one_b"}
    run = new_setting(
        layers_of(GPT), GPT.hidden_size, Shape(2, 1024), 8, software=software, **(plain | changes)
    )
    return program_memory.parts_of(run, holds)


def test_bytes_of_states_equal_those_by_hand():
    """ZeRO, arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes a parameter, 12 of them divided."""
    parameters = 14 * (12 * 1024**2 + 13 * 1024) + (51200 + 1024) * 1024 + 2 * 1024
    (parts,) = parts_of(Holds(fixed=7, bucket=2))
    assert parts["weights"] == parts["gradients"] == 2 * parameters
    assert parts["optimizer"] == 12 * -(-parameters // 4)
    assert parts["buffers"] == 7 + 2 * parameters and parts["margin"] == parts["gathered"] == 0
    assert parts["logits"] == 10 * 2 * 1024 * 51200
    (whole,) = parts_of(Holds(), zero_stage=0)
    assert whole["optimizer"] == 12 * parameters and whole["buffers"] == 0
    (sharded,) = parts_of(Holds(4, 8), zero_stage=3)
    assert sharded["weights"] == 4 * -(-parameters // 4)
    ends = (2 * 51200 + 1024 + 2) * 1024
    block = 12 * 1024**2 + 13 * 1024
    assert sharded["gathered"] == 2 * (ends + 2 * block)
    pipeline = parts_of(Holds(4, 8), zero_stage=3, pp=2)
    assert [p["gathered"] for p in pipeline] == [p["gradients"] for p in pipeline]


def test_layers_are_placed_as_by_the_programs():
    model = model_of(layers_of(GPT))
    equal = program_memory.stages_of(model, 4, "equal", 1024)
    assert [len(stage) for stage in equal] == [5, 4, 3, 4]  # with the embedding, and the head
    greedy = program_memory.stages_of(model, 2, "greedy", 1024)
    # The head costs as much as 3.7 blocks: a half is 8.9 blocks, and the 9th exceeds it.
    assert greedy == (range(0, 10), range(10, 16))
    for stages in (equal, greedy):
        assert [i for stage in stages for i in stage] == list(range(16))
