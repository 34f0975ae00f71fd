"""What one rank needs to run a plan: integer tables, compiled once per micro-step and head configuration.

A rank's packed tokens fall in runs. A *private* run holds whole sequences whose attention is computed here: it is read
in place and enters no table. The tokens of the other, *shared* runs are packed into rows and exchanged:

    packed rows --gather--> sent, worker by worker --all-to-all--> received --gather--> read call by call

A packed token is its q, k and v heads side by side, cut into rows of ``unit`` elements (the gcd of the query/key and
value dims). A *call* is one batched kernel call: the tiles of a rank that have the same heads, queries and owners lie
side by side, token first, so that what arrives from owners in token order already is ``[tokens, tiles, heads, dim]``.
The second gather is then the identity and is skipped, as it is under ``basp`` and for equal lengths under ``ulysses``.

Shape letters: N ranks, T tokens, H query heads, K kv heads, D head dim. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from basp.plans import Ints, Plan


class Run(NamedTuple):
    """Consecutive packed tokens of a rank: ``batch`` whole sequences of ``length`` tokens, or shared ones (batch 0)."""

    tokens: int
    batch: int
    length: int


class Panel(NamedTuple):
    """Rows that a call reads as one block ``[stop - start, tiles, width]``: q, k and v, or only q, or only k and v."""

    start: int
    stop: int
    queries: bool
    keys: bool


@dataclass(frozen=True)
class Call:
    """One batched kernel call: tiles of a rank that differ in nothing but their sequence.

    Attributes:
        sequences: of the tiles, in the order in which they lie side by side.
        heads: first and one past the last query head.
        kv_heads: first and one past the last kv head that they read.
        queries: first and one past the last query position.
        key_stop: end of the keys; with ``causal``, query i of Tq sees keys up to ``key_stop - Tq + i``.
        owners: (rank, start, stop) of each sequence's shards, in token order.
        kv_index: for each query head its kv head, counted from the first; None where an even grouping says the same.
    """

    sequences: tuple[int, ...]
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    queries: tuple[int, int]
    key_stop: int
    owners: tuple[tuple[int, int, int], ...]
    kv_index: tuple[int, ...] | None

    @property
    def panels(self) -> tuple[Panel, ...]:
        """One block where every key has its query here; else queries, then keys."""
        start, stop = self.queries
        if (start, stop) == (0, self.key_stop):
            return (Panel(start, stop, queries=True, keys=True),)
        return (Panel(start, stop, queries=True, keys=False), Panel(0, self.key_stop, queries=False, keys=True))

    def pieces(self, panel: Panel) -> Iterator[tuple[int, int, int]]:
        """(owner, first, one past the last) of each stretch of the panel's tokens that one owner sends in one go."""
        for owner, shard_start, shard_stop in self.owners:
            first, last = max(panel.start, shard_start), min(panel.stop, shard_stop)
            if first < last:
                yield owner, first, last


@dataclass(frozen=True)
class Gather:
    """``out[i] = rows[index[i]]``; an index of None is the identity. Every input row is read at least once."""

    index: Ints | None
    size: int

    @cached_property
    def transpose(self) -> tuple[Ints, tuple[tuple[Ints, Ints], ...]]:
        """What the gradient of the input reads.

        Returns:
            ``first`` [size], the first output that reads each row, and rounds of (rows, outputs) for rows read again:
            no row appears twice in a round, so adding round by round needs no atomics and always gives the same sum.
        """
        assert self.index is not None
        place = np.arange(len(self.index), dtype=np.int64)
        first = np.empty(self.size, dtype=np.int64)
        first[self.index[::-1]] = place[::-1]  # with repeated rows the last assignment, the lowest place, stays
        rounds: list[tuple[Ints, Ints]] = []
        later = np.flatnonzero(first[self.index] != place)
        latest = first.copy()
        while later.size:
            rows = self.index[later]
            latest[rows[::-1]] = later[::-1]
            now = latest[rows] == later
            rounds.append((rows[now], later[now]))
            later = later[~now]
        return first, tuple(rounds)


@dataclass(frozen=True)
class Route:
    """Gather, all-to-all, gather: rows sent to and received from each rank, and how they are put in order."""

    send: Gather
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    recv: Gather


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a plan for one head configuration.

    Attributes:
        heads: H, and ``kv_heads`` K, ``head_dim`` and ``value_head_dim`` D, of the tensors that it takes.
        unit: elements of a dispatched row.
        runs: how this rank's packed tokens are cut. A rank that owns none runs one dummy token that is in no table.
        calls: this rank's kernel calls on dispatched rows, in the order of those rows.
        dispatch: packed q/k/v rows [T * width, unit] to call-ordered rows; None when no rank sends anything.
        combine: call-ordered output rows to packed output rows [T * H, value_head_dim]; None like ``dispatch``.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    causal: bool
    unit: int
    runs: tuple[Run, ...]
    calls: tuple[Call, ...]
    dispatch: Route | None
    combine: Route | None


def compile_exchange(plan: Plan, rank: int, *, head_dim: int, value_head_dim: int | None = None) -> Exchange:
    """Compile what ``rank`` needs to run ``plan``. Time and memory grow with its own tokens, not with the batch's.

    Args:
        plan: the whole plan, the same on every rank.
        rank: position in the group.
        head_dim: D of queries and keys.
        value_head_dim: D of values where it differs (MLA); ``head_dim`` by default.
    """
    value_dim = head_dim if value_head_dim is None else value_head_dim
    unit = gcd(head_dim, value_dim)
    private = _private_sequences(plan)
    local = _lay_out(plan, rank, private)
    dispatch = combine = None
    calls: tuple[Call, ...] = ()
    if not private.all():
        calls = calls_of(plan, rank, ~private)
        owned = np.zeros_like(private)
        owned[[sequence for sequence, _ in local.base]] = True
        workers = np.unique(plan.tile_table[owned[plan.tile_table[:, 1]], 0]).tolist()
        served = [(worker, call) for worker in workers for call in calls_of(plan, worker, owned)]
        columns = _Columns(plan, qk_units=head_dim // unit, v_units=value_dim // unit)
        dispatch = _dispatch_route(plan.ranks, local, calls, served, columns)
        combine = _combine_route(plan.ranks, local, calls, served, plan.heads)
    return Exchange(
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=head_dim,
        value_head_dim=value_dim,
        causal=plan.causal,
        unit=unit,
        runs=local.runs,
        calls=calls,
        dispatch=dispatch,
        combine=combine,
    )


def calls_of(plan: Plan, rank: int, among: NDArray[np.bool_]) -> tuple[Call, ...]:
    """The kernel calls of ``rank`` on some sequences: tiles that are alike grouped, in order of first appearance.

    Sender and receiver both derive a message's order from the receiver's calls, so they never have to negotiate it. An
    owner may leave out sequences that it holds nothing of: tiles are alike only if all their owners are.

    Args:
        plan: the whole plan.
        rank: whose calls.
        among: [B] the sequences to look at.
    """
    first, last = np.searchsorted(plan.tile_table[:, 0], (rank, rank + 1))
    alike: dict[tuple[object, ...], list[int]] = {}
    tiles: list[list[int]] = plan.tile_table[first:last].tolist()
    for row, (_, sequence, *shape) in enumerate(tiles, start=int(first)):
        if among[sequence]:
            alike.setdefault((*shape, plan.owners[sequence]), []).append(row)
    return tuple(_call(plan, rows) for rows in alike.values())


def _call(plan: Plan, rows: list[int]) -> Call:
    tile: list[int] = plan.tile_table[rows[0]].tolist()
    _, sequence, head_start, head_stop, query_start, query_stop = tile
    kv_start, kv_stop = int(plan.kv_range[0][rows[0]]), int(plan.kv_range[1][rows[0]])
    group = plan.heads // plan.kv_heads
    kv_index = tuple(head // group - kv_start for head in range(head_start, head_stop))
    even_group = (head_stop - head_start) // (kv_stop - kv_start)
    even = tuple(kv_head for kv_head in range(kv_stop - kv_start) for _ in range(even_group))
    return Call(
        sequences=tuple(plan.tile_table[rows, 1].tolist()),
        heads=(head_start, head_stop),
        kv_heads=(kv_start, kv_stop),
        queries=(query_start, query_stop),
        key_stop=int(plan.key_stop[rows[0]]),
        owners=plan.owners[sequence],
        kv_index=None if kv_index == even else kv_index,
    )


class _Columns:
    """Units of a packed token ``[q: H x qk_units][k: K x qk_units][v: K x v_units]`` that a call's panel reads."""

    def __init__(self, plan: Plan, *, qk_units: int, v_units: int) -> None:
        self.qk_units, self.v_units = qk_units, v_units
        self.key_base = plan.heads * qk_units
        self.value_base = self.key_base + plan.kv_heads * qk_units
        self.width = self.value_base + plan.kv_heads * v_units

    def of(self, call: Call, panel: Panel) -> Ints:
        """[panel width] units within one token, for one tile."""
        parts: list[Ints] = []
        if panel.queries:
            parts.append(np.arange(call.heads[0] * self.qk_units, call.heads[1] * self.qk_units))
        if panel.keys:
            first, last = call.kv_heads
            parts.append(self.key_base + np.arange(first * self.qk_units, last * self.qk_units))
            parts.append(self.value_base + np.arange(first * self.v_units, last * self.v_units))
        return np.concatenate(parts)


@dataclass(frozen=True)
class _Local:
    """How one rank's packed tokens lie: its runs, and where the shards that it shares begin.

    ``base[sequence, start]`` counts from the first of the rank's shared tokens, of which there are ``shared_tokens``.
    """

    rank: int
    runs: tuple[Run, ...]
    base: dict[tuple[int, int], int]
    shared_tokens: int

    def rows_of(self, call: Call, panel: Panel, columns: Ints, width: int) -> Iterator[Ints]:
        """Packed rows that this rank has of a call's panel, in the order in which the call wants them.

        Args:
            call: of any rank.
            panel: one of its panels.
            columns: rows within one token that it reads, for one tile.
            width: rows of a packed token.
        """
        for owner, shard_start, shard_stop in call.owners:
            first, last = max(panel.start, shard_start), min(panel.stop, shard_stop)
            if owner == self.rank and first < last:
                tiles = [self.base[sequence, shard_start] * width + columns for sequence in call.sequences]
                token = np.arange(first - shard_start, last - shard_start, dtype=np.int64) * width
                yield (token[:, None] + np.concatenate(tiles)).reshape(-1)


def _dispatch_route(
    ranks: int, local: _Local, calls: tuple[Call, ...], served: list[tuple[int, Call]], columns: _Columns
) -> Route:
    """Owners send each call its panels; rows arrive owner by owner and are wanted call by call."""
    sent = [
        (worker, rows)
        for worker, call in served
        for panel in call.panels
        for rows in local.rows_of(call, panel, columns.of(call, panel), columns.width)
    ]
    wanted = [
        (owner, (last - first) * len(call.sequences) * len(columns.of(call, panel)))
        for call in calls
        for panel in call.panels
        for owner, first, last in call.pieces(panel)
    ]
    by_owner = _Sorted(wanted)
    return Route(
        send=Gather(_concatenate([rows for _, rows in sent]), local.shared_tokens * columns.width),
        send_splits=_splits(ranks, [(worker, len(rows)) for worker, rows in sent]),
        recv_splits=_splits(ranks, wanted),
        recv=Gather(by_owner.sorted_places(), by_owner.total),
    )


def _combine_route(
    ranks: int, local: _Local, calls: tuple[Call, ...], served: list[tuple[int, Call]], heads: int
) -> Route:
    """Calls send each owner its queries' outputs: the queries' dispatch, transposed. A row is one head's output."""
    produced = [
        (owner, (last - first) * len(call.sequences) * (call.heads[1] - call.heads[0]))
        for call in calls
        for owner, first, last in call.pieces(call.panels[0])
    ]
    received = [
        (worker, rows)
        for worker, call in served
        for rows in local.rows_of(call, call.panels[0], np.arange(*call.heads), heads)
    ]
    by_owner = _Sorted(produced)
    place = _concatenate([rows for _, rows in received])  # arrival -> packed output row: a permutation
    index = np.empty_like(place)
    index[place] = np.arange(len(place))
    return Route(
        send=Gather(by_owner.unsorted_places(), by_owner.total),
        send_splits=_splits(ranks, produced),
        recv_splits=_splits(ranks, [(worker, len(rows)) for worker, rows in received]),
        recv=Gather(index, len(place)),
    )


class _Sorted:
    """Pieces of (owner, rows) beside the same pieces sorted by owner, stably; as places of their rows in each order."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        table = np.asarray(pieces, dtype=np.int64).reshape(len(pieces), 2)
        self.rows = table[:, 1]
        self.order = np.argsort(table[:, 0], kind="stable")
        self.total = int(self.rows.sum())

    def sorted_places(self) -> Ints | None:
        """For each row as listed, its place in the sorted order; None if they are the same."""
        start = np.empty_like(self.rows)
        start[self.order] = _starts(self.rows[self.order])
        return self._places(start, self.rows)

    def unsorted_places(self) -> Ints | None:
        """For each row in the sorted order, its place as listed; None if they are the same."""
        return self._places(_starts(self.rows)[self.order], self.rows[self.order])

    def _places(self, start: Ints, rows: Ints) -> Ints | None:
        if (np.diff(self.order) == 1).all():
            return None
        return np.arange(self.total, dtype=np.int64) + np.repeat(start - _starts(rows), rows)


def _lay_out(plan: Plan, rank: int, private: NDArray[np.bool_]) -> _Local:
    first, last = np.searchsorted(plan.shard_table[:, 0], (rank, rank + 1))
    runs: list[Run] = []
    base: dict[tuple[int, int], int] = {}
    shared = 0
    shards: list[list[int]] = plan.shard_table[first:last].tolist()
    for _, sequence, start, stop in shards:
        tokens, length = stop - start, 0
        if private[sequence]:
            if start:
                continue  # its first shard stands for the whole sequence: the others follow it here
            tokens = length = plan.lengths[sequence]
        else:
            base[sequence, start] = shared
            shared += tokens
        if runs and runs[-1].length == length:
            tokens += runs.pop().tokens
        runs.append(Run(tokens, tokens // length if length else 0, length))
    return _Local(rank, tuple(runs) or (Run(1, 1, 1),), base, shared)


def _private_sequences(plan: Plan) -> NDArray[np.bool_]:
    """[B] whether one rank owns all of a sequence's tokens and computes all of its attention."""
    lowest = np.full(len(plan.lengths), plan.ranks, dtype=np.int64)
    highest = np.full(len(plan.lengths), -1, dtype=np.int64)
    for table in (plan.shard_table, plan.tile_table):
        np.minimum.at(lowest, table[:, 1], table[:, 0])
        np.maximum.at(highest, table[:, 1], table[:, 0])
    return lowest == highest


def _splits(ranks: int, pieces: list[tuple[int, int]]) -> tuple[int, ...]:
    total = [0] * ranks
    for rank, rows in pieces:
        total[rank] += rows
    return tuple(total)


def _starts(sizes: Ints) -> Ints:
    return np.cumsum(sizes) - sizes


def _concatenate(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
