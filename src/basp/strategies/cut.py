"""What strategies share: cutting a line of tokens into slices, and sharing a sequence's heads among its owners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from basp.plans import Ints


def cut_stream(lengths: Sequence[int], *, ranks: int) -> Ints:
    """Lay the sequences end to end and cut the line into N slices that differ by at most one token.

    Rank r owns tokens ``floor(r T / N)`` to ``floor((r + 1) T / N)`` of the T in all.

    Returns:
        [S, 4] rank, sequence, start, stop.
    """
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    slice_ends = np.arange(1, ranks + 1, dtype=np.int64) * ends[-1] // ranks
    cuts = np.unique(np.concatenate(([0], ends, slice_ends)))
    starts, stops = cuts[:-1], cuts[1:]
    sequence = np.searchsorted(ends, starts, side="right")
    rank = np.searchsorted(slice_ends, starts, side="right")
    offset = (ends - np.asarray(lengths, dtype=np.int64))[sequence]
    return np.stack([rank, sequence, starts - offset, stops - offset], axis=1)


def cut_each(lengths: Sequence[int], *, ranks: int) -> Ints:
    """Cut every sequence on its own into N slices: ``cut_stream`` of each alone.

    Returns:
        [S, 4] rank, sequence, start, stop. Slices that hold no token are left out.
    """
    size = np.asarray(lengths, dtype=np.int64)[:, None]
    borders = np.arange(ranks + 1, dtype=np.int64) * size // ranks  # [B, N + 1]
    starts, stops = borders[:, :-1], borders[:, 1:]
    sequence, rank = np.nonzero(starts < stops)
    return np.stack([rank, sequence, starts[sequence, rank], stops[sequence, rank]], axis=1)


def share_heads(shard_table: Ints, lengths: Sequence[int], *, heads: int, kv_heads: int) -> Ints:
    """Give a sequence's query heads to the ranks that hold it, in proportion to the tokens that they hold.

    An owner's number of heads is its share, rounded so that shares add up: within one of exact, and exact where that is
    whole. Owners whose number is a multiple of the heads that read one kv head come first, in rank order, so that
    they begin at a kv head and fetch none that another rank fetches as well; the others follow in rank order.

    Args:
        shard_table: [S, 4] with one shard of a sequence for each rank that holds it.
        lengths: tokens of each of the B sequences.
        heads: H.
        kv_heads: K.

    Returns:
        [M, 6] rank, sequence, head_start, head_stop, 0, length. An owner that gets no head has no tile.
    """
    _, sequence, start, stop = shard_table.T
    size = np.asarray(lengths, dtype=np.int64)[sequence]
    number = _nearest(heads * stop, size) - _nearest(heads * start, size)
    order = np.lexsort((start, number % (heads // kv_heads) != 0, sequence))
    rank, sequence, number, size = shard_table[order, 0], sequence[order], number[order], size[order]
    head_stop = np.cumsum(number) - heads * sequence  # every sequence before this one has given away all its heads
    table = np.stack([rank, sequence, head_stop - number, head_stop, np.zeros_like(size), size], axis=1)
    return table[number > 0]


def _nearest(numerator: Ints, denominator: Ints) -> Ints:
    """``numerator / denominator`` to the nearest integer, a half up."""
    return (2 * numerator + denominator) // (2 * denominator)
