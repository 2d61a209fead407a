"""Tests run on the CPU, also where there are GPUs; `pytest -m gpu` runs those that need one."""

import os


def pytest_configure(config):
    # Before anything imports torch: the ranks are forked from a process that has it loaded.
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
