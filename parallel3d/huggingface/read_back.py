"""Proof that an exported folder, as other programs read it, equals its checkpoint."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from parallel3d.data.sources import Progress
from parallel3d.huggingface.card import About, tokenizer_files
from parallel3d.huggingface.files import Stamp, stamp
from parallel3d.huggingface.logits import Read, most_apart
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import INDEX, WeightFiles

TOLERANCE = 1e-4  # of logits in fp32, relative to the largest where that is above 1
MOST_BYTES = 800 * 2**20  # of a model in fp32 whose logits are compared, which takes it twice
SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n<|endoftext|> The quick fox, in 1999.  "
LOGITS = f"logits against parallel3d's own modules, within {TOLERANCE:g}"
LARGE = f"logits: in fp32 the model is larger than {MOST_BYTES >> 20} MiB"
Check = Callable[[], Iterator[str]]
_READERS = 2  # threads that read tensors back, each one at a time
# The version is this one's, and the name the folder's.
_NOT_COMPARED = ("_name_or_path", "transformers_version")


@dataclass(frozen=True)
class Proof:
    """The outcome of a comparison: checks that held, differences, and checks not made, with why."""

    architecture: str
    tensors: int
    bytes: int
    checked: tuple[str, ...]
    differs: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differs


def read_back(
    folder: Path,
    source: CheckpointSource,
    about: About,
    layout: WeightFiles,
    stamps: Mapping[str, Stamp],
    progress: Progress,
) -> Proof:
    """Compare a folder with the checkpoint that it was made from.

    `stamps`: of the checkpoint's tensors, converted, by their names in the folder. Tensors are read
    with the library of safetensors, the rest with transformers' own loading. What cannot be loaded
    differs; nothing is raised for it.
    """
    ours = {theirs: name for name, found in layout.names.items() for theirs in found}

    def wanted(theirs: str) -> Tensor:
        return layout.converted(ours[theirs], source.read(ours[theirs]))[theirs]

    settings = about.settings(layout)
    name = settings.architectures[0]
    count = len(layout.places)
    checks: dict[str, Check] = {
        f"names, shapes, type and values of {count} tensors against the checkpoint": lambda: (
            tensors_differ(folder, layout, stamps, wanted, progress)
        ),
        "config.json and generation_config.json": lambda: _config(folder, about, settings),
        f"{name} loads with nothing missing, unexpected or mismatched": lambda: loading_differs(
            folder, name
        ),
    }
    left_out = []
    if about.tokenizer is None:
        left_out.append("tokenizer: there is none")
    else:
        checks["tokenizer"] = lambda: _tokenizer(folder, about)
    if is_large(layout):
        left_out.append(LARGE)
    else:
        checks[LOGITS] = lambda: logits_differ(folder, source.read, layout)
    return prove(name, layout, checks, left_out)


def is_large(layout: WeightFiles) -> bool:
    """Whether the model is too large for its logits to be compared."""
    sizes = (torch.Size(place.shape).numel() for place in layout.places.values())
    return 4 * sum(sizes) > MOST_BYTES


def prove(
    name: str, layout: WeightFiles, checks: Mapping[str, Check], left_out: Iterable[str]
) -> Proof:
    """The outcome of the checks of a model of class `name`, each of which gives its differences.

    What cannot be loaded differs; nothing is raised for it.
    """
    checked, differs = [], []
    for what, check in checks.items():
        try:
            found = list(check())
        # Broad: each of their libraries refuses a damaged file in its own way.
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            found = [f"{what}: {reason}"]
        if found:
            differs += found
        else:
            checked.append(what)
    done = tuple(checked), tuple(differs), tuple(left_out)
    return Proof(name, len(layout.places), layout.total_size, *done)


def tensors_differ(
    folder: Path,
    layout: WeightFiles,
    stamps: Mapping[str, Stamp],
    wanted: Callable[[str], Tensor],
    progress: Progress,
) -> Iterator[str]:
    """Differences of a folder's shards and tensors from those with these stamps, by name.

    `wanted` gives such a tensor, of the layout's type: one that differs is compared with it.
    """
    files = {path.name for path in folder.glob("*.safetensors")}
    for file in sorted(files ^ layout.files.keys()):
        yield f"{file}: {'is not one of the shards' if file in files else 'is missing'}"
    index = (folder / INDEX).read_text(encoding="utf-8") if (folder / INDEX).exists() else None
    if index != (layout.index and f"{layout.index}\n"):
        yield f"{INDEX}: is not that of these shards"
    there: dict[str, set[str]] = {}
    for file in sorted(files & layout.files.keys()):
        try:
            with safe_open(folder / file, "pt") as opened:
                there[file] = set(opened.keys())
        except Exception as error:  # SafetensorError, and OSError
            yield f"{file}: {error}"
            continue
        for name in sorted(there[file] - set(layout.files[file])):
            yield f"{file}: {name} should not be in it"
    for name in sorted(stamps.keys() ^ layout.places.keys()):
        yield f"{name}: is {'not one of the model' if name in stamps else 'not in the source'}"

    def found(name: str) -> Tensor:
        # Opened anew, so that what is mapped of it is let go of.
        with safe_open(folder / layout.places[name].file, "pt") as opened:
            value: Tensor = opened.get_tensor(name)
            return value

    def look(name: str) -> Stamp | None:
        return stamp(found(name)) if name in there.get(layout.places[name].file, ()) else None

    names = list(layout.places)
    with ThreadPoolExecutor(_READERS) as readers:
        for done, (name, read) in enumerate(zip(names, readers.map(look, names), strict=True)):
            progress("reading back (tensors)", done, len(names))
            file = layout.places[name].file
            if read is None:
                if file in there:
                    yield f"{file}: {name} is missing"
            elif name in stamps and read != stamps[name]:
                yield from _difference(f"{file}: {name}", found(name), wanted(name))


def _difference(what: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
    """What differs of two tensors, of which something does."""
    if found.dtype != wanted.dtype:
        yield f"{what} is of type {found.dtype}, not {wanted.dtype}"
    elif found.shape != wanted.shape:
        yield f"{what} has the shape {list(found.shape)}, not {list(wanted.shape)}"
    elif count := int((_bits(found) != _bits(wanted)).sum()):
        yield f"{what} has other values in {count:,} of {wanted.numel():,} elements"
    else:
        yield f"{what} reads as other values now than before: the disk or the memory is not sound"


def _bits(value: Tensor) -> Tensor:
    """So that a NaN is equal to itself, and 0 is not -0."""
    return value.contiguous().view(torch.int32 if value.element_size() == 4 else torch.int16)


def _config(folder: Path, about: About, settings: Any) -> Iterator[str]:
    from transformers import AutoConfig, GenerationConfig

    found = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    wanted = settings.to_dict()
    for key in sorted(found.keys() | wanted.keys()):
        if key not in _NOT_COMPARED and found.get(key) != wanted.get(key):
            yield f"config.json: {key} is {found.get(key)!r}, not {wanted.get(key)!r}"
    generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (there := getattr(generation, key)) != about.end_of_text:
            yield f"generation_config.json: {key} is {there}, not {about.end_of_text}"


def loading_differs(folder: Path, name: str) -> Iterator[str]:
    """Differences in transformers' own loading report, on the meta device."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(
        folder,
        output_loading_info=True,
        device_map="meta",
        use_safetensors=True,
        local_files_only=True,
    )
    if type(model).__name__ != name:
        yield f"config.json: loads as {type(model).__name__}, not {name}"
    for kind, found in report.items():
        for what in sorted(map(str, found)):
            yield f"loading: {kind.replace('_', ' ')}: {what}"


def _tokenizer(folder: Path, about: About) -> Iterator[str]:
    from transformers import AutoTokenizer

    assert about.tokenizer is not None
    ours, theirs = (
        AutoTokenizer.from_pretrained(path, local_files_only=True)
        for path in (about.tokenizer, folder)
    )
    if ours(SAMPLE).input_ids != theirs(SAMPLE).input_ids:
        yield "tokenizer: gives other ids for a sample of text"
    if len(tokenizer_files(folder)) < len(tokenizer_files(about.tokenizer)):
        yield "tokenizer: a file is missing"


def logits_differ(folder: Path, read: Read, layout: WeightFiles) -> Iterator[str]:
    """Whether a folder's logits of a sample are further than TOLERANCE from ours."""
    apart, largest = most_apart(folder, read, layout)
    if not apart <= TOLERANCE * max(1.0, largest):  # a NaN is not
        yield f"logits: are up to {apart:.2g} apart, of {largest:.2g}"
