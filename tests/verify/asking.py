"""Notes who asks torch for GPUs in the process that ranks are forked from; imported there first.

To ask starts CUDA's driver, and the forks of a process that has asked can use no GPU.
"""

import os
import traceback
from functools import wraps

import torch

SERVER = os.getpid()
ASKED = []
TOLD = os.environ.get("DS_ACCELERATOR")  # before anything was imported


def noted(module, name, answer=None):
    """Replace a question of `module` by one that is noted; `answer` is what it says, if given."""
    question = getattr(module, name)

    @wraps(question)
    def asked(*args, **kwargs):
        if os.getpid() == SERVER:
            frames = [f for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
            ASKED.append(f"{name} by {frames[-1].filename}:{frames[-1].lineno}")
        return question(*args, **kwargs) if answer is None else answer

    setattr(module, name, asked)


def listen(available=None, count=None):
    """Note all such questions from now on; answer them as another machine would, if said."""
    noted(torch.cuda, "is_available", available)
    noted(torch.cuda, "device_count", count)
    noted(torch.cuda, "_lazy_init")
    noted(torch.accelerator, "is_available", available)
    noted(torch.accelerator, "device_count", count)


listen()
