"""Whether a corpus has the tokenizer that a published model was trained with."""

from pathlib import Path

from parallel3d.base.errors import DataError
from parallel3d.data.tokenizer import encode, load_tokenizer

_SAMPLE = "def main():\n    print('1234', \"naïve\")\n\n The quick fox, in 1999.  \U0001f98a 東京"
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def remark(model: Path, tokenizer: Path, shown: str) -> str:
    """What to say of a corpus' `tokenizer` beside a model's folder; "" where they are the same.

    `shown`: what the user calls the model. They are one if the same ids stand for the same tokens,
    and a sample of text becomes the same ids.
    """
    use = f"set parallel3d.data.tokenizer to {shown}"
    if not any((model / name).is_file() for name in _FILES):
        return f"WARNING: {shown} has no tokenizer: whether data.tokenizer is its own is not known"
    if not any(tokenizer.iterdir()):
        return ""  # token ids alone, whose tokenizer nobody has named
    if all(_bytes(model / name) == _bytes(tokenizer / name) for name in _FILES):
        return ""
    try:
        theirs, ours = load_tokenizer(model), load_tokenizer(tokenizer)
    except DataError as error:
        return f"WARNING: the tokenizer of {shown} cannot be compared ({error})"
    if theirs.get_vocab() != ours.get_vocab() or (
        encode(theirs, [_SAMPLE]) != encode(ours, [_SAMPLE])
    ):
        return (
            f"WARNING: data.tokenizer is not the one of {shown}: the model takes the ids for other "
            f"tokens than they are; {use}, unless that is what you want"
        )
    return ""


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
