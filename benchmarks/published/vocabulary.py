"""Meanings of the words in a table of published runs; an unknown word is refused.

Nothing is taken for the nearest thing that the planner has: four-bit weights are not bf16, and
adapters are not training.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from benchmarks.published.cells import ABOUT, UnusableRow
from parallel3d.config.hardware import Kernels
from parallel3d.model.recompute import FULL, NONE, SELECTIVE, Recompute
from parallel3d.plan.setting import Device, Precision, Software
from parallel3d.schedule.sharding import Weights

_NO = {"", "-", "0", "no", "none", "off", "false", "n/a", "na"}
_YES = {"1", "yes", "on", "true"}
_ADAPTERS = re.compile(
    r"(?<!\bno )(?<!\bnot )(?<!\bwithout )(?<!\bnon-)"
    r"\b(q?-?lora|dora|adapters?|peft|ia3|(?:prefix|prompt|p)[- ]tuning|frozen|freez\w+)\b"
)
_FEW_BITS = re.compile(
    r"\b(nf4|fp4|int4|int8|uint4|[48][- ]?bits?|nvfp4|mxfp4|w[48]a\d+|gptq|awq|bnb|bitsandbytes)\b"
)
_SAYS = ("notes", "program", "model_name")  # where such words would be of the weights
_PRECISIONS: Mapping[Precision, str] = {
    "fp8": "fp8|float8",
    "fp16": "fp16|(?<!b)float16",
    "bf16": "bf16|bfloat16",
    "fp32": "fp32|float32",
}


def _unknown(column: str, text: str, known: str) -> NoReturn:
    raise UnusableRow(
        f'{column} = "{text}" is not known; write {known}', f"{column} is not known: {text}"
    )


def is_yes(column: str, text: str) -> bool:
    """Whether a row says yes or no."""
    lower = text.lower()
    if lower not in _NO | _YES:
        _unknown(column, text, "yes or no")
    return lower in _YES


def refuse_adapters(cells: Mapping[str, str]) -> None:
    """Raise UnusableRow if a row trains a part of the weights, or weights of four or eight bits.

    It looks in every cell but those that cite the source, and at columns called after adapters.
    """
    for name, text in cells.items():
        lower = text.lower().replace("_", " ")
        if name in ABOUT or lower in _NO:
            continue
        match = _ADAPTERS.search(lower) or (name in _SAYS and _FEW_BITS.search(lower))
        if re.search(r"\b(q?lora|adapter|peft)", name.lower().replace("_", " ")):
            found = f"{name} = {text}"
        elif match:
            found = f'"{match.group()}" in {name}'
        else:
            continue
        raise UnusableRow(
            f"{found}: adapters, frozen or quantized weights are not modelled; take the word out "
            "where all weights were trained, in 16 or 32 bits or fp8",
            "adapters, frozen or quantized weights",
        )


def precision_of(text: str, sixteen: Precision = "bf16") -> Precision:
    """The number format of the matrix products; of several that are named, the narrowest.

    `sixteen`: the chip's format of 16 bits, which "mixed (16-bit)" means.
    """
    lower = text.lower()
    if not _FEW_BITS.search(lower):
        for precision, words in _PRECISIONS.items():
            if re.search(words, lower):
                return precision
        if re.search(r"\bhalf\b|\b16[- ]?bits?\b", lower):
            return sixteen
    _unknown("precision", text, "bf16, fp16, fp32 or fp8; narrower weights are not modelled")


def zero_stage_of(text: str) -> int:
    """ZeRO's stage: a number from 0 to 3, with words behind it or "ZeRO" before; FSDP is 3."""
    match = re.match(r"(?:zero[- ]?)?([0-3])(?:\.0+)?(?![\d.])", text.lower())
    if match:
        return int(match.group(1))
    if "fsdp" in text.lower():
        return 3
    if text.lower() in {"ddp", "none", "no"}:
        return 0
    _unknown("zero_stage", text, "0, 1, 2 or 3")


_KEPT = re.compile(
    r"\b(not|no|without|never|isn.t|aren.t)\b[^;.]{0,12}reshard|reshard\w*[ :=]*(false|never|no)\b"
)


def weights_of(text: str) -> Weights:
    """How long gathered weights stay: through a step where a row says that none is resharded."""
    return "per_step" if _KEPT.search(text.lower()) else "per_microbatch"


def shards_of(text: str, in_node: int) -> int:
    """The ranks that share ZeRO's state in words ("HSDP", "hybrid, 16 shards"); 0: all replicas.

    `in_node`: the data-parallel ranks of a node, which hybrid sharding without a number means.
    """
    lower = text.lower()
    if not re.search(r"hsdp|hybrid|hierarchical|shards|inside (a|the) node", lower):
        return 0
    number = re.search(r"(\d+)[- ](?:way|shards|ranks)|shards? (?:of|over|=) ?(\d+)", lower)
    return int(number.group(1) or number.group(2)) if number else in_node


def recompute_of(text: str) -> tuple[Recompute, float]:
    """The recomputation mode of a row, and the fraction of the layers that it recomputes."""
    if "per-op SAC" in text or "every other layer" in text:
        # torchtitan: every second product is computed again; every second layer is.
        return FULL, 0.5
    lower = text.lower()
    if lower in _NO:
        return NONE, 1.0
    for mode in (NONE, SELECTIVE, FULL):
        if re.match(rf"{mode}\b", lower):
            return mode, 1.0
    _unknown("recompute", text, "none, selective or full")


def offload_of(text: str) -> tuple[Device, Device]:
    """The places of a row's optimizer states and parameters."""
    lower = text.lower()
    if lower in _NO:
        return "none", "none"
    full = "full cpu offload" in lower or "params" in lower
    if "nvme" in lower or not (full or "optimizer" in lower):
        _unknown("offload", text, "none, optimizer CPU or params+optimizer CPU")
    return "cpu", "cpu" if full else "none"


# Words of the column attention_kernel, letters and digits alone -> what of the program they change.
_KERNELS: Mapping[str, dict[str, object]] = {
    "classic": {"attention": "classic", "causal_skips": False},
    "flash": {"attention": "flash", "causal_skips": True},
    "ampere": {"attention": "flash", "causal_skips": True, "hopper": False},
    "hopper": {"attention": "flash", "causal_skips": True, "hopper": True},
}
_KERNEL_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("classic", "eager", "naive", "unfused", "fusedsoftmax", "math"), "classic"),
    **dict.fromkeys(("flash", "flashattention", "flashattn", "fused", "fusedattention"), "flash"),
    **dict.fromkeys(("flash1", "flashattention1", "flashattn1", "fa1"), "ampere"),
    **dict.fromkeys(("flash2", "flashattention2", "flashattn2", "fa2"), "ampere"),
    **dict.fromkeys(("triton", "sdpa", "torchsdpa", "xformers", "memoryefficient"), "ampere"),
    **dict.fromkeys(("compiled", "flexattention", "scaleddotproductattention"), "ampere"),
    **dict.fromkeys(("flash3", "flashattention3", "flashattn3", "fa3"), "hopper"),
    **dict.fromkeys(("cudnn", "te", "transformerengine"), "hopper"),
}


# Words of a program's kernels; the first that matches counts: "no torch.compile" is not compiled.
_CLASSES: Mapping[Kernels, str] = {
    "eager": r"\beager\b|\b(no|not|without|un)[- ]?(torch\.?)?(compil|fused)|"
    r"compile[ :=]*(false|off|none)",
    "compiled": r"compil|inductor|\bxla\b|\bjax\b",
    "tuned": r"\bfused\b|\btuned\b|transformer ?engine|\bte\b|\bapex\b|\bliger\b",
}


def class_of(text: str) -> Kernels | None:
    """The class of a program's kernels in words; None where the words name none."""
    return next((kind for kind, words in _CLASSES.items() if re.search(words, text.lower())), None)


def with_kernels(program: Software, cells: Mapping[str, str]) -> Software:
    """The program with the kernels that a row states; what it leaves blank is the program's own.

    `kernels` and remarks in `program` name the class of all kernels, `attention_kernel` that one.
    """
    stated = cells["kernels"]
    if kind := class_of(stated or cells["program"]):
        program = replace(program, kernels=kind)
    elif stated:
        _unknown("kernels", stated, "eager, compiled or tuned")
    text = cells["attention_kernel"]
    if not text:
        return program
    squeezed = (re.sub(r"v(?=\d)|[^a-z0-9]", "", re.sub(cut, "", text.lower())) for cut in _CUTS)
    name = next((_KERNEL_NAMES[word] for word in squeezed if word in _KERNEL_NAMES), None)
    if name is None:
        _unknown("attention_kernel", text, "classic, flash, flash2, flash3, sdpa, triton or cudnn")
    changes: dict[str, object] = _KERNELS[name]
    return replace(program, **changes)  # type: ignore[arg-type]


# Remarks of a kernel's name: in brackets, what it runs through, and the word kernel itself.
_CUTS = (r"\(.*?\)", r"\(.*?\)|\b(via|through|from|in|of|with)\b.*|\bkernels?\b")
