"""Print docs/architectures.md: `python docs/architectures_page.py > docs/architectures.md`."""

import json
from pathlib import Path
from typing import Any

BOUND = 1e-5
_INTRODUCTION = """\
# Architectures of transformers

Look up whether your model trains in the family `transformers`, and how far tensor parallelism cuts
it. Name it by the `model_type` of its config.json:

    "model": {{"family": "transformers", "config": {{"model_type": "granite", ...}}}}

Each architecture of transformers {version} for causal language modeling was tried as a small model
of four layers, with each of its layer types. It trained two AdamW steps under ZeRO-3 on pp 2 × dp 2
× tp 2, from weights with a standard deviation of 0.02 and of 0.2 (attention is then far from
uniform, so a wrong mask or rotation shows). The error is the largest of the relative errors of the
loss and the gradient norm and of the differences of every weight, against the whole
`AutoModelForCausalLM` with eager attention in one process in fp64; training is in fp32. **{passed}
architectures are within 1e-5 on this mesh at both.** All rows are of one revision of parallel3d,
{revision}.

Written by `python docs/architectures_page.py > docs/architectures.md` from architectures.json, the
results of `tests/models/every_decoder.py`; a slow test compares them.

## They train

"Cut by tp" is the share of the layers' parameters that tensor parallelism cuts. The rest is
repeated on its ranks: that is right, and no faster. An empty cell was not measured.

"""
_WITHOUT_TP = """
## They train with tp = 1

Less than half of their layers' parameters can be cut, so `mesh.tp` must be 1.
Those without errors here were only read and cut into stages.

"""
_FAILS = """
## They differ

Their errors exceed 1e-5 at one standard deviation at least. The last column says how far
transformers' own model in fp32 is then from itself in fp64, in one process: where it is as far, the
architecture amplifies the rounding of fp32, and a mesh is no nearer. Check yours with
`launch/verify.py` before you train it.

Two are further from it than transformers in fp32, by rounding as well. At 0.2 `gpt_oss` differs in
one weight of the first output projection, on one rank, too: its gradient is nearly zero, and Adam
makes a step of its rounding (the median difference in that matrix is 4e-9). In `qwen3_5_moe_text`
the norm of the second step differs. In the first step the gradient of each parameter has the same
norm on tp 2 as on one rank, within 6e-5, and the whole norm is as far from fp64 as that of
transformers.

"""
_REFUSED = """
## They do not train

A config that names one ends with this reason. "Cannot be built small" and "was not compared" are
said of those for which the test has no small model, or nothing to compare it with; they may train.

"""


def architectures_document() -> str:
    """Return the text of docs/architectures.md."""
    found = json.loads((Path(__file__).parent / "architectures.json").read_text())
    tried = found["tried"]
    passed = {}
    alone = {}
    failed = {}
    refused = dict(found["refused"])
    for kind, result in tried.items():
        if max(result["errors"].values(), default=0.0) > BOUND:
            failed[kind] = result
        elif result["mesh"][2] == 1:
            alone[kind] = result
        elif len(result["errors"]) == 2:
            passed[kind] = result
        else:
            refused[kind] = "was not trained on ranks yet"
    text = _INTRODUCTION.format(
        version=found["transformers"], revision=found["revision"], passed=len(passed)
    )
    text += _table_of(passed) + _WITHOUT_TP + _table_of(alone)
    if failed:
        text += _FAILS + _table_of_differing(failed)
    lines = ["| model_type | reason |", "|---|---|"]
    for kind, reason in sorted(refused.items()):
        lines.append(f"| `{kind}` | {reason.replace('|', '/')} |")
    return text + _REFUSED + "\n".join(lines) + "\n"


def _table_of(results: dict[str, dict[str, Any]]) -> str:
    lines = ["| model_type | cut by tp | error at 0.02 | error at 0.2 |", "|---|---|---|---|"]
    for kind, result in results.items():
        small = _number(result["errors"].get("0.02"))
        large = _number(result["errors"].get("0.2"))
        lines.append(f"| `{kind}` | {result['share_cut']:.0%} | {small} | {large} |")
    return "\n".join(lines) + "\n"


def _table_of_differing(results: dict[str, dict[str, Any]]) -> str:
    head = "| model_type | cut by tp | error at 0.02 | error at 0.2 | of transformers in fp32 |"
    lines = [head, "|---|---|---|---|---|"]
    for kind, result in results.items():
        small = _number(result["errors"].get("0.02"))
        large = _number(result["errors"].get("0.2"))
        plain = ", ".join(f"{_number(x)} at {std}" for std, x in result["plain"].items())
        lines.append(f"| `{kind}` | {result['share_cut']:.0%} | {small} | {large} | {plain} |")
    return "\n".join(lines) + "\n"


def _number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}"


if __name__ == "__main__":
    print(architectures_document(), end="")
