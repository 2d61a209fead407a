"""What one process writes on a page another never reads in parts, where parts would mislead."""

import os

import pytest

from parallel3d.mesh.pulse.page import Outcome, new_page

pytestmark = pytest.mark.pure

PAGES = 300
OUTCOME = Outcome("rank 0 on node7 died", True, 1)


def first_read(page):
    """What is read first of a page that another process writes at this moment."""
    page.is_watched = True  # the other one waits for it
    while (code := page.left) is None:
        pass
    while (outcome := page.outcome) is None:
        pass
    return code, outcome


def write(pages):
    for page in pages:
        while not page.is_watched:
            pass
        page.leave(3)
        page.end(OUTCOME)


def test_outcome_and_exit_code_are_read_as_written():
    """Seen: a run that ended said "; the run ends", and not which rank had died."""
    pages = []
    for _ in range(PAGES):
        page, descriptor = new_page()
        os.close(descriptor)
        pages.append(page)
    if not (child := os.fork()):
        try:
            write(pages)
        finally:
            os._exit(0)
    try:
        assert {first_read(page) for page in pages} == {(3, OUTCOME)}
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
