"""The commands that README.md and the first pages of docs/ tell a reader to type."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/from-zero.md",
    "docs/own-data-and-model.md",
    "docs/several-nodes.md",
)
NOT_RUN = {
    "pip install -c constraints.txt -e .": "it is how the tests are installed",
    "pip install -c constraints.txt -e '.[test]'": "it is how the tests are installed",
    "git clone <this repository>": "it is where the tests stand",
    "python -m venv .venv": "it is where the tests run",
    "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)": "wants Slurm",
    "srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 python launch/train.py"
    " --config llama-8b.json": "wants Slurm",
    "deepspeed --hostfile hostfile launch/train.py --config llama-8b.json": "wants four nodes",
    "torchrun --nnodes 4 --nproc_per_node 8 --rdzv_id my-run --rdzv_backend c10d --rdzv_endpoint"
    " node1:29500 launch/train.py --config llama-8b.json": "wants four nodes",
    "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1": "goes before the next",
    "torchrun --nnodes 1:4 --max-restarts 100 --nproc_per_node 8 --rdzv_id my-run --rdzv_backend"
    " c10d --rdzv_endpoint login:29500 --rdzv_conf last_call_timeout=10,keep_alive_interval=2"
    " launch/train.py --config llama-8b.json": "wants several nodes; see tests/hosts",
    "python launch/train.py --config mine.json"
    " --model.from_pretrained folder-or-hub-name": "names no folder; see tests/huggingface",
}
"""The commands that test_pages_run.py does not run, and why."""
_PROGRAM = re.compile(r"(pip|git|python|deepspeed|torchrun|srun|touch|mkdocs|export)\s")
_INLINE = re.compile(r"`((?:python|deepspeed|torchrun) launch/[^`]+)`")


def commands(page):
    """Its commands in order, one line each; comments, prompts and outputs are left out."""
    text = (ROOT / page).read_text()
    commands = []
    for block in re.findall(r"(?m)(?:^    .*\n)+", text):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.sub(r"\s{2,}#.*", "", line.strip().removeprefix("$ "))
            commands += [part for part in line.split(" && ") if _PROGRAM.match(part)]
    return commands + [" ".join(inline.split()) for inline in _INLINE.findall(text)]


def every_command():
    """The commands of all pages, each once."""
    return list(dict.fromkeys(command for page in PAGES for command in commands(page)))


def words_of(command):
    return shlex.split(command)


def script_of(command):
    """The script of launch/ that a command starts, and the arguments behind it; None without."""
    words = words_of(command)
    for i, word in enumerate(words):
        if word.startswith("launch/"):
            return word, words[i + 1 :]
    return None, []


def ranks_of(command):
    """How many processes a command starts, on as many nodes as it names."""
    words = words_of(command)

    def value(*flags):
        for flag in flags:
            if flag in words:
                return int(words[words.index(flag) + 1].rpartition(":")[2])
        return 1

    if words[0] == "deepspeed" and "--hostfile" in words:
        return 32  # four nodes of 8 slots
    return value("--nnodes", "--nodes") * value(
        "--num_gpus", "--nproc_per_node", "--ntasks-per-node"
    )
