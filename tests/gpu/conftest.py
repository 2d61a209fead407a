"""Prints what was measured, as a table that docs/gpu.md can hold."""

import sys


def pytest_terminal_summary(terminalreporter):
    here = sys.modules.get("tests.gpu.here")  # it loads torch, which other tiers do without
    if here is None or not here.REPORT:
        return
    import torch

    device = torch.cuda.get_device_name() if here.COUNT else "CPU"
    terminalreporter.section(f"measured on {here.COUNT or 'no'} GPUs ({device})")
    terminalreporter.line(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
    width = max(len(label) for label, _ in here.REPORT)
    for label, value in here.REPORT:
        terminalreporter.line(f"{label:{width}}  {value}")
