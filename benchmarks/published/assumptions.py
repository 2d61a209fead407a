"""Values that published tables leave out, and that documents, scripts or rules supply, by source.

Each entry is noted on the rows that use it. None depends on what was measured.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.published import programs
from parallel3d.plan.setting import Software

Cells = Mapping[str, str]


class PublishedSource(NamedTuple):
    """A source of published runs: its group, the program it ran, and what its blanks mean.

    `cells`: what its documents state where the table has a blank or a rounded figure.
    """

    group: str
    program: Software
    blanks: Mapping[str, Any] = {}
    note: str = ""
    cells: Mapping[str, str] = {}


# arXiv:2104.04473, run_table_1.sh: microbatch of each size (also for the README of 2021-01).
MICROBATCHES_2021 = (
    (1.7, 16),
    (3.6, 16),
    (7.5, 16),
    (18.4, 8),
    (39.1, 4),
    (76.1, 2),
    (145.6, 2),
    (1e9, 1),
)

# megatron/arguments.py: --hidden-dropout and --attention-dropout are 0.1 unless given
DROPOUT = {"dropout": 0.1}

SOURCES: Mapping[str, PublishedSource] = {
    "megatron_sc21_t1": PublishedSource(
        "megatron_2021", programs.MEGATRON_2021, {"zero_stage": 0, "recompute": "full"} | DROPOUT
    ),
    "megatron_sc21_t2": PublishedSource(
        "megatron_2021", programs.MEGATRON_2021, {"zero_stage": 0} | DROPOUT
    ),
    "megatron_readme_2021_01": PublishedSource(
        "megatron_2021",
        programs.MEGATRON_2021,
        {"recompute": "full", "precision": "fp16", "zero_stage": 0} | DROPOUT,
        "only the model-parallel size is stated: tp up to 8, the rest pp; microbatch of SC'21",
    ),
    "megatron_readme_2020_09": PublishedSource(
        "megatron_2021",
        programs.MEGATRON_2021,
        {"seq_len": 1024, "vocab": 51200, "recompute": "full", "precision": "fp16"} | DROPOUT,
        "1,024 tokens, vocabulary 51,200 and recomputation: its TFLOP/s and seconds agree only so",
    ),
    "korthikanti": PublishedSource(
        # Megatron-LM with what its table 5 adds; no curve was fitted on these rows.
        "korthikanti",
        programs.MEGATRON_2022,
        {"zero_stage": 0, "precision": "fp16", "vocab": 51200, "seq_len": 2048} | DROPOUT,
    ),
    "megatron_core_h100_weak": PublishedSource(
        "megatron_core_h100",
        programs.MEGATRON_CORE,
        {
            "recompute": "none",
            "precision": "bf16",
            "zero_stage": 1,
            "tied": False,  # only so do the sizes give the stated parameters
        },
        "not stated: the microbatch (1; without a pipeline all 4 of a rank's sequences, so that "
        "reductions have what to hide behind), bf16, no recomputation, the most virtual stages",
    ),
    "megatron_core_h100_strong": PublishedSource("megatron_core_h100", programs.MEGATRON_CORE),
    "torchtitan_bench_202412": PublishedSource("torchtitan", programs.FSDP2),
    "torchtitan_perf_202404": PublishedSource("torchtitan", programs.FSDP2),
    "torchtitan_perf_202408": PublishedSource("torchtitan", programs.FSDP2),
    "torchtitan_asynctp_202506": PublishedSource(
        "torchtitan", programs.FSDP2, {"seq_len": 8192}, "8,192 tokens: torchtitan's default"
    ),
    "torchtitan_h200_202506": PublishedSource(
        "torchtitan",
        programs.FSDP2_2025,
        {"seq_len": 8192, "recompute": "selective (per-op SAC)"},
        "8,192 tokens and selective recomputation: torchtitan's default",
    ),
    "nanotron_playbook_best": PublishedSource(
        "nanotron", programs.NANOTRON, {"recompute": "none", "precision": "bf16"}
    ),
    "nanotron_tp_scaling": PublishedSource(
        "nanotron",
        programs.NANOTRON,
        {"recompute": "none", "precision": "bf16", "dp": 1},
        "dp is not stated: one replica, one microbatch",
    ),
    "olmo_core": PublishedSource(
        "olmo_core",
        programs.FSDP2,
        {
            "n_gpus": 64,
            "zero_stage": "3 (HSDP)",
            "recompute": "none",
            "precision": "bf16",
            "seq_len": 4096,
        },
        "batches of src/scripts/train; devices are not stated: 64, of which 8 shard (HSDP)",
    ),
    "deepspeed_azure_2022": PublishedSource(
        "deepspeed", programs.ZERO3_2022, {"precision": "fp16"} | DROPOUT
    ),
    "deepspeed_zero3_offload_2021": PublishedSource("deepspeed", programs.ZERO3_2021),
    "bigscience_1b3_v100": PublishedSource("bigscience", programs.MEGATRON_DEEPSPEED, DROPOUT),
    "bigscience_gpt2_v100": PublishedSource(
        "bigscience", programs.MEGATRON_DEEPSPEED, {"heads": 32} | DROPOUT
    ),
    "vtrain_single": PublishedSource(
        "vtrain", programs.MEGATRON_DEEPSPEED, {"precision": "fp16", "zero_stage": 0} | DROPOUT
    ),
    "llm_foundry": PublishedSource("llm_foundry", programs.FSDP_DEFAULT),
    "nvidia_dgxc": PublishedSource("nvidia", programs.NEMO, {"recompute": "none", "zero_stage": 1}),
    "nemo_perf_2407": PublishedSource(
        "nvidia", programs.NEMO, {"recompute": "none", "zero_stage": 1}
    ),
    "glm130b": PublishedSource(
        "single",
        programs.MEGATRON_DEEPSPEED,
        {"micro_batch": 1, "zero_stage": 1},
        "microbatch 1, heads and MLP of arXiv:2210.02414, appendix B",
    ),
    "gptneox20b": PublishedSource(
        "single",
        programs.MEGATRON_DEEPSPEED,
        # EleutherAI/gpt-neox configs/20B.yml; its megatron/logging.py counts recomputation
        cells={
            "micro_batch": "4",
            "global_batch_seqs": "1536",
            "recompute": "full",
            "precision": "fp16",
            "tflops_convention": "hardware",
        },
        note="microbatch, batch (4 x 32 x 12) and recomputation of its configs/20B.yml",
    ),
    "opt175b": PublishedSource("single", programs.MEGATRON_DEEPSPEED),
    "llama1": PublishedSource("single", programs.FSDP2),
    "palm_t3": PublishedSource("single", programs.JAX),
}
# src/scripts/train/OLMo2-*.py: rank_microbatch_size and global_batch_size, in sequences of 4,096
OLMO_BATCHES = {"1b": (8, 512), "7b": (2, 1024), "8b": (2, 1024), "13b": (1, 2048)}


def source_of(name: str) -> PublishedSource:
    """The description of a source; a source that nobody described is a group of its own."""
    return SOURCES.get(name, PublishedSource(name, Software()))


def program_of(source: str, cells: Cells) -> Software:
    """The program that a row of a described source ran, as its notes say it."""
    notes = cells["notes"]
    zero = cells["zero_stage"]
    pp = cells["pp"]
    program = source_of(source).program
    if source == "megatron_sc21_t2" and zero == "3":
        return programs.ZERO3_2021
    if source in {"megatron_sc21_t1", "megatron_readme_2021_01"} and pp in {"1", ""}:
        return programs.MEGATRON_2021_TORCH_DDP if "DDP=torch" in notes else program
    if source == "bigscience_gpt2_v100":
        if zero == "3":
            hf = "HF + Deepspeed" in cells.get("source_ref", "")
            return programs.HF_ZERO3_2021 if hf else programs.ZERO3_2021_BLOCKING
        return program if "ds=Y" in notes else programs.MEGATRON_2021
    if source == "llm_foundry":
        return programs.FSDP_PURE if "MP mode=PURE" in notes else program
    if "JAX" in zero:
        return programs.JAX
    if source == "torchtitan_bench_202412" and "torch.compile" not in notes:
        # its rows name all techniques that they use
        return replace(program, kernels="eager")
    if source.startswith("torchtitan") and "async tp" in notes.lower().replace(
        "asynctp", "async tp"
    ):
        return programs.FSDP2_ASYNC_TP
    return program


def supplied(source: str, cells: Cells) -> dict[str, Any]:
    """Values that rules supply for a row: model-parallel sizes, microbatches, virtual stages."""
    if source == "megatron_readme_2021_01":
        size = int(cells["notes"].split("model-parallel size=")[1].split(";")[0])
        micro = next(n for most, n in MICROBATCHES_2021 if float(cells["params_b"]) <= most)
        return {"tp": min(8, size), "pp": max(1, size // 8), "micro_batch": micro}
    if source == "megatron_core_h100_weak":
        each = int(cells["n_layers"]) // int(cells["pp"])
        piped = cells["pp"] != "1"
        local = int(cells["global_batch_seqs"]) // int(cells["dp"])
        return {"virtual_pp": each if piped else 1, "micro_batch": 1 if piped else local}
    if source == "olmo_core":
        micro, batch = OLMO_BATCHES.get(cells["model_name"].lower().split()[-1], (1, 1024))
        return {"micro_batch": micro, "global_batch_seqs": batch}
    if source.startswith("nanotron"):
        tied = {"tied": int(cells["ffn_hidden"]) < 10_000}  # scripts/scaling_benchmarks.py
        if cells["n_gpus"]:
            return tied
        return tied | {"n_gpus": int(cells["tp"]), "global_batch_seqs": int(cells["micro_batch"])}
    if source == "nvidia_dgxc" and "VP printed NA" in cells["notes"]:
        return {"virtual_pp": 12}
    if source == "torchtitan_bench_202412" and cells["pp"] != "1":
        # torchtitan config_manager.py: as many microbatches as stages; interleaved has 2 a rank
        stages = int(cells["pp"]) * (2 if "Interleaved" in cells["notes"] else 1)
        local = int(cells["global_batch_seqs"]) // int(cells["dp"])
        return {"micro_batch": max(1, local // stages), "virtual_pp": stages // int(cells["pp"])}
    return {}
