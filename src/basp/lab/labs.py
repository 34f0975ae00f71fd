"""Labs as users hold them: one that is up, and one that lasts as long as a block."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from basp.errors import ConfigError, LabError
from basp.lab import network, sweep
from basp.lab.layout import (
    LINK_RATE,
    Shape,
    check_known,
    check_name,
    check_node,
    check_shape,
    parse_rate,
    rate_text,
)
from basp.lab.network import Traffic
from basp.lab.ranks import Run
from basp.lab.watcher import Watcher


class Lab:
    """A lab that is up. ``find_lab`` gives one by name, ``Cluster`` makes one for a block.

    Attributes:
        name: part of its namespaces' names, ``basp-NAME-node0`` and so on.
        shape: its ``nodes`` and ``ranks_per_node``.
    """

    def __init__(self, name: str, shape: Shape, *, mark: str | None = None) -> None:
        self.name, self.shape = name, shape
        self._owner, self._runs = mark, list[Run]()

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, show_all: bool = False) -> Run:
        """Start ``command`` on every rank, each told its place as torchrun tells it, and do not wait for it.

        Args:
            command: the program and its arguments.
            env: variables beside this process's own, torchrun's, and BASP_LINK_RATE: the links' rate at the start.
            show_all: show every rank's output, each line with its rank; otherwise rank 0's alone.

        Raises:
            ConfigError: there is no such program.
        """
        told = {LINK_RATE: ",".join(dict.fromkeys(self.rates())), **(env or {})}
        mark = f"{self._owner or ''}-{secrets.token_hex(8)}"
        owned = self._owner is not None  # then the lab's watcher ends its runs as well
        run = Run(self.name, self.shape, command, env=told, show_all=show_all, mark=mark, watched=not owned)
        self._runs.append(run)
        return run

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        show_all: bool = False,
    ) -> int:
        """Run ``command`` on every rank, as ``start`` does, until all have ended or the first has failed.

        Returns:
            0, or the code of the first rank that failed, whose last lines go to stderr; 128 + the signal that ended it.

        Raises:
            TrainingError: ranks still ran after ``timeout`` seconds; they have been ended.
        """
        run = self.start(command, env=env, show_all=show_all)
        code = run.wait(timeout)
        if code:
            print(run.failures(), end="", file=sys.stderr, flush=True)
        return code

    def set_rate(self, rate: str, node: int | None = None) -> None:
        """Change the rate of one node's link, or of all, both ways, also while ranks run."""
        nodes = range(self.shape.nodes) if node is None else [check_node(node, self.shape)]
        network.shape_links(self.name, nodes, parse_rate(rate))

    def rates(self) -> list[str]:
        """Each link's rate, by node."""
        return [rate_text(rate) for rate in network.read_rates(self.name, self.shape)]

    def cut(self, node: int) -> None:
        """Pull a node's link out of the switch: nothing reaches it or leaves it, and nobody is told."""
        network.set_link(self.name, check_node(node, self.shape), up=False)

    def join(self, node: int) -> None:
        """Plug a node's link in again."""
        network.set_link(self.name, check_node(node, self.shape), up=True)

    def cut_nodes(self) -> list[int]:
        """Nodes whose link is pulled out."""
        return [node for node, (_, up) in enumerate(network.read_links(self.name, self.shape)) if not up]

    def counters(self) -> list[Traffic]:
        """Bytes that each node has sent and received over its link since the lab came up."""
        return [traffic for traffic, _ in network.read_links(self.name, self.shape)]

    def processes(self) -> list[int]:
        """Pids of whatever runs in its nodes."""
        return sweep.processes_in(sweep.namespaces_of(self.name))

    def close(self) -> None:
        """End the runs that were started by way of this object."""
        for run in self._runs:
            run.stop()


class Cluster:
    """A lab for as long as a block lasts, or until this process ends, however it ends.

    >>> with Cluster(nodes=2, ranks_per_node=4, link="200mbit") as cluster:
    ...     code = cluster.run([sys.executable, "train.py"])

    Args:
        nodes: network namespaces, joined by a switch.
        ranks_per_node: processes that ``run`` starts in each; they reach each other at memory speed.
        link: rate of each node's link, each way.
        name: a name of your own, that no other lab has.
    """

    def __init__(self, nodes: int = 2, ranks_per_node: int = 4, link: str = "200mbit", name: str | None = None) -> None:
        self._shape, self._rate = check_shape(nodes, ranks_per_node), parse_rate(link)
        self._name = secrets.token_hex(4) if name is None else check_name(name)

    def __enter__(self) -> Lab:
        mark = secrets.token_hex(8)
        self._watcher = _make(self._name, self._shape, self._rate, mark)
        self._lab = Lab(self._name, self._shape, mark=mark)
        return self._lab

    def __exit__(self, *_: Any) -> None:
        self._lab.close()
        _remove(self._name)
        self._watcher.dismiss()


def start_lab(*, nodes: int, ranks_per_node: int, link: str, name: str) -> Lab:
    """Make a lab that stays, whatever becomes of this process, until ``remove_lab``."""
    shape, rate = check_shape(nodes, ranks_per_node), parse_rate(link)
    _make(check_name(name), shape, rate, secrets.token_hex(8)).dismiss()
    return Lab(name, shape)


def find_lab(name: str) -> Lab:
    """The lab of this name, whoever made it.

    Raises:
        ConfigError: there is none.
        LabError: there is one, but it is half made.
    """
    network.check_able()
    check_known(name, network.lab_names())
    shape = network.read_shape(name)
    if shape is None:
        raise LabError(
            f"lab {name!r}, which is only half made",
            allowed="a lab that is up",
            remedy="wait if somebody is making it; otherwise remove it with 'basp lab down'",
        )
    return Lab(name, shape)


def lab_names() -> list[str]:
    """Names of all labs on this machine, half made ones too."""
    return network.lab_names()


def remove_lab(name: str) -> str:
    """Kill whatever runs in a lab, and remove it; returns its name.

    Raises:
        ConfigError: there is no lab of this name.
        LabError: something of it is left.
    """
    network.check_able()
    check_known(name, network.lab_names())
    _remove(name)
    return name


def remove_all_labs() -> list[str]:
    """Remove every lab on this machine, whoever made it; returns their names."""
    network.check_able()
    names = network.lab_names()
    for name in names:
        _remove(name)
    return names


def _make(name: str, shape: Shape, rate: int, mark: str) -> Watcher:
    """Bring a lab up, under a watcher that is there before anything that it may have to remove."""
    network.check_able()
    if sweep.namespaces_of(name):
        raise network.name_taken(name)
    watcher = Watcher(mark, name)
    try:
        network.build(name, shape, rate, mark)
    except ConfigError:  # another process has just taken the name: what is there now is not ours to remove
        watcher.dismiss()
        raise
    except BaseException:
        _remove(name, mark)
        watcher.dismiss()
        raise
    return watcher


def _remove(name: str, mark: str | None = None) -> None:
    if not sweep.remove(name, mark):
        raise LabError(
            f"lab {name!r} with something left of it: {', '.join(sweep.namespaces_of(name))}",
            allowed="a lab whose processes can be killed",
            remedy="look at what 'ip netns pids' finds there, then repeat 'basp lab down'",
        )
