"""``basp lab``: its subcommands as options and what runs them. ``basp.cli`` finds and parses them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import tyro

from basp.errors import BaspError, ConfigError
from basp.lab import network
from basp.lab.labs import Cluster, Lab, find_lab, lab_names, remove_all_labs, remove_lab, start_lab
from basp.lab.layout import DEFAULT_NAME, parse_rate, rate_text
from basp.report import bytes_text

_NODES, _RANKS, _LINK = 2, 4, "200mbit"

_Name = Annotated[str, tyro.conf.arg(help="Name of the lab.")]
_Node = Annotated[int, tyro.conf.Positional, tyro.conf.arg(metavar="NODE", help="Number of the node, from 0.")]


@dataclass(frozen=True)
class UpOptions:
    """Make a lab that stays until 'basp lab down'.

    Nodes are network namespaces of this machine, joined by a switch; a node's link limits what it sends and receives.

      basp lab up --nodes 2 --ranks-per-node 4 --link 200mbit
    """

    nodes: int = _NODES
    """Number of nodes."""
    ranks_per_node: int = _RANKS
    """Processes that 'basp lab run' starts on each node."""
    link: str = _LINK
    """Rate of each node's link, each way."""
    name: _Name = DEFAULT_NAME


def _up(options: UpOptions) -> int:
    lab = start_lab(**vars(options))
    shape = lab.shape
    print(f"lab {lab.name!r} is up: {shape.nodes} nodes x {shape.ranks_per_node} ranks, {options.link}")
    return 0


@dataclass(frozen=True)
class RunOptions:
    """Run a command once for each rank, with the environment that torchrun would give it.

    Uses the lab of that --name, or the one that 'basp lab up' has made; if there is none, makes one for this command.
    Shows rank 0's output, and the last lines of a rank that fails, whose exit code is this command's. Then all end.

      basp lab run -- basp train run.toml                                  in the lab that is up
      basp lab run --nodes 2 --ranks-per-node 2 --link 1gbit -- python train.py    in one of its own
    """

    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- COMMAND")] = ()
    """The program and its arguments; no shell."""
    nodes: int | None = None
    """Number of nodes: 2, or those of the lab that is up."""
    ranks_per_node: int | None = None
    """Ranks on each node: 4, or those of the lab that is up."""
    link: str | None = None
    """Rate of each node's link: 200mbit, or that of the lab that is up."""
    name: str | None = None
    """Name of a lab that is up."""
    all: bool = False
    """Show every rank's output, each line with its rank."""
    timeout: float | None = None
    """Seconds after which ranks that still run are ended, and the exit code is 1."""


def _run(options: RunOptions) -> int:
    network.check_able()
    name = options.name or (DEFAULT_NAME if DEFAULT_NAME in lab_names() else None)
    if name is not None:
        lab = find_lab(name)
        _check_same(lab, options)
        return _run_in(lab, options)
    nodes = _NODES if options.nodes is None else options.nodes
    ranks = _RANKS if options.ranks_per_node is None else options.ranks_per_node
    with Cluster(nodes, ranks, options.link or _LINK) as lab:
        return _run_in(lab, options)


def _run_in(lab: Lab, options: RunOptions) -> int:
    return lab.run(options.command, timeout=options.timeout, show_all=options.all)


def _check_same(lab: Lab, options: RunOptions) -> None:
    """Refuse sizes that differ from those of a lab that is up."""
    rates = set(lab.rates())
    for what, wanted, there in (
        ("--nodes", options.nodes, {lab.shape.nodes}),
        ("--ranks-per-node", options.ranks_per_node, {lab.shape.ranks_per_node}),
        ("--link", None if options.link is None else rate_text(parse_rate(options.link)), rates),
    ):
        if wanted is not None and {wanted} != there:
            has = " and ".join(map(str, sorted(there)))
            raise ConfigError(
                f"{what} {wanted} with lab {lab.name!r}, which is up and has {has}",
                allowed=f"{has}, or leave it out",
                remedy="'basp lab down' and then run with these sizes, or 'basp lab up' another with a --name",
            )


@dataclass(frozen=True)
class DownOptions:
    """Kill whatever runs in a lab, and remove it."""

    name: _Name = DEFAULT_NAME
    all: bool = False
    """Every lab on this machine, whoever made it."""


def _down(options: DownOptions) -> int:
    removed = remove_all_labs() if options.all else [remove_lab(options.name)]
    for name in removed:
        print(f"lab {name!r} is removed")
    return 0


@dataclass(frozen=True)
class ListOptions:
    """Show the labs on this machine: size, rates, what runs in them, and the bytes that crossed their links."""


def _list(options: ListOptions) -> int:
    network.check_able()
    rows: list[tuple[str, ...]] = [("NAME", "NODES", "RANKS", "LINK", "CUT", "PROCESSES", "SENT BY NODE")]
    for name in lab_names():
        with suppress(BaspError):  # one that somebody removes meanwhile
            rows.append(_row(name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(name: str) -> tuple[str, ...]:
    if network.read_shape(name) is None:  # it is being made, or that was stopped half-way
        return (name, "half made", "", "", "", "", "")
    lab = find_lab(name)
    rates = lab.rates()
    return (
        name,
        f"{lab.shape.nodes}",
        f"{lab.shape.ranks_per_node} each",
        rates[0] if len(set(rates)) == 1 else ",".join(rates),
        ",".join(map(str, lab.cut_nodes())) or "-",
        f"{len(lab.processes())}",
        ", ".join(bytes_text(traffic.sent) for traffic in lab.counters()),
    )


@dataclass(frozen=True)
class LinkOptions:
    """Change the rate of links, also while ranks run.

    basp lab link 50mbit --node 1
    """

    rate: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RATE")]
    """As in 200mbit, each way."""
    node: int | None = None
    """Number of the node, from 0; all nodes by default."""
    name: _Name = DEFAULT_NAME


def _link(options: LinkOptions) -> int:
    find_lab(options.name).set_rate(options.rate, options.node)
    return 0


@dataclass(frozen=True)
class CutOptions:
    """Pull a node's link out of the switch, also while ranks run: nothing reaches the node or leaves it."""

    node: _Node
    name: _Name = DEFAULT_NAME


def _cut(options: CutOptions) -> int:
    find_lab(options.name).cut(options.node)
    return 0


@dataclass(frozen=True)
class JoinOptions:
    """Plug the link of a node that was cut off in again."""

    node: _Node
    name: _Name = DEFAULT_NAME


def _join(options: JoinOptions) -> int:
    find_lab(options.name).join(options.node)
    return 0


class LabCommand(NamedTuple):
    """A subcommand: one line for the overview, its options, what runs them and returns an exit code."""

    summary: str
    options: type[Any]
    run: Callable[[Any], int]


LAB_COMMANDS: dict[str, LabCommand] = {
    "up": LabCommand("make a lab that stays until it is taken down", UpOptions, _up),
    "run": LabCommand("run a command on every rank, in a lab that is up or in one of its own", RunOptions, _run),
    "down": LabCommand("remove a lab, or all", DownOptions, _down),
    "list": LabCommand("show the labs on this machine", ListOptions, _list),
    "link": LabCommand("change the rate of links", LinkOptions, _link),
    "cut": LabCommand("cut a node off", CutOptions, _cut),
    "join": LabCommand("join a node that was cut off again", JoinOptions, _join),
}
