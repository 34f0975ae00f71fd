"""Labs in the kernel: what makes, changes and reads them, by way of ``ip`` and ``tc``. There is no state elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from basp.errors import ConfigError, LabError
from basp.lab import layout, sweep
from basp.lab.layout import BRIDGE, LINK, Shape
from basp.lab.sweep import node_namespace, switch_namespace

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Bits of the kernel's capability sets: interfaces, and the namespaces that hold them."""


class Traffic(NamedTuple):
    """Bytes that crossed a node's link since the lab came up, headers included."""

    sent: int
    received: int


def check_able() -> None:
    """Refuse, with what is missing, where no lab can be made.

    Raises:
        LabError: not Linux, a program or a permission is missing.
    """
    if sys.platform != "linux":
        raise LabError(
            f"a lab on {sys.platform}", allowed="Linux", remedy="run it on a Linux machine, or in a container"
        )
    missing = [name for name in ("ip", "tc") if sweep.find_program(name) is None]
    if missing:
        raise LabError(
            f"no program {' or '.join(missing)}", allowed="both ip and tc", remedy="install the package iproute2"
        )
    lacking = lacking_capabilities(Path("/proc/self/status").read_text())
    if lacking:
        raise LabError(
            f"a process without {' and '.join(lacking)}",
            allowed="root, or a process with both CAP_NET_ADMIN and CAP_SYS_ADMIN",
            remedy="use sudo; for a container, add both capabilities",
        )


def lacking_capabilities(status: str) -> list[str]:
    """Those that a lab needs and a process with this /proc/PID/status is without."""
    (effective,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def name_taken(lab: str) -> ConfigError:
    """The refusal of a name that another lab has."""
    return ConfigError(
        f"a second lab {lab!r}",
        allowed="a name that no lab has yet",
        remedy="give another --name, or end that one with 'basp lab down'",
    )


def build(lab: str, shape: Shape, rate: int, mark: str) -> None:
    """Make a lab. Whoever has made the switch's namespace has the name.

    Raises:
        ConfigError: another process has the name.
        LabError: something else went wrong, and a half-made lab is there to be removed.
    """
    try:
        _run("ip", ["netns", "add", switch_namespace(lab)], mark=mark)
    except LabError:
        if lab in lab_names():
            raise name_taken(lab) from None
        raise
    _batch("ip", None, layout.creation(lab, shape), mark=mark)
    _batch("ip", switch_namespace(lab), layout.switch_setup(shape), mark=mark)
    for node in range(shape.nodes):
        _batch("ip", node_namespace(lab, node), layout.node_setup(node), mark=mark)
    shape_links(lab, range(shape.nodes), rate, mark=mark)
    _batch("ip", switch_namespace(lab), [layout.description(shape)], mark=mark)


def shape_links(lab: str, nodes: Iterable[int], rate: int, mark: str | None = None) -> None:
    """Set the rate of these nodes' links: what a node sends, and what the switch sends to it.

    Were only the sending side limited, two nodes could send twice a link's rate to a third.
    """
    for node in nodes:
        _batch("tc", node_namespace(lab, node), [layout.shaper(LINK, rate)], mark=mark)
    _batch("tc", switch_namespace(lab), [layout.shaper(layout.port(node), rate) for node in nodes], mark=mark)


def set_link(lab: str, node: int, *, up: bool) -> None:
    """Plug a node's link into the switch, or pull it out."""
    _batch("ip", switch_namespace(lab), [f"link set {layout.port(node)} {'up' if up else 'down'}"])


def lab_names() -> list[str]:
    """Labs that are there, whole or not, whoever made them."""
    return [lab for name in sweep.all_namespaces() if (lab := layout.lab_of(name)) is not None]


def read_shape(lab: str) -> Shape | None:
    """A lab's size; None while it is being made, or when whoever made it was stopped half-way."""
    try:
        links = _json("ip", switch_namespace(lab), ["link", "show", "dev", BRIDGE])
    except LabError:
        return None
    text = links[0].get("ifalias")
    return None if text is None else Shape.from_text(text)


def read_rates(lab: str, shape: Shape) -> list[int]:
    """Each link's rate in bits per second."""
    disciplines = _json("tc", switch_namespace(lab), ["qdisc", "show"])
    rates = {each["dev"]: 8 * each["options"]["rate"] for each in disciplines if each["kind"] == "tbf"}
    return [rates[layout.port(node)] for node in range(shape.nodes)]


def read_links(lab: str, shape: Shape) -> list[tuple[Traffic, bool]]:
    """Each node's traffic, and whether its link is plugged in; read at the switch, all links at one moment."""
    links = {each["ifname"]: each for each in _json("ip", switch_namespace(lab), ["-statistics", "link", "show"])}
    ports = [links[layout.port(node)] for node in range(shape.nodes)]
    return [
        (Traffic(each["stats64"]["rx"]["bytes"], each["stats64"]["tx"]["bytes"]), "UP" in each["flags"])
        for each in ports
    ]


def _batch(program: str, namespace: str | None, lines: list[str], *, mark: str | None = None) -> None:
    """Many commands in one process of ``ip`` or ``tc``, up to the first that fails."""
    inside = [] if namespace is None else ["-netns", namespace]
    _run(program, [*inside, "-batch", "-"], stdin="\n".join(lines) + "\n", mark=mark)


def _json(program: str, namespace: str, words: list[str]) -> list[Any]:
    return json.loads(_run(program, ["-netns", namespace, "-json", *words]))


def _run(program: str, words: list[str], *, stdin: str = "", mark: str | None = None) -> str:
    path = sweep.find_program(program)
    assert path is not None, "check_able comes first"
    marked = {} if mark is None else {sweep.MARK: mark}
    done = subprocess.run([path, *words], input=stdin, capture_output=True, text=True, env=marked)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise LabError(
            f"'{program} {' '.join(words)}' failed: {said}",
            allowed="what this machine's kernel and iproute2 can do",
            remedy="see 'basp lab list'; 'basp lab down' removes what is left",
        )
    return done.stdout
