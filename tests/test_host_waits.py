"""The host waits for the device in few places of what runs in training: here is why, for each.

What waits is known by its name alone: reads of a tensor's value, copies out of memory that a device
cannot read by itself, and whatever holds the host until others are there. So the list also has
places where the value is none of a device's; each says so. `tests/asynchronous.py` counts the waits
of a step that runs.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from parallel3d import models
from tests.test_floors import FILES, ROOT, room_of, tree_of

pytestmark = pytest.mark.pure

ROOMS = {
    *(f"parallel3d/{r}" for r in ("mesh", "tensor", "engine", "engine/quirks", "pipeline")),
    *(f"parallel3d/{r}" for r in ("train", "checkpoint", "convert")),
    "models/*",
}
READS = {"item", "tolist", "numpy", "cpu", "cuda", "equal", "allclose", "nonzero"}
WAITS = {"synchronize", "barrier"}
NUMBERS = {"float", "int", "bool"}
MADE_HERE = {"tensor", "as_tensor"}  # of numbers that the host has
DECIDES = {"any", "all"}

# At every step, or whenever somebody asks for the time.
STEP = {
    "parallel3d/mesh/mesh.py:Mesh.gather_floats": "all that a step's ranks say, in one read",
    "parallel3d/mesh/mesh.py:Mesh.sum_floats": "losses of documents, once an evaluation is over",
    "parallel3d/engine/engine.py:StepResult.grad_norm": "for who wants a number and no more steps",
    "parallel3d/engine/engine.py:Engine._now": "of a step that is timed",
    "parallel3d/pipeline/clock.py:DeviceClock.spans": "of actions that are timed",
    "parallel3d/train/profiler.py:Profiler.step": "a recorded step starts on an idle device",
    "parallel3d/train/profiler.py:Profiler._gather": "clocks are set by it, after the last step",
}
# At the start, and where all ranks come together.
START = {
    "parallel3d/mesh/mesh.py:Mesh.barrier": "it is what it is for",
    "parallel3d/mesh/mesh.py:Mesh.one_at_a_time": "what one rank makes is there for the next",
    "parallel3d/mesh/mesh.py:Mesh.gather_texts": "a text of each rank, at the start and at saves",
    "parallel3d/mesh/mesh.py:Mesh.broadcast_text": "a text of one rank, at the start",
    "parallel3d/mesh/mesh.py:Mesh.all_gather": "whole weights, for tests and for their export",
    "parallel3d/engine/quirks/core.py:bind_trace_check.assert_ints_same_as_other_ranks": (
        "in the first step, which records the order of the layers"
    ),
    "parallel3d/engine/selftest.py:_step": "a toy, before the first step",
    "parallel3d/engine/selftest.py:_reference": "a toy, on the host",
    "parallel3d/engine/selftest.py:_compare": "a toy, before the first step",
    "parallel3d/train/mfu.py:_timed_matmul": "what a device can do, before the first step",
    "parallel3d/train/mfu.py:peak": "all measure it at one time",
}
SAVE = {
    "parallel3d/checkpoint/chunk_runs.py:host_arrays": "a copy of the state, in host memory",
    "parallel3d/checkpoint/chunk_runs.py:HostCopy.fill": "training goes on when the copy is whole",
    "parallel3d/convert/from_ranks.py:_write.write": "one at a time, at the end of a run",
    "parallel3d/engine/engine.py:Engine.full_parameter": "one at a time, to export or compare",
}
# Names alone: what they are asked of is the host's.
HOSTS = {
    "parallel3d/mesh/device.py:claim_device": "an answer of the store",
    "parallel3d/mesh/join.py:join": "a port",
    "parallel3d/mesh/mesh.py:Mesh.__init__": "ranks of the mesh",
    "parallel3d/mesh/mesh.py:Mesh._split": "ranks of the mesh",
    "parallel3d/mesh/mesh.py:Mesh.join_pair": "ranks of the mesh",
    "parallel3d/mesh/mesh.py:Mesh.picture": "ranks of the mesh",
    "parallel3d/mesh/shared_memory.py:_meet": "a sum that only host memory has, and once a group",
    "parallel3d/pipeline/stages.py:place_layers": "FLOPs by formula",
    "parallel3d/engine/engine.py:Engine.loss_scale": "DeepSpeed keeps the scale as a number",
    "parallel3d/engine/engine.py:Engine.step": "DeepSpeed's flag",
    "parallel3d/engine/engine.py:Engine._check_groups": "a gathered row",
    "parallel3d/engine/quirks/fp16.py:at_last_loss_scale": "DeepSpeed's loss scaler",
    "parallel3d/engine/states.py:OptimizerStates.counters": "Adam's steps, when a save is due",
    "parallel3d/engine/states.py:OptimizerStates.set_counters": "of a checkpoint's file",
    "parallel3d/engine/states.py:OptimizerStates._is_swapped": "DeepSpeed's flag",
    "parallel3d/checkpoint/chunks.py:Chunk.from_key": "words of a file's header",
    "parallel3d/checkpoint/chunk_runs.py:HostCopy.arrays": "host memory that was copied into",
    "parallel3d/tensor/segments.py:Segments.of": "documents that the host has found",
    "parallel3d/convert/generate.py:generate": "a prompt, and a model that is not trained",
    "parallel3d/convert/logits.py:most_apart": "a model on the host, after an export",
    "parallel3d/convert/read_back.py:_difference": "tensors of files, after an export",
    "parallel3d/convert/weight_files.py:bytes_of": "words of a command line",
    "parallel3d/checkpoint/index.py:Index.find": "a table of numpy's",
    "parallel3d/checkpoint/index.py:_boxes": "a table of numpy's",
    "parallel3d/checkpoint/arrays.py:memory_of": "what is in host memory already",
    **dict.fromkeys(
        (
            f"models/{family}/blocks.py:{layer}.__init__"
            for family in models.families()
            for layer in ("Embedding", "Head")
        ),
        "the vocabulary's size",
    ),
}
LISTED = STEP | START | SAVE | HOSTS


def waits_in(tree, path):
    """(place, line, what) of all that may wait: the place is path:Class.function."""
    has_torch = any(
        (isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "torch")
        or (isinstance(node, ast.Import) and any(a.name.startswith("torch") for a in node.names))
        for node in ast.walk(tree)
    )

    def visit(node, names):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        what = None
        if isinstance(node, ast.Call):
            what = of_call(node, has_torch)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            what = of_test(node.test)
        if what:
            yield f"{path}:{'.'.join(names)}", node.lineno, what
        for child in ast.iter_child_nodes(node):
            yield from visit(child, names)

    yield from visit(tree, ())


def of_call(call, has_torch):
    """What a call waits for, in words; None if for nothing."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if isinstance(call.func, ast.Name):
        known = not call.args or isinstance(call.args[0], ast.Constant)
        reads = has_torch and call.func.id in NUMBERS and not known
        return f"{call.func.id}(...) may read a tensor" if reads else None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in READS:
        return f".{name}() reads a tensor"
    if name in WAITS:
        return f"{name}() holds the host"
    if name == "all_reduce" and call.args and isinstance(call.args[0], ast.Call):
        return "all_reduce of what nobody reads is a barrier that need not hold the host"
    if name in MADE_HERE and "device" in keywords:
        return f"{name}(..., device=...) copies pageable memory"
    async_ = keywords.get("non_blocking")
    if name == "to" and not (isinstance(async_, ast.Constant) and async_.value is True):
        # Another type of number is no copy from one memory to another.
        moved = [*call.args, *(v for k, v in keywords.items() if k != "dtype")]
        if not all("dtype" in ast.unparse(x) or "torch." in ast.unparse(x) for x in moved):
            return ".to(device) without non_blocking=True copies pageable memory"
    return None


def of_test(test):
    """A decision on a tensor reads it."""
    for node in ast.walk(test):
        if isinstance(node, ast.Attribute) and node.attr in DECIDES:
            return f"a decision on .{node.attr}() reads a tensor"
    return None


def runtime_files():
    """What may run in training; the strict backend is for the CPU alone."""
    strict = "parallel3d/mesh/strict"
    return [p for p in FILES if room_of(p) in ROOMS and not p.as_posix().startswith(strict)]


def found_in(files):
    return [found for path in files for found in waits_in(tree_of(path), path.as_posix())]


def test_the_host_waits_in_listed_places_alone():
    files = runtime_files()
    assert len(files) > 60
    found = found_in(files)
    unlisted = [
        f"{place} (line {line}): {what}" for place, line, what in found if place not in LISTED
    ]
    assert not unlisted, "read it with the step (Mesh.gather_floats), or say here why it waits"
    gone = set(LISTED) - {place for place, *_ in found}
    assert not gone, "they wait no more: take them off the list"


PLANTED = {
    "x.item()": "reads a tensor",
    "x.tolist()": "reads a tensor",
    "x.cpu()": "reads a tensor",
    "float(loss.sum())": "may read a tensor",
    "int(x)": "may read a tensor",
    "bool(done)": "may read a tensor",
    "torch.equal(x, y)": "reads a tensor",
    "torch.cuda.synchronize()": "holds the host",
    "dist.barrier(group)": "holds the host",
    "dist.all_reduce(torch.zeros(1, device=d), group=g)": "is a barrier",
    "torch.tensor([1.0], device=d)": "copies pageable memory",
    "x.to(d)": "copies pageable memory",
    "x.to('cuda', torch.float32, non_blocking=False)": "copies pageable memory",
    "x.to(device=d)": "copies pageable memory",
    "y if (x > 0).any() else x": "a decision",
}
HARMLESS = (
    "x.to(torch.float32)",
    "x.to(y.dtype)",
    "x.to(d, non_blocking=True)",
    "x.to(dtype=kind)",
    "dist.all_reduce(x, group=g)",
    "torch.tensor([1.0])",
    "float('inf')",
    "x.any()",
)


@cache
def waits_before(path):
    return set(waits_in(tree_of(path), path))


@pytest.mark.parametrize("code", [*PLANTED, *HARMLESS])
def test_what_is_planted_is_seen(code):
    """In the middle of the executor's forward, of a copy of the file."""
    path = Path("parallel3d/pipeline/executor.py")
    text, here = (ROOT / path).read_text(), "        self._key.microbatch = microbatch\n"
    planted = ast.parse(text.replace(here, f"{here}        {code}\n", 1))
    new = set(waits_in(planted, path)) - waits_before(path)
    if code in HARMLESS:
        assert not new
        return
    ((place, line, what),) = new
    assert place == f"{path}:Executor._forward" and place not in LISTED
    assert PLANTED[code] in what and line > text.split(here)[0].count("\n")
