"""Export checkpoints to transformers; import its models, and other programs' configs and runs.

`parallel3d convert export CHECKPOINT --to OUT` takes a checkpoint (step-N) or a run's folder, whose
newest checkpoint it exports. `import DIR --to OUT` writes a folder for `model.from_pretrained`.
Both run in one process without a GPU, and check the new folder before it gets its name.
`config FILE --out ds.json` writes a config for one of nanotron, GPT-NeoX, Megatron-LM or Hugging
Face's Trainer, and prints what became of each setting. `checkpoint SOURCE --to runs/NAME --config
ds.json` makes a checkpoint of a run of DeepSpeed, torch or transformers' Trainer, with its moments
and its place in the data.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from parallel3d.base import atomic, terminal
from parallel3d.base.arguments import (
    DONE,
    FAILED,
    Parser,
    output_file,
    path_of,
    prints_errors_as,
    whole_number,
)
from parallel3d.base.errors import ConfigError

if TYPE_CHECKING:  # torch is imported late, so that a wrong command line is reported first
    from parallel3d.huggingface.conversion import Proof

DTYPES = ("fp32", "bf16", "fp16")
_CHECKPOINT = "make a checkpoint of a run of DeepSpeed, torch or the Trainer, with its moments"


@prints_errors_as("convert")
def main() -> int:
    """Run the command `convert`; return 1 if a check fails or the disk is full, 2 for bad input."""
    args, overrides = parse_args()
    if args.command == "config":
        return convert_config(args)
    if args.command == "checkpoint":
        return convert_checkpoint(args, overrides)
    proof, description = convert(args)
    console = terminal.console(args.json)
    say(proof, description, args, console)
    return DONE if proof.ok else FAILED


def convert(args: argparse.Namespace) -> tuple["Proof", str]:
    """Export or import as the command line says; return the proof and a text about the source."""
    from parallel3d.data.prepare_progress import shown_progress
    from parallel3d.huggingface import conversion, weight_files
    from parallel3d.huggingface.source import CheckpointSource

    conversion.check_new(args.to)
    size = weight_files.bytes_of(args.shard_size)
    conversion.quiet()
    with shown_progress() as progress:
        if args.command == "import":
            proof = conversion.import_folder(
                args.folder, args.to, shard_bytes=size, progress=progress
            )
            return proof, f"from {args.folder}"
        source = CheckpointSource(args.checkpoint, args.ema)
        about = source.about(args.tokenizer, args.architecture)
        dtype = weight_files.DTYPES[args.dtype]
        files = weight_files.WeightFiles(source.config.model, dtype, size)
        proof = conversion.export(source, about, files, args.to, progress)
        return proof, f"in {args.dtype}, from {source.folder}"


def say(proof: "Proof", description: str, args: argparse.Namespace, console: Console) -> None:
    """Print the checks that passed, those that were skipped, and the differences."""
    console.print(
        f"{proof.architecture}, {proof.tensors:,} tensors, {proof.bytes:,} bytes {description}"
    )
    rows = [("proved", check) for check in proof.checked]
    rows += [("not compared", check) for check in proof.left_out]
    rows += [("DIFFERS", difference) for difference in proof.differs]
    for verdict, text in rows:
        console.print(f"{verdict:<14}{text}")
    console.print(f"wrote {args.to}" if proof.ok else f"{args.to} was not written")
    if args.json:
        keys = ("ok", "architecture", "tensors", "bytes", "checked", "differs", "left_out")
        terminal.print_json({key: getattr(proof, key) for key in keys})


def convert_config(args: argparse.Namespace) -> int:
    """Print what became of another framework's settings, and write our config.

    Return 1 if no config can express the settings; an invalid config raises ConfigError.
    """
    from parallel3d.extras.foreign import convert as foreign

    if args.out and args.out.exists():
        raise ConfigError(f"--out = {args.out}: exists; remove it, or name another file")
    config, rows = foreign.convert(args.files)
    console = terminal.console(args.json)
    for row in rows:
        console.print(f"{row.verdict:<14}{row}")
    ok = all(row.verdict != "REFUSED" for row in rows)
    if ok:
        for name in foreign.check(config, args.files[0]):
            console.print(f"{'not checked':<14}{name}: is read when the run starts")
    if args.json:
        terminal.print_json({"ok": ok, "rows": [row._asdict() for row in rows], "config": config})
    if not ok:
        console.print("no config was written: see the lines marked REFUSED")
    elif args.out:
        atomic.replace_text(args.out, f"{json.dumps(config, indent=2)}\n")
        console.print(f"wrote {args.out}")
    else:
        console.print(json.dumps(config, indent=2))
    return DONE if ok else FAILED


def convert_checkpoint(args: argparse.Namespace, overrides: list[str]) -> int:
    """Make a checkpoint of ours from another program's, and print what was taken from it."""
    from parallel3d.config import RunConfig
    from parallel3d.data.prepare_progress import shown_progress
    from parallel3d.extras.foreign.checkpoints import convert as foreign
    from parallel3d.huggingface import conversion

    config = RunConfig.from_json(args.config, overrides)
    asked = foreign.Asked(args.step, args.samples_seen, args.accept_changes)
    conversion.quiet()
    with shown_progress() as progress:
        result = foreign.convert(args.source, args.to, config, asked, progress)
    console = terminal.console(args.json)
    console.print(f"{args.source}: a checkpoint of {result.program}")
    for line in result.taken:
        console.print(f"{'taken':<14}{line}")
    for line in result.differs:
        console.print(f"{'DIFFERS':<14}{line}")
    console.print(
        f"{'proved':<14}weights and moments of {result.num_parameters:,} parameters, read back and "
        "compared with the source"
    )
    console.print(f"wrote {result.folder}, {result.num_bytes:,} bytes; to go on with it:")
    directory = f"--run.directory {args.to.parent} --run.name {args.to.name}"
    console.print(f"parallel3d train --config {args.config} {directory}")
    if args.json:
        position = {"step": result.position.step, "samples": result.position.next_sample}
        keys = ("program", "taken", "differs", "num_parameters", "num_bytes")
        shown = {key: getattr(result, key) for key in keys}
        terminal.print_json({"ok": True, "folder": str(result.folder), **position, **shown})
    return DONE


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Read the command line of `convert`: its options, and settings by path for `checkpoint`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "export a checkpoint to a folder that transformers loads, and check it"
    export = commands.add_parser("export", help=text, description=text)
    add = export.add_argument
    text = "a checkpoint (step-N) or a run's folder"
    add("checkpoint", type=path_of, metavar="CHECKPOINT", help=text)
    text = "type of the weights (default: fp32, which does not round)"
    add("--dtype", choices=DTYPES, default="fp32", help=text)
    text = "transformers class, such as MistralForCausalLM for a plain llama"
    add("--architecture", metavar="CLASS", help=text)
    text = "folder of the run's tokenizer, if it has moved"
    add("--tokenizer", type=path_of, metavar="FOLDER", help=text)
    text = "the exponential moving average of the weights (train.ema) in their place"
    add("--ema", action="store_true", help=text)
    add_outputs(export)

    text = "convert a transformers folder to one for model.from_pretrained, and check it"
    import_ = commands.add_parser("import", help=text, description=text)
    text = "a folder with config.json and safetensors files"
    import_.add_argument("folder", type=path_of, metavar="DIR", help=text)
    add_outputs(import_)

    text = "write a config for one of nanotron, GPT-NeoX, Megatron-LM or the Trainer"
    config = commands.add_parser("config", help=text, description=text)
    add = config.add_argument
    text = (
        "nanotron's YAML; GPT-NeoX's YAML files; Megatron-LM's script or arguments file; or the "
        "Trainer's arguments (JSON, YAML, .py, script), and their DeepSpeed file"
    )
    add("files", nargs="+", metavar="FILE", help=text)
    add("--out", type=output_file, metavar="FILE", help="the new config (default: print it)")
    config.add_json()
    add_checkpoint(commands.add_parser("checkpoint", help=_CHECKPOINT, description=_CHECKPOINT))
    args, overrides = parser.parse_known_args()
    if overrides and args.command != "checkpoint":
        parser.error(f"{overrides[0]}: unknown option")
    return args, overrides


def add_checkpoint(command: Parser) -> None:
    """Add the options of `checkpoint`."""
    add = command.add_argument
    text = "a folder of DeepSpeed, of torch (DCP), or of transformers' Trainer"
    add("source", type=path_of, metavar="SOURCE", help=text)
    add("--to", type=path_of, required=True, metavar="RUN", help="the new run's folder: runs/NAME")
    command.add_config()
    text = "steps done, if the source does not say it"
    add("--step", type=whole_number(0), metavar="N", help=text)
    text = "samples trained on, over all ranks, if the source does not say it"
    add("--samples-seen", type=whole_number(0, 2**62), metavar="N", help=text)
    text = "go on with the config's learning rate, betas, eps and decay, also if the source differs"
    add("--accept-changes", action="store_true", help=text)
    command.add_json()


def add_outputs(command: Parser) -> None:
    """Add the options of what `export` and `import` write."""
    add = command.add_argument
    add("--to", type=path_of, required=True, metavar="OUT", help="a new or empty folder")
    text = "largest size of a file (default: 5GB)"
    add("--shard-size", default="5GB", metavar="SIZE", help=text)
    command.add_json()


if __name__ == "__main__":
    sys.exit(main())
