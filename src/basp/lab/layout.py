"""What a lab is made of, as plain data: names, addresses, rates, and the command lines that make it. Runs nothing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from basp.errors import ConfigError, check_named
from basp.lab.sweep import PREFIX, SWITCH, node_namespace, switch_namespace

BRIDGE = "br0"
LINK = "eth0"
"""A node's own end of its link; the switch's end is ``port(node)``."""
LINK_RATE = "BASP_LINK_RATE"
"""The variable that tells ranks the rate of their links, for the stamp of what they measure."""
DEFAULT_NAME = "lab"

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_SLOWEST, _FASTEST = 10**6, 100 * 10**9
_MOST_NODES = 250  # of one /24 network
_QUEUE = "200ms"
_LEAST_BURST = 128 << 10
_BURST_SECONDS = 0.004


@dataclass(frozen=True)
class Shape:
    """The size of a lab: it lies as text on the bridge itself, so that it is there exactly as long as the lab is."""

    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of all nodes together."""
        return self.nodes * self.ranks_per_node

    def to_text(self) -> str:
        """Without blanks, since it is one word of a command; the kernel keeps up to 255 characters."""
        return json.dumps(vars(self), separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Shape:
        """What ``to_text`` gave."""
        return cls(**json.loads(text))


def check_shape(nodes: int, ranks_per_node: int) -> Shape:
    """Refuse sizes that no lab can have."""
    for what, value, most in (("nodes", nodes, _MOST_NODES), ("ranks per node", ranks_per_node, 1024)):
        if not 1 <= value <= most:
            raise ConfigError(f"{value} {what}", allowed=f"1 to {most}", remedy="choose another number")
    return Shape(nodes, ranks_per_node)


def check_node(node: int, shape: Shape) -> int:
    """Refuse a node that the lab does not have."""
    if not 0 <= node < shape.nodes:
        last = shape.nodes - 1
        raise ConfigError(f"node {node}", allowed=f"0 to {last}", remedy=f"count the {shape.nodes} nodes from 0")
    return node


def check_name(name: str) -> str:
    """Refuse names that could not be part of a namespace's name and of a command line as they are."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", name):
        raise ConfigError(
            f"a lab named {name!r}",
            allowed="up to 32 letters, digits, '-' and '_', the first a letter or digit",
            remedy="choose another name",
        )
    return name


def check_known(name: str, names: list[str]) -> None:
    """Refuse the name of a lab that is not there, with the nearest that is."""
    if not names:
        raise ConfigError(
            f"a lab {name!r}, and no lab is up", allowed="a lab that is up", remedy="start one with 'basp lab up'"
        )
    check_named("a lab", name, names, ConfigError)


def parse_rate(text: str) -> int:
    """Bits per second of "200mbit" or "1.5gbit"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not _SLOWEST <= rate <= _FASTEST:
        raise ConfigError(
            f"a link's rate of {text!r}",
            allowed="1mbit to 100gbit",
            remedy="write a number and its unit, mbit or gbit, as in 200mbit",
        )
    return rate


def rate_text(rate: int) -> str:
    """The shortest text that ``parse_rate`` reads as ``rate``."""
    unit = next((unit for unit in ("gbit", "mbit") if rate >= _UNITS[unit]), "kbit")
    return f"{rate / _UNITS[unit]:g}{unit}"


def lab_of(namespace: str) -> str | None:
    """The name of the lab that a namespace is the switch of; None for any other namespace."""
    if namespace.startswith(PREFIX) and namespace.endswith(SWITCH):
        return namespace[len(PREFIX) : -len(SWITCH)]
    return None


def address(node: int) -> str:
    """Of a node, within its lab alone: labs side by side have the same."""
    return f"10.77.0.{node + 1}"


def port(node: int) -> str:
    """The switch's end of a node's link."""
    return f"port{node}"


def burst_bytes(rate: int) -> int:
    """What a link lets through at once after a pause.

    Packets of one stream are queued in bundles of up to 68 KiB with their headers: with room for fewer than two of them
    the link cannot be kept busy. Faster links need as much as passes until a late timer of a busy machine fires. More
    than needed would let small messages pass as if there were no link.
    """
    return max(_LEAST_BURST, round(rate / 8 * _BURST_SECONDS))


def shaper(device: str, rate: int) -> str:
    """``tc``: limit what leaves by ``device``. Also changes the rate of a link in use, without losing a packet."""
    return f"qdisc replace dev {device} root tbf rate {rate}bit burst {burst_bytes(rate)} latency {_QUEUE}"


def creation(lab: str, shape: Shape) -> list[str]:
    """``ip``: the nodes' namespaces, each with a link to the switch's, which exists.

    Both ends of a link are made where they belong: no interface of a lab is ever in the machine's own namespace.
    """
    nodes = [(node_namespace(lab, node), port(node)) for node in range(shape.nodes)]
    return [f"netns add {namespace}" for namespace, _ in nodes] + [
        f"link add {LINK} netns {namespace} type veth peer name {name} netns {switch_namespace(lab)}"
        for namespace, name in nodes
    ]


def switch_setup(shape: Shape) -> list[str]:
    """``ip`` in the switch's namespace: a bridge over all ports. Its description comes last: then the lab is whole.

    Without automatic addresses (addrgenmode) and snooping an idle lab sends not a byte.
    """
    lines = [
        f"link add {BRIDGE} type bridge mcast_snooping 0",
        f"link set {BRIDGE} addrgenmode none",
        f"link set {BRIDGE} up",
    ]
    for node in range(shape.nodes):
        lines += [f"link set {port(node)} master {BRIDGE} addrgenmode none", f"link set {port(node)} up"]
    return lines


def description(shape: Shape) -> str:
    """``ip`` in the switch's namespace: write the shape onto the bridge."""
    return f"link set {BRIDGE} alias '{shape.to_text()}'"


def node_setup(node: int) -> list[str]:
    """``ip`` in a node's namespace."""
    return [
        "link set lo up",
        f"link set {LINK} addrgenmode none",
        f"addr add {address(node)}/24 dev {LINK}",
        f"link set {LINK} up",
    ]


def rank_environment(rank: int, shape: Shape, *, master_port: int) -> dict[str, str]:
    """What torchrun would tell this rank, and gloo which interface to use."""
    node, local_rank = divmod(rank, shape.ranks_per_node)
    values: dict[str, Any] = {
        "RANK": rank,
        "WORLD_SIZE": shape.ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": shape.ranks_per_node,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": shape.nodes,
        "MASTER_ADDR": address(0),
        "MASTER_PORT": master_port,
        "GLOO_SOCKET_IFNAME": LINK,
    }
    return {name: str(value) for name, value in values.items()}
