"""Suggestions: what a key that is no setting may have meant."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from parallel3d.base.section import Problem

_TYPO = 0.8  # as alike as a word and its misspelling; below that, the same word elsewhere is nearer
_SWAPPED = 0.75  # a word of four letters, two of them swapped
_OURS = "parallel3d."


def unknown(
    path: str,
    value: object,
    *,
    known: Sequence[str],
    refused: Iterable[str],
    listed: Mapping[str, str],
) -> Problem:
    """The problem with a key at `path`, whose block has the settings `known`.

    `refused` are keys that the block refuses by name. `listed` has every setting of the file by its
    path, and which choice alone has it (`family "gpt"`; "" if all have).
    """
    key = path.rpartition(".")[2].lower()
    here = f"this block has: {', '.join(known)}" if known else "remove it"
    if only := listed.get(path):
        return Problem(path, value, f"is a setting of {only} alone", f"remove it; {here}")
    names = [*known, *refused]
    if near := get_close_matches(key, names, n=1, cutoff=_TYPO):
        return Problem(path, value, "is no setting", f'the nearest one is "{near[0]}"')
    if meant := _elsewhere(path, key, listed) or _block_of_ours(path, listed):
        return Problem(path, value, "is no setting here", f"did you mean {meant}?")
    if near := get_close_matches(key, names, n=1):
        return Problem(path, value, "is no setting", f'the nearest one is "{near[0]}"')
    return Problem(path, value, "is no setting", here)


def _elsewhere(path: str, key: str, listed: Iterable[str]) -> str:
    """The setting or block of that name in another place, the outermost first; "" if none is."""
    places = {place for setting in listed for place in _with_blocks(setting)}
    same = [p for p in places if p.rpartition(".")[2] == key and p != path]
    if not same:
        return ""
    meant = min(same, key=lambda p: (not p.startswith(_OURS), p.count("."), p))
    outside = path.startswith(_OURS) and not meant.startswith(_OURS)
    return f'{meant}, outside the block "parallel3d"' if outside else meant


def _block_of_ours(path: str, listed: Iterable[str]) -> str:
    """The block of parallel3d's that a misspelled key at the top of the file means; "" if none."""
    names = {setting.split(".")[1] for setting in listed if setting.startswith(_OURS)}
    near = get_close_matches(path.lower(), sorted(names), n=1, cutoff=_SWAPPED)
    return _OURS + near[0] if near else ""


def _with_blocks(path: str) -> Iterable[str]:
    parts = path.split(".")
    return (".".join(parts[:n]) for n in range(1, len(parts) + 1))
