"""What a preparation prints of its progress where there is no terminal."""

import pytest

from parallel3d.data.prepare_progress import shown_progress

pytestmark = pytest.mark.gloo


def test_end_of_a_phase_is_printed_once(capsys):
    """Its unit may be coarse, so that many small files are read at the last megabyte."""
    with shown_progress() as progress:
        for done in (0, 1):
            progress("training the tokenizer", done, 1)
        for done in (0, 5, 11, 11, 11):
            progress("reading files (MB)", done, 11)
    assert capsys.readouterr().err.splitlines() == [
        "training the tokenizer",
        "reading files (MB): 0 of 11",
        "reading files (MB): 11 of 11",
    ]
