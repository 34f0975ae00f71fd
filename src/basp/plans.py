"""A plan as plain data: who owns which tokens, who computes which attention, and what that moves.

Shape letters: N ranks, B sequences, S shards, M tiles, H query heads, K kv heads, D head dim. No torch here.
"""

# What users pass is checked at run time, whatever it is annotated as:
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from basp.errors import PlanError

Ints = NDArray[np.int64]

MAX_TOKENS = 1 << 27
"""Tokens of one micro-step: keeps query-key pairs x heads, and bytes, within int64."""


class Shard(NamedTuple):
    """Tokens ``start:stop`` of one sequence that a rank owns: embedding, norms, MLP and loss run on them there."""

    sequence: int
    start: int
    stop: int


class Tile(NamedTuple):
    """Attention that a rank computes: these query heads at these query positions, against every key they may see."""

    sequence: int
    head_start: int
    head_stop: int
    query_start: int
    query_stop: int


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """One micro-step's layout over N ranks. Frozen, hashable, checked on construction.

    Held as two integer tables, so that thousands of sequences on a thousand ranks stay cheap; ``shards`` and ``tiles``
    read them rank by rank. Rows are put in canonical order, which is also the order of a rank's packed tokens.

    Args:
        lengths: tokens of each of the B sequences, each at least 1.
        ranks: N.
        heads: H, a multiple of ``kv_heads``.
        kv_heads: K.
        causal: whether a query sees only keys at and before its position.
        shard_table: [S, 4] rank, sequence, start, stop.
        tile_table: [M, 6] rank, sequence, head_start, head_stop, query_start, query_stop.

    Raises:
        PlanError: a size is out of range, shards do not partition all tokens, or tiles do not partition all
            (sequence, query head, query position).
    """

    lengths: tuple[int, ...]
    ranks: int
    heads: int
    kv_heads: int
    causal: bool
    shard_table: Ints
    tile_table: Ints

    def __post_init__(self) -> None:
        check_sizes(self.lengths, ranks=self.ranks, heads=self.heads, kv_heads=self.kv_heads)
        object.__setattr__(self, "lengths", tuple(int(length) for length in self.lengths))
        for name, kind in (("ranks", int), ("heads", int), ("kv_heads", int), ("causal", bool)):
            object.__setattr__(self, name, kind(getattr(self, name)))  # numpy's would have another digest
        object.__setattr__(self, "shard_table", _canonical(self.shard_table, columns=4, order=(0, 1, 2)))
        object.__setattr__(self, "tile_table", _canonical(self.tile_table, columns=6, order=(0, 1, 2, 4)))
        self._check_shards()
        self._check_tiles()

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        heads: int,
        kv_heads: int,
        shards: Sequence[Iterable[Shard]],
        tiles: Sequence[Iterable[Tile]],
        causal: bool = True,
    ) -> Plan:
        """Build a plan by hand: ``shards[rank]`` and ``tiles[rank]``, one entry for each rank.

        Raises:
            PlanError: as the class does, and when ``shards`` and ``tiles`` name different numbers of ranks.
        """
        if len(shards) != len(tiles):
            raise PlanError(
                f"shards for {len(shards)} ranks and tiles for {len(tiles)}",
                allowed="one entry for each rank in both",
                remedy="give a rank without work an empty tuple",
            )
        return cls(
            lengths=tuple(lengths),
            ranks=len(shards),
            heads=heads,
            kv_heads=kv_heads,
            causal=causal,
            shard_table=_table(shards, columns=4),
            tile_table=_table(tiles, columns=6),
        )

    # -- reading ----------------------------------------------------------------------------------------------

    @cached_property
    def shards(self) -> tuple[tuple[Shard, ...], ...]:
        """``shards[rank]``: what each rank owns, in the order of its packed tokens."""
        return tuple(tuple(Shard(*row) for row in rows) for rows in self._rows_by_rank(self.shard_table))

    @cached_property
    def tiles(self) -> tuple[tuple[Tile, ...], ...]:
        """``tiles[rank]``: what attention each rank computes."""
        return tuple(tuple(Tile(*row) for row in rows) for rows in self._rows_by_rank(self.tile_table))

    @cached_property
    def tokens(self) -> Ints:
        """[N] tokens that each rank owns."""
        return self._per_rank(self.shard_table, self.shard_table[:, 3] - self.shard_table[:, 2])

    @cached_property
    def attention_work(self) -> Ints:
        """[N] query-key pairs x query heads that each rank computes."""
        _, sequence, head_start, head_stop, start, stop = self.tile_table.T
        if self.causal:
            pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        else:
            pairs = (stop - start) * np.asarray(self.lengths, dtype=np.int64)[sequence]
        return self._per_rank(self.tile_table, pairs * (head_stop - head_start))

    @cached_property
    def key_stop(self) -> Ints:
        """[M] for each tile the end of the keys it reads: its ``query_stop`` when causal, else the whole sequence."""
        if self.causal:
            return self.tile_table[:, 5]
        return np.asarray(self.lengths, dtype=np.int64)[self.tile_table[:, 1]]

    @cached_property
    def kv_range(self) -> tuple[Ints, Ints]:
        """Two [M] arrays: first and one past the last kv head that each tile's query heads read."""
        group = self.heads // self.kv_heads
        return self.tile_table[:, 2] // group, -(-self.tile_table[:, 3] // group)

    def traffic(self, head_dim: int, itemsize: int, value_head_dim: int | None = None) -> Ints:
        """Bytes ``[src, dst]`` that one attention layer's forward sends; the backward sends the transpose.

        A tile is sent its queries, and the keys and values they may see, by the owners of those tokens, and sends its
        output back. What stays on a rank is not counted: the diagonal is 0.

        Args:
            head_dim: D of queries and keys.
            itemsize: bytes of one element.
            value_head_dim: D of values and outputs where it differs (MLA); ``head_dim`` by default.

        Returns:
            [N, N] int64.
        """
        value_dim = head_dim if value_head_dim is None else value_head_dim
        sent = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        kv_heads = self.kv_range[1] - self.kv_range[0]
        for shard_rows, tile_rows in zip(self.shards_of, self.tiles_of, strict=True):
            owner, _, start, stop = self.shard_table[shard_rows].T
            worker, _, head_start, head_stop, query_start, query_stop = self.tile_table[tile_rows].T
            queries = _overlap(start[:, None], stop[:, None], query_start, query_stop) * (head_stop - head_start)
            keys = _overlap(start[:, None], stop[:, None], 0, self.key_stop[tile_rows]) * kv_heads[tile_rows]
            np.add.at(sent, (owner[:, None], worker), queries * head_dim + keys * (head_dim + value_dim))
            np.add.at(sent, (worker, owner[:, None]), queries * value_dim)
        np.fill_diagonal(sent, 0)
        return sent * itemsize

    @cached_property
    def shards_of(self) -> tuple[Ints, ...]:
        """``shards_of[sequence]``: rows of ``shard_table``, by position in the sequence."""
        return _rows_by_key(self.shard_table[:, 1], self.shard_table[:, 2], len(self.lengths))

    @cached_property
    def owners(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """``owners[sequence]``: (rank, start, stop) of each of its shards, by position in the sequence."""
        table = self.shard_table[np.concatenate(self.shards_of)][:, [0, 2, 3]].tolist()
        ends = np.cumsum([len(rows) for rows in self.shards_of]).tolist()
        return tuple(
            tuple((rank, start, stop) for rank, start, stop in table[end - len(rows) : end])
            for end, rows in zip(ends, self.shards_of, strict=True)
        )

    @cached_property
    def tiles_of(self) -> tuple[Ints, ...]:
        """``tiles_of[sequence]``: rows of ``tile_table``, by rank."""
        return _rows_by_key(self.tile_table[:, 1], self.tile_table[:, 0], len(self.lengths))

    # -- identity ---------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """Hash of the whole plan, equal on every rank and in every process that has the same plan."""
        sizes = (self.ranks, self.heads, self.kv_heads, self.causal, self.lengths)
        state = hashlib.blake2b(repr(sizes).encode(), digest_size=16)
        state.update(self.shard_table.tobytes())
        state.update(b"|")
        state.update(self.tile_table.tobytes())
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return (
            f"Plan({len(self.lengths)} sequences, {sum(self.lengths)} tokens, {self.ranks} ranks, "
            f"{self.heads}/{self.kv_heads} heads, {'causal' if self.causal else 'non-causal'}, {self.digest[:8]})"
        )

    def to_json(self) -> str:
        """The plan as JSON text; ``from_json`` gives an equal plan."""
        return json.dumps(
            {
                "lengths": self.lengths,
                "ranks": self.ranks,
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "causal": self.causal,
                "shard_table": self.shard_table.tolist(),
                "tile_table": self.tile_table.tolist(),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that ``to_json`` wrote, and check it as any other.

        Raises:
            PlanError: the plan breaks an invariant, or the text does not hold a plan.
        """
        try:
            parts: dict[str, Any] = json.loads(text)
            parts["lengths"] = tuple(parts["lengths"])
            return cls(**parts)
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f"text that is not a plan ({error})", allowed="what Plan.to_json wrote", remedy="write it again"
            ) from error

    # -- helpers ----------------------------------------------------------------------------------------------

    def _rows_by_rank(self, table: Ints) -> list[list[list[int]]]:
        borders = np.searchsorted(table[:, 0], np.arange(1, self.ranks))
        return [part[:, 1:].tolist() for part in np.split(table, borders)]

    def _per_rank(self, table: Ints, amounts: Ints) -> Ints:
        total = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(total, table[:, 0], amounts)
        total.setflags(write=False)
        return total

    def _check_shards(self) -> None:
        rank, sequence, start, stop = self.shard_table.T
        self._check_range("shard", rank, sequence)
        fault = _partition_fault(sequence, start, stop, np.asarray(self.lengths, dtype=np.int64))
        if fault is not None:
            raise PlanError(
                f"shards of sequence {fault} leave a gap, overlap or pass its end",
                allowed=f"shards that cover tokens 0:{self.lengths[fault]} once each",
                remedy="correct the strategy that made this plan",
            )

    def _check_tiles(self) -> None:
        rank, sequence, head_start, head_stop, start, stop = self.tile_table.T
        self._check_range("tile", rank, sequence)
        bad = np.flatnonzero((head_start < 0) | (head_stop > self.heads) | (head_start >= head_stop))
        if bad.size:
            raise PlanError(
                f"tile with heads {head_start[bad[0]]}:{head_stop[bad[0]]}",
                allowed=f"a non-empty range of heads within 0:{self.heads}",
                remedy="give a rank without heads no tile",
            )
        # One row for each head of each tile: a rectangle partition becomes the interval partition of the shards.
        counts = head_stop - head_start
        row = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        within = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.repeat(np.asarray(self.lengths, dtype=np.int64), self.heads)
        fault = _partition_fault(sequence[row] * self.heads + head_start[row] + within, start[row], stop[row], sizes)
        if fault is not None:
            raise PlanError(
                f"tiles of sequence {fault // self.heads} at head {fault % self.heads} leave a gap, overlap or pass "
                "its end",
                allowed=f"tiles that cover queries 0:{sizes[fault]} of every head once each",
                remedy="correct the strategy that made this plan",
            )

    def _check_range(self, what: str, rank: Ints, sequence: Ints) -> None:
        for name, values, limit in (("rank", rank, self.ranks), ("sequence", sequence, len(self.lengths))):
            if values.size and (values.min() < 0 or values.max() >= limit):
                wrong = values[(values < 0) | (values >= limit)][0]
                raise PlanError(
                    f"a {what} of {name} {wrong}", allowed=f"{name} 0 to {limit - 1}", remedy="correct the strategy"
                )


def check_sizes(lengths: Sequence[int], *, ranks: int, heads: int, kv_heads: int) -> None:
    """Refuse sizes that no plan can have.

    Raises:
        PlanError: no sequence, a length that is not a whole number from 1, more than ``MAX_TOKENS`` tokens, ranks
            below 1, or heads that are not a multiple of kv heads.
    """
    for name, value in (("ranks", ranks), ("heads", heads), ("kv_heads", kv_heads)):
        if not isinstance(value, int | np.integer):
            raise PlanError(f"{name}={value!r}", allowed="a whole number", remedy="pass an int")
    if ranks < 1:
        raise PlanError(f"{ranks} ranks", allowed="1 or more", remedy="give the size of the process group")
    if len(lengths) == 0:
        raise PlanError("a batch of 0 sequences", allowed="1 or more", remedy="skip empty batches on every rank")
    odd = [length for length in lengths if not isinstance(length, int | np.integer)]
    if odd or sum(map(int, lengths)) > MAX_TOKENS:
        raise PlanError(
            f"a length of {odd[0]!r}" if odd else f"{sum(map(int, lengths))} tokens in all",
            allowed=f"a list of whole numbers, at most {MAX_TOKENS} tokens",
            remedy="give one length for each sequence",
        )
    sizes = np.asarray(lengths)
    short = np.flatnonzero(sizes < 1)
    if short.size:
        raise PlanError(
            f"sequence {short[0]} has {lengths[short[0]]} tokens",
            allowed="1 or more tokens",
            remedy="drop empty documents from the batch",
        )
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise PlanError(
            f"{heads} query heads with {kv_heads} kv heads",
            allowed="query heads that are a multiple of kv heads, both at least 1",
            remedy="take num_attention_heads and num_key_value_heads from the model's config",
        )


def _table(parts: Sequence[Iterable[tuple[int, ...]]], *, columns: int) -> Ints:
    rows = [(rank, *part) for rank, entries in enumerate(parts) for part in entries]
    return np.asarray(rows, dtype=np.int64).reshape(len(rows), columns)


def _canonical(table: ArrayLike, *, columns: int, order: tuple[int, ...]) -> Ints:
    rows = np.asarray(table)
    if rows.ndim != 2 or rows.shape[1] != columns or not np.issubdtype(rows.dtype, np.integer):
        raise PlanError(
            f"a table of shape {rows.shape} and type {rows.dtype}",
            allowed=f"[rows, {columns}] integers",
            remedy="see Plan's docstring",
        )
    rows = rows.astype(np.int64)
    rows = np.ascontiguousarray(rows[np.lexsort(tuple(rows[:, column] for column in reversed(order)))])
    rows.setflags(write=False)
    return rows


def _rows_by_key(keys: Ints, then: Ints, count: int) -> tuple[Ints, ...]:
    order = np.lexsort((then, keys))
    return tuple(np.split(order, np.searchsorted(keys[order], np.arange(1, count))))


def _overlap(start: Ints, stop: Ints, other_start: Ints | int, other_stop: Ints) -> Ints:
    return np.maximum(np.minimum(stop, other_stop) - np.maximum(start, other_start), 0)


def _partition_fault(keys: Ints, starts: Ints, stops: Ints, sizes: Ints) -> int | None:
    """First key whose intervals do not cover ``0:sizes[key]`` once each, or None."""
    order = np.lexsort((starts, keys))
    key, start, stop = keys[order], starts[order], stops[order]
    previous = np.concatenate(([0], stop[:-1]))
    is_first = np.concatenate(([True], key[1:] != key[:-1])) if key.size else np.zeros(0, dtype=bool)
    wrong = (start >= stop) | (start != np.where(is_first, 0, previous))
    if wrong.any():
        return int(key[wrong][0])
    end = np.zeros(len(sizes), dtype=np.int64)
    np.maximum.at(end, key, stop)
    short = np.flatnonzero(end != sizes)
    return int(short[0]) if short.size else None
