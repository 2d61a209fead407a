"""Facts about the programs whose published runs the planner is checked against.

Facts about programs, each with its document; no number in this file was fitted. One fact has no
document but the tables themselves: that DeepSpeed's ZeRO-3 of 2021 and 2022 passed from node to
node by one network interface (`one_ring`). Table 2 of arXiv:2104.04473 and DeepSpeed's post on
Azure both come to 15 to 17 GB/s of gathers and reductions for a node with eight of 25 GB/s,
whatever the number of nodes.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import SequenceMatcher

from parallel3d.plan.setting import Software

TORCH_DDP = (
    25 * 2**20 / 2
)  # torch's DistributedDataParallel: bucket_cap_mb is 25, of 2-byte gradients

_CLASSIC = Software(
    # What all programs of 2020 to 2022 here share: Megatron-LM's fused kernels, attention with its
    # scores in memory, no sequence parallelism yet, gradients in fp16 (megatron/arguments.py:
    # accumulate-allreduce-grads-in-fp32 is off by default).
    passes_keys=True,
    handles_small=False,
    kernels="tuned",
    attention="classic",
    causal_skips=False,
    gradient_bytes=2,
    reduction_bytes=2,
)


def cuts_sequence(program: Software) -> bool:
    """Whether a program with tp > 1 cuts activations along the sequence, too (arXiv:2205.05198).

    Those whose attention keeps its scores in memory are older.
    """
    return program.attention != "classic"


MEGATRON_2021 = replace(
    _CLASSIC,
    # arXiv:2104.04473, section 4.2: fused scale-mask-softmax on scores in memory; section 5: full
    # recomputation, blocking all-reduces (f and g), scatter/gather between pipeline stages.
    name="Megatron-LM 2021",
    scatters_sends=True,
)
MEGATRON_2021_TORCH_DDP = replace(
    _CLASSIC,
    # run_table_1.sh chooses DDP=torch for models without a pipeline: it reduces in backward hooks.
    name="Megatron-LM 2021, torch's DDP",
    overlaps_reduction=True,
    bucket=TORCH_DDP,
)
MEGATRON_2022 = replace(
    MEGATRON_2021,
    # arXiv:2205.05198, section 4.2.2: the backward's gathers overlap with products of gradients;
    # Megatron-LM 3.0, megatron/arguments.py: asynchronous all-reduces of input gradients and fused
    # accumulation of weight gradients are on by default.
    name="Megatron-LM 2022",
    overlaps_tensor=True,
    exposes_forward=True,
    fuses_accumulation=True,
)
_ZERO3 = replace(_CLASSIC, handles_small=True, one_ring=True)
ZERO3_2021 = replace(
    _ZERO3,
    # DeepSpeed 0.3-0.5: runtime/zero/stage3.py and partition_parameters.py gather each parameter
    # of a module by a collective of its own, prefetch and overlap_comm on; fp16 gradients.
    name="DeepSpeed ZeRO-3 2021",
    overlaps_gather=True,
    overlaps_reduction=True,
)
ZERO3_2021_BLOCKING = replace(
    _ZERO3,
    # bigscience experiments/gpt2-meg-ds-zero/*.slurm: overlap_comm is not set (false at the time),
    # --synchronize-each-layer; prefetches 0.9 h^2 elements of a layer's 12 h^2.
    name="Megatron-LM and DeepSpeed ZeRO-3 2021",
)
HF_ZERO3_2021 = replace(
    _ZERO3,
    # bigscience experiments/gpt2-hf-ds/*.slurm: transformers' GPT-2, eager; overlap_comm is true,
    # but "auto" prefetches 0.9 h^2 elements of a layer's 12 h^2.
    name="transformers and DeepSpeed ZeRO-3 2021",
    kernels="eager",
    overlaps_reduction=True,
)
ZERO3_2022 = replace(
    ZERO3_2021,
    # docs/_posts/2022-07-26-deepspeed-azure.md; as in 2021, with activations offloaded, too.
    name="DeepSpeed ZeRO-3 2022",
    overlaps_offload=True,
)
MEGATRON_DEEPSPEED = replace(
    _CLASSIC,
    # bigscience tr3m-1B3 and vTrain: Megatron-LM's kernels under DeepSpeed's pipeline engine, which
    # reduces after the last microbatch; fp16 gradients.
    name="Megatron-DeepSpeed",
)
MEGATRON_CORE = Software(
    # Megatron-LM README: "overlap-grad-reduce, overlap-param-gather, tp-comm-overlap and
    # pipeline-parallel communication (enabled by default)"; Transformer Engine's attention (cuDNN).
    # What gradients are reduced in is not stated; as in NVIDIA's recipes for the same library.
    # megatron/training/arguments.py: --no-gradient-accumulation-fusion is off.
    name="Megatron-Core",
    passes_keys=True,
    handles_small=False,
    kernels="tuned",
    overlaps_sends=True,
    overlaps_gather=True,
    overlaps_reduction=True,
    overlaps_tensor=True,
    gradient_bytes=2,
    reduction_bytes=2,
    fuses_accumulation=True,
)
NEMO = replace(
    MEGATRON_CORE,
    # NVIDIA/NeMo and dgxc-benchmarking recipes: Megatron-Core with userbuffer tp overlap, the
    # distributed optimizer with overlapped gradient reduction and parameter gather in bf16
    # (megatron_gpt_config: grad_reduce_in_fp32=False).
    name="NeMo",
)
NEMO_HYBRID_EP = replace(
    NEMO,
    # Megatron Bridge at df0289c1, scripts/performance/configs/qwen: moe_flex_dispatcher_backend is
    # "hybridep", which counts rows on the device, and graphs have the router's kernels.
    name="NeMo, HybridEP",
    waits_for_counts=False,
)
JAX = Software(
    # dgxc-benchmarking maxtext and paxml recipes: XLA's latency-hiding scheduler, cuDNN flash
    # attention; FSDP within the scan over layers, gathers once a microbatch.
    name="JAX",
    passes_keys=True,
    handles_small=False,
    kernels="compiled",
    overlaps_gather=True,
    overlaps_reduction=True,
)
FSDP2 = replace(
    JAX,
    # torchtitan docs/performance.md: FSDP2 prefetches, reduces in fp32, SDPA is flash attention.
    name="FSDP2",
    hopper=False,
)
FSDP2_2025 = replace(
    FSDP2,
    # torchtitan since 2025: torchtitan/components/loss.py compiles the loss with the model.
    name="FSDP2, compiled loss",
)
FSDP2_ASYNC_TP = replace(
    FSDP2,
    # torchtitan's asynchronous tensor parallelism (torch.compile's micro-pipelined products).
    name="FSDP2, async tp",
    overlaps_tensor=True,
)
FSDP_DEFAULT = replace(
    FSDP2,
    # mosaicml/llm-foundry, scripts/train/benchmarking/README.md, MP mode DEFAULT: reductions in
    # fp32; Triton or flash attention; backward prefetch.
    name="FSDP, DEFAULT",
    kernels="eager",
)
FSDP_PURE = replace(
    FSDP_DEFAULT,
    # the same document, MP mode PURE: parameters, buffers and reductions in bf16.
    name="FSDP, PURE",
    gradient_bytes=2,
    reduction_bytes=2,
)
NANOTRON = Software(
    # nanotron scripts/scaling_benchmarks.py: gradients accumulate in fp32, tp_mode REDUCE_SCATTER
    # with tp_linear_async_communication, whose forward hides a gather behind a tp-th of one product
    # and no reduction (parallel/tensor_parallel/functional.py); data-parallel reduction in DDP's
    # hooks of the last microbatch (parallel/data_parallel/utils.py: sync only then).
    name="nanotron",
    bucket=TORCH_DDP,
    passes_keys=True,
    handles_small=False,
    hopper=False,
    overlaps_reduction=True,
    overlaps_tensor=True,
    exposes_forward=True,
)

# By other names, letters and digits alone: the programs whose runs stand behind a name here.
_ALIASES: Mapping[str, Software] = {
    "mcore": MEGATRON_CORE,
    "megatronlmcore": MEGATRON_CORE,
    "nvidianemo": NEMO,
    "maxtext": JAX,
    "paxml": JAX,
    "pytorchfsdp2": FSDP2,
    "torchtitan": FSDP2,
    "olmocore": FSDP2,
    "fsdp": FSDP_DEFAULT,
    "pytorchfsdp": FSDP_DEFAULT,
    "fsdp1": FSDP_DEFAULT,
    "llmfoundry": FSDP_DEFAULT,
    "mosaicmlllmfoundry": FSDP_DEFAULT,
    "gptneox": MEGATRON_DEEPSPEED,
}
_BY_NAME: Mapping[str, Software] = {
    program.name: program
    for program in (
        Software(),
        MEGATRON_2021,
        MEGATRON_2021_TORCH_DDP,
        MEGATRON_2022,
        MEGATRON_CORE,
        NEMO,
        NEMO_HYBRID_EP,
        MEGATRON_DEEPSPEED,
        ZERO3_2021,
        ZERO3_2021_BLOCKING,
        HF_ZERO3_2021,
        ZERO3_2022,
        FSDP2,
        FSDP2_2025,
        FSDP2_ASYNC_TP,
        FSDP_DEFAULT,
        FSDP_PURE,
        NANOTRON,
        JAX,
    )
}


def named(text: str) -> Software | None:
    """The program called `name`; None where none is described.

    Case and punctuation do not matter, nor do a remark in brackets and a version, where the name
    with them is not known: "NeMo 24.07", "torchtitan (FSDP2)".
    """
    plain = re.sub(r"\(.*?\)", " ", text)
    for words in (text, plain, re.sub(r"\b[vr]?\d+(\.\w+)*\s*$", " ", plain.strip())):
        wanted = _letters(words)
        same = (program for name, program in _BY_NAME.items() if _letters(name) == wanted)
        if program := next(same, None) or _ALIASES.get(wanted):
            return program
    return None


def names(like: str = "") -> str:
    """The names of all programs, quoted, for a message; those most like `like` first."""
    wanted = _letters(like)

    def unlike(name: str) -> float:
        return -SequenceMatcher(None, wanted, _letters(name)).ratio()

    return ", ".join(f'"{name}"' for name in sorted(_BY_NAME, key=unlike))


def _letters(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalnum())
