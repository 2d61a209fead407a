"""Best-fit packing written a second time, from its definition: plain loops over documents."""

from collections.abc import Sequence


def pack(ids: Sequence[int], end: int, length: int) -> list[list[int]]:
    """Return the place of each token of the packed samples of a stream; -1 is padding.

    Documents end with `end`; those longer than a sample are cut. The longest piece is first; each
    goes into the sample with the least room that holds it, of several the one filled last. The last
    id of the stream has no label, so it is no token.
    """
    pieces = list[range]()
    first = 0
    for place in range(len(ids) - 1):
        if ids[place] == end or place == len(ids) - 2 or place == first + length - 1:
            pieces.append(range(first, place + 1))
            first = place + 1
    samples = list[list[range]]()
    turns = list[int]()
    for turn, piece in enumerate(sorted(pieces, key=len, reverse=True)):
        rooms = [length - sum(map(len, sample)) for sample in samples]
        fitting = [n for n, room in enumerate(rooms) if room >= len(piece)]
        if not fitting:
            fitting = [len(samples)]
            samples.append([])
            rooms.append(length)
            turns.append(turn)
        best = min(fitting, key=lambda n: (rooms[n], -turns[n]))
        samples[best].append(piece)
        turns[best] = turn
    rows = []
    for sample in samples:
        row = [place for piece in sorted(sample, key=min) for place in piece]
        rows.append(row + [-1] * (length - len(row)))
    return rows
