"""A checkpoint's folder written by hand, from docs/checkpoint.md alone: json, struct, numpy."""

import json
import struct
from pathlib import Path

import numpy as np
import xxhash

SHAPES = {"embedding.weight": (5, 2), "blocks.0.norm.weight": (4,)}
FIRST = "shard-00000-of-00002.safetensors"
SECOND = "shard-00001-of-00002.safetensors"
KINDS = ("master", "exp_avg", "exp_avg_sq")


def make_checkpoint(checkpoints, step=10, seed=0, shapes=SHAPES):
    """A sound checkpoint of two files: each parameter in two chunks, cut at its first dim."""
    folder = Path(checkpoints) / f"step-{step}"
    folder.mkdir(parents=True)
    files = ({}, {})
    for (name, kind), value in values_of(seed, shapes).items():
        cut = len(value) // 2
        other_offsets = ",0" * (value.ndim - 1)
        files[0][f"{name}|{kind}|0{other_offsets}"] = value[:cut]
        files[1][f"{name}|{kind}|{cut}{other_offsets}"] = value[cut:]
    for file, tensors in zip((FIRST, SECOND), files, strict=True):
        write_tensors(folder / file, tensors)
    (folder / "state.json").write_text(json.dumps(state_of(step, shapes), indent=1))
    seal(folder, step)
    return folder


def values_of(seed=0, shapes=SHAPES):
    """What the checkpoint holds: arrays by (name, kind)."""
    rng = np.random.default_rng(seed)
    both = [(name, kind) for name in shapes for kind in KINDS]
    return {(name, kind): rng.normal(size=shapes[name]).astype("<f4") for name, kind in both}


def state_of(step, shapes=SHAPES):
    return {
        "format": 1,
        "step": step,
        "tokens": 4096 * step,
        "next_sample": 8 * step,
        "parameters": {name: {"shape": list(shape)} for name, shape in shapes.items()},
        "optimizer_steps": step,
        "learning_rate": {"next": 1e-3, "of_steps": 1000},
        "loss_scale": None,
        "random": {"seed": 0, "next_step": step},
        "config": {"train_batch_size": 8, "parallel3d": {"model": {"family": "gpt"}}},
        "tokenizer": "0123456789abcdef",
        "corpus": "python-stdlib",
        "split": 2,
        "versions": {"parallel3d": "0.1.0", "torch": "2.13.0"},
        "mesh": {
            "pp": 1,
            "dp": 2,
            "tp": 1,
            "schedule": "gpipe",
            "stages_per_rank": 1,
            "zero_stage": 3,
            "offload_optimizer": "cpu",
            "offload_param": "none",
        },
    }


def write_tensors(path, tensors):
    """A safetensors file of these arrays, in their order."""
    entries = {}
    at = 0
    for key, value in tensors.items():
        end = at + value.nbytes
        entries[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    write_raw(path, entries, b"".join(value.tobytes() for value in tensors.values()))


def write_raw(path, entries, data):
    """A safetensors file with a header of any JSON or bytes, sound or not."""
    head = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def seal(folder, step, **changes):
    """Write a manifest of what is in the folder, `changes` apart, with a right hash of itself."""
    files = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.name != "manifest.json":
            data = path.read_bytes()
            files[path.name] = {"size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
    content = {"digest": "0" * 32, "files": files, "format": 1, "step": step} | changes
    write_manifest(folder, content)


def write_manifest(folder, content):
    """Write a manifest of any content in the canonical form, with a right hash of itself."""
    text = json.dumps(content, indent=1, sort_keys=True) + "\n"
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    (folder / "manifest.json").write_text(text.replace("0" * 32, digest, 1))
