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

    The border between two owners lies at heads x (share of the tokens before it), rounded to the nearest whole head.
    An exact half goes to the side that begins a kv head, so that a kv head is not sent to two ranks for nothing.

    Args:
        shard_table: [S, 4] with one shard of a sequence for each rank that holds it.
        lengths: tokens of each of the B sequences.
        heads: H.
        kv_heads: K.

    Returns:
        [M, 6] rank, sequence, head_start, head_stop, 0, length. An owner that gets no head has no tile.
    """
    rank, sequence, start, stop = shard_table.T
    size = np.asarray(lengths, dtype=np.int64)[sequence]
    head_start = _round_border(heads * start, size, group=heads // kv_heads)
    head_stop = _round_border(heads * stop, size, group=heads // kv_heads)
    table = np.stack([rank, sequence, head_start, head_stop, np.zeros_like(size), size], axis=1)
    return table[head_start < head_stop]


def _round_border(numerator: Ints, denominator: Ints, *, group: int) -> Ints:
    """``numerator / denominator`` to the nearest integer; a half goes to a multiple of ``group`` beside it, if any."""
    whole, rest = np.divmod(numerator, denominator)
    up = (2 * rest > denominator) | ((2 * rest == denominator) & (whole % group != 0))
    return whole + up
