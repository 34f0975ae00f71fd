"""``basp lab`` as a user types it, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from basp.cli import main
from basp.errors import LabError
from basp.lab import command, network, sweep

Basp = Callable[..., subprocess.CompletedProcess[str]]


def said(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    return done.returncode, done.stdout, done.stderr


# ---- no lab is made


def test_help_lists_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: basp lab COMMAND [OPTIONS]\n")
    for name, each in command.LAB_COMMANDS.items():
        assert f"  {name}" in out
        assert each.summary in out
    assert main(["lab", "run", "--help"]) == 0
    assert "-- COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "use 'run', the nearest"),
        (["up", "--link", "fast"], "a link's rate of 'fast'. Allowed: 1mbit to 100gbit"),
        (["up", "--nodes", "0"], "0 nodes. Allowed: 1 to 250"),
        (["up", "--name", "a b"], "a lab named 'a b'"),
        (["down", "--", "true"], "'basp lab down' with a command"),
        (["cut"], "NODE"),
    ],
)
def test_bad_input_exits_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_follows_the_dashes_is_the_command_letter_for_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[command.RunOptions] = []
    monkeypatch.setitem(
        command.LAB_COMMANDS, "run", command.LAB_COMMANDS["run"]._replace(run=lambda o: got.append(o) or 0)
    )
    words = ["sh", "-c", "a_b", "--", "--nodes", "7", "--a_b", "-h"]
    assert main(["lab", "run", "--nodes", "3", "--", *words]) == 0
    assert (got[0].command, got[0].nodes, got[0].link) == (tuple(words), 3, None)


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["list"], "a process without CAP_NET_ADMIN and CAP_SYS_ADMIN. Allowed: root"),
        (["up"], "use sudo"),
        (["run", "--", "true"], "use sudo"),
        (["down", "--all"], "use sudo"),
    ],
)
def test_without_permission_it_says_so(
    words: list[str], seen: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]
    monkeypatch.setattr(network, "lacking_capabilities", lambda status: lacking)
    monkeypatch.setattr(sweep, "find_program", lambda name: f"/sbin/{name}")
    assert main(["lab", *words]) == 2
    assert seen in capsys.readouterr().err


def test_without_linux_or_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "find_program", lambda name: None)
    with pytest.raises(LabError, match=r"no program ip or tc\. .*iproute2"):
        network.check_able()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(LabError, match="a lab on darwin"):
        network.check_able()


# ---- labs that are made


def test_a_lab_is_up_from_one_command_to_the_next(basp: Basp) -> None:
    assert said(basp("lab", "up", "--ranks-per-node", "2")) == (0, "lab 'lab' is up: 2 nodes x 2 ranks, 200mbit\n", "")
    assert basp("lab", "up").returncode == 2

    done = basp("lab", "run", "--", "sh", "-c", "echo I am $RANK; exit $((RANK == 3 ? 7 : 0))")
    assert said(done) == (7, "I am 0\n", "rank 3 on node 1 ended with exit code 7\n  I am 3\n")
    for words, message in (
        (("--nodes", "3"), "--nodes 3 with lab 'lab', which is up and has 2"),
        (("--link", "1gbit"), "--link 1gbit with lab 'lab', which is up and has 200mbit"),
        (("--name", "lob"), "did you mean 'lab'?"),
    ):
        done = basp("lab", "run", *words, "--", "true")
        assert done.returncode == 2
        assert message in done.stderr

    assert basp("lab", "link", "50mbit", "--node", "1").returncode == 0
    assert basp("lab", "cut", "1").returncode == 0
    line = basp("lab", "list").stdout.splitlines()[1]
    assert line.split() == ["lab", "2", "2", "each", "200mbit,50mbit", "1", "0", "0", "B,", "0", "B"]
    assert basp("lab", "join", "1").returncode == 0

    assert said(basp("lab", "down")) == (0, "lab 'lab' is removed\n", "")
    done = basp("lab", "down")
    assert done.returncode == 2
    assert "no lab is up" in done.stderr


def test_down_all_removes_every_lab(basp: Basp) -> None:
    for name in ("one", "two"):
        assert basp("lab", "up", "--nodes", "1", "--name", name).returncode == 0
    assert len(basp("lab", "list").stdout.splitlines()) == 3
    assert said(basp("lab", "down", "--all")) == (0, "lab 'one' is removed\nlab 'two' is removed\n", "")
    assert len(basp("lab", "list").stdout.splitlines()) == 1


def test_run_without_a_lab_makes_one_that_goes_with_it(basp: Basp) -> None:
    words = ("--nodes", "3", "--ranks-per-node", "1", "--link", "1gbit")
    done = basp("lab", "run", *words, "--all", "--", "sh", "-c", "echo $WORLD_SIZE")
    assert done.returncode == 0
    assert done.stdout.count("] 3\n") == 3
    assert len(basp("lab", "list").stdout.splitlines()) == 1
    assert basp("lab", "run", "--timeout", "0.1", "--", "sleep", "100").returncode == 1
