"""The plain data that labs are made of. Needs no permission."""

from __future__ import annotations

import subprocess
import sys

import pytest

from basp.errors import ConfigError
from basp.lab import layout, sweep
from basp.lab.layout import Shape
from basp.lab.network import lacking_capabilities
from basp.lab.ranks import _check_command


@pytest.mark.parametrize(
    ("text", "rate", "back"),
    [
        ("200mbit", 200_000_000, "200mbit"),
        ("1gbit", 10**9, "1gbit"),
        ("1.5gbit", 1_500_000_000, "1.5gbit"),
        ("2500mbit", 2_500_000_000, "2.5gbit"),
        (" 50 Mbit".replace(" 50 ", " 50"), 50_000_000, "50mbit"),
        ("1000kbit", 10**6, "1mbit"),
        ("100gbit", 10**11, "100gbit"),
    ],
)
def test_a_rate_is_read_and_written(text: str, rate: int, back: str) -> None:
    assert layout.parse_rate(text) == rate
    assert layout.rate_text(rate) == back
    assert layout.parse_rate(back) == rate


@pytest.mark.parametrize(
    "text", ["", "fast", "200", "200mbps", "-1mbit", "1e3mbit", "0mbit", "999kbit", "101gbit", "1 ; x"]
)
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="as in 200mbit"):
        layout.parse_rate(text)


@pytest.mark.parametrize("name", ["a", "my-lab_2", "A" * 32, "0"])
def test_names_that_are_fit_for_a_namespace(name: str) -> None:
    assert layout.check_name(name) == name
    assert layout.lab_of(sweep.switch_namespace(name)) == name


@pytest.mark.parametrize("name", ["", "-a", "_a", "a b", "a/b", "..", "a;b", "a\n", "ä", "A" * 33, "$(x)"])
def test_names_with_odd_characters_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="choose another name"):
        layout.check_name(name)


def test_a_labs_namespaces_are_told_from_those_of_a_lab_whose_name_begins_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = ["basp-a-node0", "basp-a-node0-node0", "basp-a-node0-switch", "basp-a-node12", "basp-a-switch", "blue"]
    monkeypatch.setattr(sweep, "all_namespaces", lambda: there)
    assert sweep.namespaces_of("a") == ["basp-a-node0", "basp-a-node12", "basp-a-switch"]
    assert sweep.namespaces_of("a-node0") == ["basp-a-node0-node0", "basp-a-node0-switch"]
    assert sweep.namespaces_of("b") == []
    assert [lab for name in there if (lab := layout.lab_of(name))] == ["a-node0", "a"]


def test_both_ends_of_every_link_are_made_where_they_belong() -> None:
    assert layout.creation("x", Shape(2, 4)) == [
        "netns add basp-x-node0",
        "netns add basp-x-node1",
        "link add eth0 netns basp-x-node0 type veth peer name port0 netns basp-x-switch",
        "link add eth0 netns basp-x-node1 type veth peer name port1 netns basp-x-switch",
    ]
    assert "link set port1 master br0 addrgenmode none" in layout.switch_setup(Shape(2, 4))
    assert "addr add 10.77.0.2/24 dev eth0" in layout.node_setup(1)


def test_the_shaper_has_room_for_two_bundles_and_more_on_fast_links() -> None:
    words = "qdisc replace dev eth0 root tbf rate 200000000bit burst 131072 latency 200ms"
    assert layout.shaper("eth0", 200_000_000) == words
    assert layout.burst_bytes(10**9) == 500_000
    assert layout.burst_bytes(10**6) == 128 << 10


@pytest.mark.parametrize("shape", [Shape(2, 4), Shape(250, 1024)])
def test_the_shape_survives_in_the_255_characters_that_the_kernel_keeps(shape: Shape) -> None:
    text = shape.to_text()
    assert Shape.from_text(text) == shape
    assert len(text) < 255
    assert layout.description(shape) == f"link set br0 alias '{text}'"
    assert not set(text) & set(" '\\")


@pytest.mark.parametrize(("nodes", "ranks"), [(0, 1), (251, 1), (1, 0), (-1, 2)])
def test_sizes_that_no_lab_has_are_refused(nodes: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="choose another number"):
        layout.check_shape(nodes, ranks)


@pytest.mark.parametrize("node", [-1, 2])
def test_a_node_that_is_not_there_is_refused(node: int) -> None:
    with pytest.raises(ConfigError, match="Allowed: 0 to 1"):
        layout.check_node(node, Shape(2, 4))


def test_an_unknown_lab_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'training'"):
        layout.check_known("trainign", ["lab", "training"])
    with pytest.raises(ConfigError, match="basp lab up"):
        layout.check_known("lab", [])


def test_ranks_are_told_their_place_node_by_node() -> None:
    told = [layout.rank_environment(rank, Shape(2, 2), master_port=20_001) for rank in range(4)]
    assert [each["RANK"] for each in told] == ["0", "1", "2", "3"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0", "1"]
    assert [each["GROUP_RANK"] for each in told] == ["0", "0", "1", "1"]
    for each in told:
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) == ("4", "2", "2")
        assert (each["MASTER_ADDR"], each["MASTER_PORT"]) == ("10.77.0.1", "20001")
        assert each["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("effective", "lacking"),
    [
        ("000001ffffffffff", []),
        ("0000000000201000", []),
        ("0000000000200000", ["CAP_NET_ADMIN"]),
        ("0000000000001000", ["CAP_SYS_ADMIN"]),
        ("0000000000000000", ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]),
    ],
)
def test_missing_permissions_are_named(effective: str, lacking: list[str]) -> None:
    assert lacking_capabilities(f"Name:\tpython\nCapPrm:\t0\nCapEff:\t{effective}\nSeccomp:\t0\n") == lacking


@pytest.mark.parametrize(("command", "message"), [([], "no command."), (["no-such-program"], "'no-such-program'")])
def test_a_command_that_is_not_there_is_refused(command: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check_command(command, {"PATH": "/usr/bin:/bin"})


def test_labs_load_neither_torch_nor_numpy() -> None:
    code = "import sys, basp.lab; print(sorted({'torch', 'numpy', 'tyro', 'rich', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_the_watchers_program_stands_alone() -> None:
    code = f"import sys; sys.argv = ['x']; exec(open({sweep.__file__!r}).read(), {{'__name__': 'x'}}); print('fine')"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "fine\n", done.stderr
