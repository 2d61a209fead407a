"""First rows of the planner beside the meshes that others published: the table of docs/planner.md.

    python -m benchmarks.first_rows [NAME ...]

Each request is planned twice: over all meshes, and on the published mesh with its ZeRO stage and
offloads, of which the best micro batch, schedule and recomputation count. Some minutes for all.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from parallel3d.config import RunConfig, hardware
from parallel3d.plan.request import request_of
from parallel3d.plan.search.best_first import search
from parallel3d.plan.search.plans import Plan

CLOSE = 1.03
"""A published mesh that takes longer, relative to row 1, needs a reason."""
_PLANNED = "--mesh plan --gradient_accumulation_steps auto --train_micro_batch_size_per_gpu auto"
_LLAMA_405B = (
    "--model.hidden_size 16384 --model.num_hidden_layers 126 --model.num_attention_heads 128 "
    "--model.intermediate_size 53248"
)
_LLAMA_2_7B = (
    "--model.num_key_value_heads 32 --model.intermediate_size 11008 --model.vocab_size 32000 "
    "--data.sequence_length 2048"
)
_FP16 = "--bf16.enabled false --fp16.enabled true"
_DGXC = "NVIDIA, dgxc-benchmarking"
_BOTH_ON_HOST = {"offload_optimizer": "cpu", "offload_param": "cpu"}


@dataclass(frozen=True)
class Case:
    """What a practitioner asks, and a mesh that somebody published for it.

    - `words`: changes of the config. `batch`: samples of a step.
    - `published`: choices of the planner, by their names. `source`: who published them.
    - `reason`: why row 1 differs by more than CLOSE.
    """

    name: str
    config: str
    chip: str
    devices: int
    batch: int
    published: Mapping[str, object]
    source: str
    words: str = ""
    reason: str = ""

    def row(self, fixed: Mapping[str, object] | None = None) -> Plan:
        """Return row 1, with some choices fixed."""
        words = f"{_PLANNED} {self.words} --train_batch_size {self.batch}".split()
        config = RunConfig.from_json(f"{self.config}.json", words)
        request = request_of(config, hardware.load(self.chip), self.devices, fixed)
        return search(request, rows=1).plans[0]


CASES = (
    Case(
        "8B, 8 H100",
        "llama-8b",
        "h100",
        8,
        128,
        {"pp": 1, "dp": 8, "cp": 1, "tp": 1},
        "torchtitan, llama3_h100_202412",
    ),
    Case(
        "8B, 64 H100",
        "llama-8b",
        "h100",
        64,
        1024,
        {"pp": 1, "dp": 64, "cp": 1, "tp": 1},
        "torchtitan, performance.md (A100) and H200",
    ),
    Case(
        "70B, 64 H100",
        "llama-70b",
        "h100",
        64,
        128,
        {"pp": 1, "dp": 64, "cp": 1, "tp": 1, "zero_stage": 3},
        "MosaicML, llm-foundry; torchtitan (A100)",
    ),
    Case(
        "70B, 64 H100",
        "llama-70b",
        "h100",
        64,
        128,
        {"pp": 4, "dp": 2, "cp": 2, "tp": 4},
        _DGXC,
    ),
    Case(
        "70B, 512 H100",
        "llama-70b",
        "h100",
        512,
        1024,
        {"pp": 1, "dp": 512, "cp": 1, "tp": 1, "zero_stage": 3},
        f"{_DGXC} (MaxText)",
        reason=("row 1 is the mesh of the line below"),
    ),
    Case(
        "70B, 512 H100",
        "llama-70b",
        "h100",
        512,
        1024,
        {"pp": 4, "dp": 16, "cp": 2, "tp": 4},
        _DGXC,
    ),
    Case(
        "405B, 1,024 H100",
        "llama-70b",
        "h100",
        1024,
        512,
        {"pp": 8, "dp": 8, "cp": 2, "tp": 8},
        _DGXC,
        _LLAMA_405B,
        reason=(
            "with 8 stages a device of 80 GB recomputes the MLP here; 64 stages of the "
            "zero-bubble V hold fewer weights"
        ),
    ),
    Case(
        "405B, 16,384 H100",
        "llama-70b",
        "h100",
        16384,
        2048,
        {"pp": 16, "dp": 128, "cp": 1, "tp": 8},
        "arXiv:2407.21783, table 4",
        _LLAMA_405B,
        reason=(
            "cp 2 halves the activations, so that nothing is recomputed; Llama 3 trained "
            "without it with tuned buffers"
        ),
    ),
    Case(
        "Mixtral 8x7B, 64 H100",
        "mixtral-8x7b",
        "h100",
        64,
        512,
        {"pp": 4, "dp": 16, "cp": 1, "tp": 1, "ep": 8},
        "NVIDIA NeMo, recipes/mixtral_8x7b.py",
        reason=(
            "with ep this engine's host waits for counts in each layer, and nothing hides "
            "it; tp 4 inside a node divides the experts' width instead"
        ),
    ),
    Case(
        "Qwen3-30B-A3B, 64 H100",
        "qwen3-30b-a3b",
        "h100",
        64,
        1024,
        {"pp": 2, "dp": 32, "cp": 1, "tp": 1, "ep": 8},
        "NVIDIA Megatron Bridge, performance-summary.md (16 devices)",
        reason=("the same; ZeRO-3's gathers of all experts take less"),
    ),
    Case(
        "13B, 8 A100 of 40 GB",
        "gpt3-13b",
        "a100-40gb",
        8,
        512,
        {"pp": 1, "dp": 8, "cp": 1, "tp": 1, "zero_stage": 3},
        "MosaicML, llm-foundry",
        reason=(
            "no plan keeps everything on the device, as MosaicML's bf16 optimizer does; "
            "with pp 2 and tp 2 a device fetches a quarter of the weights"
        ),
    ),
    Case(
        "7B, 8 V100 of 32 GB",
        "llama-8b",
        "v100-32gb",
        8,
        128,
        {"pp": 1, "dp": 1, "cp": 1, "tp": 8},
        "Megatron-LM, README of 2020-09 (8.3B)",
        f"{_LLAMA_2_7B} {_FP16}",
        reason=("Megatron-LM of 2020 had no pipeline; tp 4 has shorter collectives"),
    ),
    Case(
        "7B, 4 RTX 4090 of 24 GB",
        "llama-8b",
        "rtx4090",
        4,
        64,
        {"pp": 1, "dp": 4, "cp": 1, "tp": 1, "zero_stage": 3} | _BOTH_ON_HOST,
        "Stanford Alpaca, configs/default_offload_opt_param.json",
        _LLAMA_2_7B,
        reason=(
            "PCIe joins the cards: four stages pass on activations, where ZeRO-3 gathers "
            "all weights, and fetches them from the host"
        ),
    ),
    Case(
        "1.5B, one RTX 4090",
        "gpt2-1.5b",
        "rtx4090",
        1,
        64,
        {"offload_optimizer": "cpu"},
        "Xirider, finetune-gpt2xl",
    ),
)
NAMES = tuple(dict.fromkeys(case.name for case in CASES))


def mesh_words(plan: Plan) -> str:
    """Return a plan's choices, as the page has them."""
    setting = plan.setting
    pp, dp, cp, tp = setting.mesh
    words = [f"{pp}×{dp}×{cp}×{tp}" if cp > 1 else f"{pp}×{dp}×{tp}"]
    if setting.flow.ep > 1:
        words.append(f"ep {setting.flow.ep}")
    words.append(f"ZeRO-{setting.state.zero_stage}")
    if plan.setting.state.num_offloads:
        words.append(f"{plan.setting.state.offload} offloaded")
    if str(setting.flow.recompute) != "none":
        words.append(f"recomputes {setting.flow.recompute}")
    return ", ".join(words)


@dataclass(frozen=True)
class Row:
    """A case with its row 1, and the best plan on the published mesh."""

    case: Case
    first: Plan
    published: Plan

    @property
    def ratio(self) -> float:
        """The published mesh's planned time relative to row 1."""
        return self.published.time.seconds / self.first.time.seconds

    @property
    def line(self) -> str:
        """The line of the table."""
        case = self.case
        cells = (
            f"{case.name}, {case.batch:,} × {self.first.setting.workload.seq:,}",
            f"{mesh_words(self.published)} ({case.source})",
            f"{self.published.time.seconds:.3g} s",
            mesh_words(self.first),
            f"{self.first.time.seconds:.3g} s",
            f"{self.ratio:.3f}",
            case.reason or "–",
        )
        return f"| {' | '.join(cells)} |"


def rows(name: str) -> list[Row]:
    """Return the rows of a request, one for each mesh that was published for it."""
    cases = [case for case in CASES if case.name == name]
    first = cases[0].row()
    return [Row(case, first, case.row(case.published)) for case in cases]


def main() -> None:
    """Print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    for name in names:
        for row in rows(name):
            print(row.line, flush=True)


if __name__ == "__main__":
    main()
