"""Proof that a folder of weights, as other programs read it, equals what it was made from."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from parallel3d import models
from parallel3d.checkpoint.arrays import memory_of
from parallel3d.data.sources import Progress
from parallel3d.huggingface.card import About, tokenizer_files
from parallel3d.huggingface.source import CheckpointSource
from parallel3d.huggingface.weight_files import INDEX, WeightFiles
from parallel3d.model.spec import LayerSpec, tied_names
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.dropout import RandomKey

TOLERANCE = 1e-4  # of logits in fp32, relative to the largest where that is above 1
MOST_BYTES = 800 * 2**20  # of a model in fp32 whose logits are compared, which takes it twice
MOST_TOKENS = 256  # of the sample for the logits: far enough for rotations to tell
SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n<|endoftext|> The quick fox, in 1999.  "
Read = Callable[[str], Tensor]  # a parameter by our name, whole, in fp32
_READERS = 2  # threads that read tensors back, each one at a time
# The version is this one's, and the name the folder's.
_NOT_COMPARED = ("_name_or_path", "transformers_version")


class Stamp(NamedTuple):
    """The type and the shape of a tensor, and the hash of its bytes: equal where all bits are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: str

    def difference(self, wanted: "Stamp") -> str:
        """The difference from another tensor, in words."""
        if self.dtype != wanted.dtype:
            return f"is of type {self.dtype}, not {wanted.dtype}"
        if self.shape != wanted.shape:
            return f"has the shape {list(self.shape)}, not {list(wanted.shape)}"
        return "has other values"


def stamp(value: Tensor) -> Stamp:
    """The stamp of a contiguous tensor of the host."""
    return Stamp(value.dtype, tuple(value.shape), xxh3_128_hexdigest(memory_of(value)))


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
        """True if nothing differs."""
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

    `stamps`: of the checkpoint's tensors, converted, by their names in the folder.
    """
    settings = about.settings(layout)
    beside = {"config.json and generation_config.json": _config(folder, about, settings)}
    if about.tokenizer is not None:
        beside["tokenizer"] = _tokenizer(folder, about.tokenizer)
    tensors = f"{len(layout.places)} tensors against the checkpoint"
    return prove(
        settings.architectures[0],
        folder,
        layout,
        {
            f"names, shapes, type and values of {tensors}": tensors_differ(
                folder, layout, stamps, progress
            ),
            **beside,
        },
        read=source.read,
        has_tokenizer=about.tokenizer is not None,
    )


def prove(
    name: str,
    folder: Path,
    layout: WeightFiles,
    checks: Mapping[str, Iterator[str]],
    *,
    read: Read,
    has_tokenizer: bool,
) -> Proof:
    """The outcome of the checks of a model of class `name`, each of which gives its differences.

    Transformers' own loading, and its logits, are checked besides. A file that cannot be loaded
    differs; nothing is raised for it.
    """
    loads = f"{name} loads with nothing missing, unexpected or mismatched"
    checks = {**checks, loads: _loading_differs(folder, name)}
    left_out = [] if has_tokenizer else ["tokenizer: there is none"]
    if 4 * layout.num_elements > MOST_BYTES:
        left_out.append(f"logits: in fp32 the model is larger than {MOST_BYTES >> 20} MiB")
    else:
        logits = f"logits against parallel3d's own modules, within {TOLERANCE:g}"
        checks[logits] = _logits_differ(folder, read, layout)
    checked, differs = [], []
    for what, differences in checks.items():
        try:
            found = list(differences)
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
    folder: Path, layout: WeightFiles, stamps: Mapping[str, Stamp], progress: Progress
) -> Iterator[str]:
    """Differences of a folder's shards and tensors from those with these stamps, by name."""
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

    def look(name: str) -> Stamp | None:
        file = layout.places[name].file
        return stamp(tensor_in(folder / file, name)) if name in there.get(file, ()) else None

    names = list(layout.places)
    with ThreadPoolExecutor(_READERS) as readers:
        for done, (name, read) in enumerate(zip(names, readers.map(look, names), strict=True)):
            progress("reading back (tensors)", done, len(names))
            file = layout.places[name].file
            if read is None:
                if file in there:
                    yield f"{file}: {name} is missing"
            elif name in stamps and read != stamps[name]:
                yield f"{file}: {name} {read.difference(stamps[name])}"


def tensor_in(path: Path, name: str) -> Tensor:
    """A tensor of a file, as the library of safetensors reads it."""
    # Opened for each, so that what is mapped of the file is let go of.
    with safe_open(path, "pt") as opened:
        value: Tensor = opened.get_tensor(name)
        return value


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


def _loading_differs(folder: Path, name: str) -> Iterator[str]:
    """Differences in transformers' own loading report, on the meta device."""
    model, report = loaded(folder, output_loading_info=True, device_map="meta")
    if type(model).__name__ != name:
        yield f"config.json: loads as {type(model).__name__}, not {name}"
    for kind, found in report.items():
        for what in sorted(map(str, found)):
            yield f"loading: {kind.replace('_', ' ')}: {what}"


def loaded(folder: Path, **options: Any) -> Any:
    """Load a folder with transformers, never from the network, and never a pickle."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, use_safetensors=True, local_files_only=True, **options)


def _tokenizer(folder: Path, original: Path) -> Iterator[str]:
    from transformers import AutoTokenizer

    ours, theirs = (
        AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (original, folder)
    )
    if ours(SAMPLE).input_ids != theirs(SAMPLE).input_ids:
        yield "tokenizer: gives other ids for a sample of text"
    if len(tokenizer_files(folder)) < len(tokenizer_files(original)):
        yield "tokenizer: a file is missing"


@torch.no_grad()
def _logits_differ(folder: Path, read: Read, layout: WeightFiles) -> Iterator[str]:
    """Difference of a folder's logits of a sample from ours, if above TOLERANCE; both in fp32.

    Ours come from the weights that `read` gives, as the layout's type rounds them.
    """
    config = layout.config
    length = min(MOST_TOKENS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, length), generator=generator)
    ours = _logits(read, layout, tokens)
    model = loaded(folder, dtype=torch.float32, attn_implementation="eager")
    theirs = model.eval()(tokens, use_cache=False).logits
    apart, largest = float((ours - theirs).abs().max()), float(ours.abs().max())
    if not apart <= TOLERANCE * max(1.0, largest):  # a NaN is not
        yield f"logits: are up to {apart:.2g} apart, of {largest:.2g}"


def _logits(read: Read, layout: WeightFiles, tokens: Tensor) -> Tensor:
    """By the modules that train, layer after layer; one of them has its weights at a time."""
    layers = models.layers(layout.config)
    originals = tied_names(layers)
    # A group of this process alone: layers ask it for its size and rank, and nothing else.
    alone: Any = dist.ProcessGroup
    context = LayerContext(alone(0, 1), RandomKey(0, 0))

    def built(layer: LayerSpec) -> nn.Module:
        place, _, name = layer.build.partition(":")
        module: nn.Module = getattr(import_module(place), name)(layer.config, layer.name, context)
        for name, parameter in module.named_parameters():
            full = f"{layer.name}.{name}"
            parameter.copy_(read(originals.get(full, full)).to(layout.dtype))
        return module.eval()

    x = tokens
    for layer in layers[:-1]:
        x = built(layer)(x, None)
    head: Any = built(layers[-1])
    found: list[Tensor] = []
    head.output.register_forward_hook(lambda output, args, _: found.append(output.logits(args[0])))
    head(x, tokens)
    return found[0]
