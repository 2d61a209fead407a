"""Convert checkpoints and published models to folders that transformers loads.

Each folder is read back and compared with its source before it gets its final name.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from xxhash import xxh3_128_hexdigest

from parallel3d import models
from parallel3d.base.errors import ConfigError, TrainingError, first_line, remedy_of
from parallel3d.checkpoint.chunks import memory_of, recycled
from parallel3d.checkpoint.disk import remove_folder
from parallel3d.config.pretrained import derive_model_block, model_of, read_config, read_published
from parallel3d.data.sources import Progress, no_progress
from parallel3d.huggingface.beside import GENERATION
from parallel3d.huggingface.source import CheckpointSource, PublishedWeights
from parallel3d.huggingface.weight_files import (
    CARD,
    CONFIG,
    INDEX,
    SHARD_BYTES,
    About,
    WeightFiles,
    copy_tokenizer,
    create,
    publish,
    tokenizer_files,
    write_rest,
    write_tensor,
)
from parallel3d.model.spec import LayerSpec, tied_names
from parallel3d.models import pretrained
from parallel3d.tensor.context import LayerContext
from parallel3d.tensor.random_key import RandomKey

TOLERANCE = 1e-4  # largest difference of fp32 logits, relative to the largest logit if above 1
MOST_BYTES = 800 * 2**20  # largest model in fp32 to compare logits of; memory holds it twice
MOST_TOKENS = 256  # length of the sample for logits, long enough to show wrong rotary embeddings
SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n<|endoftext|> The quick fox, in 1999.  "
Read = Callable[[str], Tensor]  # parameter name in parallel3d -> full parameter in fp32
# They change with the folder's name and with the version of transformers.
_NOT_COMPARED = ("_name_or_path", "transformers_version")


def stamp(value: Tensor) -> str:
    """Return type, shape and hash of a contiguous tensor on the host, the same for equal bits."""
    return f"{value.dtype} {list(value.shape)} {xxh3_128_hexdigest(memory_of(value))}"


@dataclass(frozen=True)
class Proof:
    """The result of comparing a folder with its source."""

    architecture: str
    tensors: int
    bytes: int
    checked: tuple[str, ...]
    """Checks that passed."""
    differs: tuple[str, ...]
    """Differences that were found."""
    left_out: tuple[str, ...]
    """Checks that were skipped, with the reason."""

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differs


def read_back(
    folder: Path,
    source: CheckpointSource,
    about: About,
    layout: WeightFiles,
    stamps: Mapping[str, str],
    progress: Progress,
) -> Proof:
    """Compare an exported folder with its checkpoint.

    - `stamps`: name in the folder -> stamp of the checkpoint's tensor after conversion.
    """
    settings = about.settings(layout)
    of_settings = "config.json and generation_config.json"
    if about.beside.published:
        of_settings += f", with the special ids and generation settings of {about.beside.published}"
    other_checks = {of_settings: _config(folder, about, settings)}
    if about.tokenizer is not None:
        other_checks["tokenizer"] = _tokenizer(folder, about.tokenizer)
    of_tensors = (
        f"names, shapes, type and values of {len(layout.places)} tensors against the checkpoint"
    )
    return prove(
        settings.architectures[0],
        folder,
        layout,
        {of_tensors: tensors_differ(folder, layout, stamps, progress), **other_checks},
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
    """Run the checks of a folder, then check that transformers loads it and returns equal logits.

    - `name`: transformers class of the model.
    - `checks`: name of a check -> iterator over the differences that it finds.
    - `read`: reads a parameter of the source.

    A file that cannot be loaded counts as a difference and raises nothing.
    """
    loads = f"{name} loads with nothing missing, unexpected or mismatched"
    checks = {**checks, loads: _loading_differs(folder, name)}
    left_out = [] if has_tokenizer else ["tokenizer: there is none"]
    if 4 * layout.num_elements > MOST_BYTES:
        left_out.append(f"logits: in fp32 the model is larger than {MOST_BYTES >> 20} MiB")
    else:
        logits = f"logits against parallel3d's own modules, within {TOLERANCE:g}"
        checks[logits] = _logits_differ(folder, read, layout)
    checked = []
    differs = []
    for what, differences in checks.items():
        try:
            problems = list(differences)
        # Broad, because the libraries raise errors of many types for a damaged file.
        except Exception as error:
            problems = [f"{what}: {first_line(error)}"]
        if problems:
            differs += problems
        else:
            checked.append(what)
    return Proof(
        name,
        len(layout.places),
        layout.total_size,
        checked=tuple(checked),
        differs=tuple(differs),
        left_out=tuple(left_out),
    )


def tensors_differ(
    folder: Path, layout: WeightFiles, stamps: Mapping[str, str], progress: Progress
) -> Iterator[str]:
    """Yield the differences of a folder's shards and tensors from the layout and the stamps."""
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in layout.files:
            yield f"{path.name}: is not one of the shards"
    index = (folder / INDEX).read_text(encoding="utf-8") if (folder / INDEX).exists() else None
    if index != (layout.index and f"{layout.index}\n"):
        yield f"{INDEX}: does not match the shards"
    for done, (file, names) in enumerate(layout.files.items()):
        progress("reading back (shards)", done, len(layout.files))
        try:
            with safe_open(folder / file, "pt") as opened:
                there = set(opened.keys())
        except Exception as error:  # SafetensorError or OSError
            yield f"{file}: {error}"
            continue
        for name in sorted(there.symmetric_difference(names)):
            yield f"{file}: {name} is {'unexpected' if name in there else 'missing'}"
        for name in sorted(there.intersection(names)):
            read = stamp(tensor_in(folder / file, name))
            if read != stamps[name]:
                yield f"{file}: {name} is {read}, not {stamps[name]}"


def tensor_in(path: Path, name: str) -> Tensor:
    """Return a tensor of a file, as the safetensors library reads it."""
    # Open the file for each tensor, so that its memory mapping is released.
    with safe_open(path, "pt") as opened:
        value: Tensor = opened.get_tensor(name)
        return value


def _config(folder: Path, about: About, settings: Any) -> Iterator[str]:
    from transformers import AutoConfig, GenerationConfig

    loaded_settings = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    expected = settings.to_dict()
    for key in sorted(loaded_settings.keys() | expected.keys()):
        if key not in _NOT_COMPARED and loaded_settings.get(key) != expected.get(key):
            yield f"config.json: {key} is {loaded_settings.get(key)!r}, not {expected.get(key)!r}"
    GenerationConfig.from_pretrained(folder, local_files_only=True)
    yield from about.beside.differences(folder, loaded_settings)


def _loading_differs(folder: Path, name: str) -> Iterator[str]:
    """Yield the differences that transformers reports as it loads the folder on the meta device."""
    model, report = loaded(folder, output_loading_info=True, device_map="meta")
    if type(model).__name__ != name:
        yield f"config.json: loads as {type(model).__name__}, not {name}"
    for kind, keys in report.items():
        for key in sorted(map(str, keys)):
            yield f"loading: {kind.replace('_', ' ')}: {key}"


def loaded(folder: Path, **options: Any) -> Any:
    """Load a folder with transformers, without the network and without pickled files."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, use_safetensors=True, local_files_only=True, **options)


def _tokenizer(folder: Path, original: Path) -> Iterator[str]:
    from transformers import AutoTokenizer

    for path in tokenizer_files(original):
        name = path.relative_to(original)
        copy = folder / name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            yield f"tokenizer: {name} is not that of {original}"
    run_tokenizer = AutoTokenizer.from_pretrained(original, local_files_only=True)
    saved_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if run_tokenizer(SAMPLE).input_ids != saved_tokenizer(SAMPLE).input_ids:
        yield "tokenizer: encodes a sample text to other ids"


@torch.no_grad()
def _logits_differ(folder: Path, read: Read, layout: WeightFiles) -> Iterator[str]:
    """Yield a text if the folder's logits differ from parallel3d's by more than TOLERANCE.

    Both are in fp32, for a sample of tokens. parallel3d's use the weights that `read` returns,
    rounded to the type of the layout.
    """
    config = layout.config
    length = min(MOST_TOKENS, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(int(config.vocab_size), (1, length), generator=generator)
    expected = _logits(read, layout, tokens)
    model = loaded(folder, dtype=torch.float32, attn_implementation="eager")
    logits = model.eval()(tokens, use_cache=False).logits
    error = float((expected - logits).abs().max())
    largest = float(expected.abs().max())
    if not error <= TOLERANCE * max(1.0, largest):  # also true for a NaN
        yield f"logits: differ by up to {error:.2g}; the largest is {largest:.2g}"


def _logits(read: Read, layout: WeightFiles, tokens: Tensor) -> Tensor:
    """Return the logits of parallel3d's training modules [1, seq, vocab].

    One layer is built at a time, to hold the weights of one layer only.
    """
    layers = models.layers(layout.config)
    originals = tied_names(layers)
    # Layers only ask the group for its size and rank, so an uninitialised one is enough.
    group: Any = dist.ProcessGroup
    context = LayerContext(group(0, 1), RandomKey(0, 0))

    def build(layer: LayerSpec) -> nn.Module:
        path, _, name = layer.build.partition(":")
        module: nn.Module = getattr(import_module(path), name)(layer.config, layer.name, context)
        for name, parameter in module.named_parameters():
            full = f"{layer.name}.{name}"
            parameter.copy_(read(originals.get(full, full)).to(layout.dtype))
        return module.eval()

    x = tokens
    for layer in layers[:-1]:
        output = build(layer)(x, None)
        x = output if isinstance(output, Tensor) else output[0]  # without side losses
    head: Any = build(layers[-1])
    logits: list[Tensor] = []
    # The head itself returns losses, so take the logits from its output layer.
    head.output.register_forward_hook(lambda output, args, _: logits.append(output.logits(args[0])))
    head(x, tokens)
    return logits[0]


def quiet() -> None:
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def check_new(folder: Path) -> None:
    """Raise ConfigError if `folder` exists and is not an empty folder."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--to = {folder}: exists and is not empty; remove it, or name another")


def export(
    source: CheckpointSource, about: About, layout: WeightFiles, to: Path, progress: Progress
) -> Proof:
    """Export a checkpoint to a folder that transformers loads, and check it by reading it back.

    Memory holds at most two parameters, one of them twice. If a check fails, nothing is left at
    `to`.

    Raises ConfigError if `to` is not empty or transformers has no class for the model,
    CheckpointError if the checkpoint is damaged, and TrainingError if the disk is full.
    """
    try:
        if layout.refusal:
            raise ValueError(layout.refusal)
        about.settings(layout)
    except ValueError as error:
        raise ConfigError(f"{source.folder}: {error}") from None

    def write(out: Path) -> Proof:
        stamps = write_tensors(source.read, layout, out, progress)
        source.check(progress)
        write_rest(out, about, layout)
        return read_back(out, source, about, layout, stamps, progress)

    return _publish_if_proved(to, layout, write)


def import_folder(
    folder: Path, to: Path, *, shard_bytes: int = SHARD_BYTES, progress: Progress = no_progress
) -> Proof:
    """Convert a transformers folder to one that `model.from_pretrained` reads, and check it.

    Tensors keep their types. Attention masks and copies of tied weights, which old versions of
    transformers saved, are left out. Raises ConfigError for an unsupported model, otherwise the
    errors of `export`.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; name one that contains config.json")
    settings = read_config(folder)
    read_published(folder, settings)  # a run would refuse what is wrong with it
    block = derive_model_block(folder, settings)
    config = model_of(folder, block)
    weights = PublishedWeights(folder, config)
    weights.check_tied()
    layout = WeightFiles(config, weights.dtype, shard_bytes)
    stamps: dict[str, str] = {}

    def read(name: str) -> Tensor:
        value = weights.read_whole(name)
        for stored_name in layout.names[name]:  # now, while the file is in the page cache
            stored = weights.stored.get(stored_name)
            if stored is None:  # the source has several of them in one
                continue
            stamps[stored_name] = stamp(tensor_in(stored.path, stored.name).to(layout.dtype))
        return value

    def write(out: Path) -> Proof:
        written = write_tensors(read, layout, out, progress)
        others = (folder / name for name in (CONFIG, GENERATION, CARD, "LICENSE", "LICENSE.txt"))
        for path in filter(Path.is_file, others):
            shutil.copyfile(path, out / path.name)
        copy_tokenizer(folder, out)
        tensors = f"names, shapes, type and values of {len(layout.places)} tensors against {folder}"
        return prove(
            pretrained.class_of(settings) or _class_of(config),
            out,
            layout,
            {tensors: tensors_differ(out, layout, written | stamps, progress)},
            read=weights.read_whole,
            has_tokenizer=bool(tokenizer_files(folder)),
        )

    return _publish_if_proved(to, layout, write)


def _class_of(config: Any) -> str:
    """Return the class of a model that transformers itself has."""
    family: Any = models.huggingface(config.family)
    return str(family.architecture(config).architectures[0])


def _publish_if_proved(to: Path, layout: WeightFiles, write: Callable[[Path], Proof]) -> Proof:
    """Write a folder under a temporary name, and rename it to `to` if its proof holds.

    - `write`: writes the weights and other files into the folder and returns the proof.
    """
    to = to.resolve()  # "." has no name to derive the temporary one from
    check_new(to)
    unfinished = to.with_name(f"{to.name}.partial")
    try:
        create(unfinished, layout)
        proof = write(unfinished)
        if proof.ok:
            publish(unfinished, to)
    except OSError as error:
        raise TrainingError(
            f"the conversion to {to} failed ({error}); "
            f"{remedy_of(error, 'mend that')}, or name another folder with --to"
        ) from error
    finally:
        remove_folder(unfinished)
    return proof


def write_tensors(
    read: Read, layout: WeightFiles, folder: Path, progress: Progress
) -> dict[str, str]:
    """Write every weight into the files that `create` has made. Raises OSError.

    While `read` reads one parameter, a thread converts and writes the one before. Returns name in
    the files -> stamp of the written tensor.
    """
    stamps: dict[str, str] = {}

    def write(name: str, value: Tensor) -> None:
        for stored_name, tensor in layout.converted(name, value).items():
            stamps[stored_name] = stamp(tensor)
            write_tensor(folder, layout, stored_name, tensor)

    with ThreadPoolExecutor(1) as behind, recycled():
        written: Future[None] | None = None
        for done, name in enumerate(layout.names):
            progress("writing (tensors)", done, len(layout.names))
            value = read(name)
            if written is not None:
                written.result()
            written = behind.submit(write, name, value)
            del value  # the writing thread frees it
        if written is not None:
            written.result()
    return stamps
