"""Turn checkpoints into folders of transformers, and published models into starts for training.

`parallel3d convert export CHECKPOINT --to OUT` takes a run's folder, or one of a checkpoint,
step-N; of several it is the newest. `import DIR --to OUT` is for `model.from_pretrained`.
No ranks and no GPU are needed. The folder is read back and compared before it has its name.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from parallel3d.base import terminal
from parallel3d.base.arguments import DONE, FAILED, Parser, named

if TYPE_CHECKING:  # torch waits for a command line that is right
    from parallel3d.huggingface.read_back import Proof

DTYPES = ("fp32", "bf16", "fp16")


@named("convert")
def main() -> int:
    """Run the command `convert`: 0, 1 where a check fails or the disk is full, 2 for bad input."""
    args = parse_args()
    proof, of = converted(args)
    console = terminal.console(args.json)
    say(proof, of, args, console)
    if proof.ok and args.command == "import":
        named = f"--parallel3d.model.from_pretrained {shlex.quote(str(args.to))}"
        console.print(f"start training from it with {named}")
    return DONE if proof.ok else FAILED


def converted(args: argparse.Namespace) -> tuple["Proof", str]:
    """Write a checkpoint as a folder of transformers, or a published model as a start for training.

    Return what was proved of it, and the words for its source.
    """
    from parallel3d.data.prepare_progress import shown_progress
    from parallel3d.huggingface import conversion
    from parallel3d.huggingface.source import CheckpointSource
    from parallel3d.huggingface.weight_files import DTYPES as TYPES
    from parallel3d.huggingface.weight_files import WeightFiles, bytes_of

    conversion.check_new(args.to)
    size = bytes_of(args.shard_size)
    conversion.quiet()
    with shown_progress() as progress:
        if args.command == "import":
            proof = conversion.import_folder(
                args.folder, args.to, shard_bytes=size, progress=progress
            )
            return proof, f"of {args.folder}"
        source = CheckpointSource(args.checkpoint)
        about = source.about(args.tokenizer, args.architecture)
        files = WeightFiles(source.config.model, TYPES[args.dtype], size)
        proof = conversion.export(source, about, files, args.to, progress)
        return proof, f"in {args.dtype}, of {source.folder}"


def say(proof: "Proof", of: str, args: argparse.Namespace, console: Console) -> None:
    """Print what a conversion has proved, what was not compared, and what differs."""
    console.print(f"{proof.architecture}, {proof.tensors:,} tensors, {proof.bytes:,} bytes {of}")
    rows = [("proved", what) for what in proof.checked]
    rows += [("not compared", what) for what in proof.left_out]
    rows += [("DIFFERS", what) for what in proof.differs]
    for verdict, what in rows:
        console.print(f"{verdict:<14}{what}")
    console.print(str(args.to) if proof.ok else f"{args.to} is not made")
    if args.json:
        keys = ("ok", "architecture", "tensors", "bytes", "checked", "differs", "left_out")
        print(json.dumps({key: getattr(proof, key) for key in keys}))


def parse_args() -> argparse.Namespace:
    """Read the command line of `convert`."""
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "write a checkpoint as a folder that transformers loads, and read it back"
    export = commands.add_parser("export", help=text, description=text)
    export.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a folder step-N, or a run's folder"
    )
    export.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="of the weights; fp32 is all there is"
    )
    export.add_argument(
        "--architecture", metavar="CLASS", help="MistralForCausalLM for a plain llama"
    )
    export.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="where it is not where the run found it"
    )
    text = "read a folder of transformers, and write it as model.from_pretrained takes it"
    import_ = commands.add_parser("import", help=text, description=text)
    import_.add_argument(
        "folder", type=Path, metavar="DIR", help="with config.json and safetensors"
    )
    for command in (export, import_):
        command.add_argument(
            "--to", type=Path, required=True, metavar="OUT", help="a folder that is new, or empty"
        )
        command.add_argument(
            "--shard-size", default="5GB", metavar="SIZE", help="most bytes of a file (5GB)"
        )
        command.add_json()
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
