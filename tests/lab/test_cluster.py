"""Labs in the kernel. Skipped where no lab can be made, with the reason; CI must run them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from basp.errors import ConfigError, LabError, TrainingError
from basp.lab import Cluster, Lab, Run, find_lab, lab_names, network, remove_lab, start_lab, sweep
from tests.lab import train_rank
from tests.lab.leftovers import leftovers, links, wait_until_gone

pytestmark = pytest.mark.usefixtures("able")

HERE = Path(__file__).parent
MODULES = {"PYTHONPATH": os.pathsep.join(sys.path)}
TINY = [sys.executable, "-S", "-c"]
"""Python that starts in 15 ms."""


@pytest.fixture
def name() -> Iterator[str]:
    """For one lab, of which nothing may be left."""
    name = f"test-{secrets.token_hex(4)}"
    before = links()
    yield name
    wait_until_gone(name, 5)
    assert links() == before


def wait_for(folder: Path, files: int, run: Run | subprocess.Popen[bytes], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while len(list(folder.iterdir())) < files:
        assert time.monotonic() < until
        assert run.poll() is None
        time.sleep(0.02)


@contextlib.contextmanager
def owning(code: str, lab: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs ``code``, killed at the block's end. Whatever it starts has the lab's name in a variable."""
    code = f"import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n{code}"  # a shell's & ignores it
    env = {**os.environ, **MODULES, "TEST_OF_LAB": lab}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as owner:
        try:
            yield owner
        finally:
            owner.kill()


# ---- training over real sockets


def test_two_nodes_train_as_one_process_and_no_attention_leaves_a_node(name: str, tmp_path: Path) -> None:
    with Cluster(2, 2, "1gbit", name) as cluster:
        idle = cluster.counters()
        command = [sys.executable, train_rank.__file__, str(tmp_path)]
        assert cluster.run(command, env=MODULES, timeout=100) == 0
        counters = cluster.counters()
    saw = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert saw[0]["gloo"] == "eth0"

    losses = train_rank.reference_losses()
    assert losses[0] != losses[1]
    for each in saw:
        assert each["trained"]["losses"] == pytest.approx(losses, rel=1e-6)

    # With two sequences on four ranks a group is two ranks, which are a node.
    for rank, each in enumerate(saw):
        for kind in ("trained", "basp"):
            sent = each[kind]["attention"]
            mate = rank ^ 1
            assert sent[mate] > 0
            assert sum(sent) == sent[mate]

    # What the links' own counters say: next to nothing for basp, attention and little else for Ulysses.
    assert [(traffic.sent, traffic.received) for traffic in idle] == [(0, 0), (0, 0)]
    for node, ranks in enumerate(((0, 1), (2, 3))):
        others = (2, 3) if node == 0 else (0, 1)
        counted = sum(saw[rank]["ulysses"]["attention"][other] for rank in ranks for other in others)
        assert counted > 1_000_000
        assert counted < saw[ranks[0]]["ulysses"]["link"] < 1.2 * counted + 100_000
        assert 0 < saw[ranks[0]]["basp"]["link"] < 100_000
        assert counters[node].sent > saw[ranks[0]]["ulysses"]["link"]
        assert counters[node].sent == pytest.approx(counters[1 - node].received, abs=1000)


# ---- ends


def test_after_sigkill_of_a_rank_the_others_end_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    with Cluster(2, 2, name=name) as cluster:
        with cluster.start([sys.executable, str(HERE / "endless_rank.py"), str(tmp_path)], env=MODULES) as run:
            wait_for(tmp_path, 4, run)
            os.kill(run.pids[3], signal.SIGKILL)
            assert run.wait(timeout=60) == 128 + signal.SIGKILL
            assert run.wait(timeout=60) == run.poll() == 128 + signal.SIGKILL
        assert "rank 3 on node 1 was ended by SIGKILL" in run.failures()
        assert cluster.processes() == []
    assert leftovers(name) == []


def test_after_sigkill_of_the_owner_nothing_is_left_within_five_seconds(name: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from basp.lab import Cluster\n"
        f"with Cluster(2, 2, name={name!r}) as cluster:\n"
        f"    cluster.run([sys.executable, {str(HERE / 'endless_rank.py')!r}, {str(tmp_path)!r}])\n"
    )
    with owning(code, name) as owner:
        wait_for(tmp_path, 4, owner)
        assert len(leftovers(name)) == 3 + 2 + 4  # namespaces, owner and watcher, ranks
    wait_until_gone(name, 5)


def test_after_ctrl_c_nothing_is_left(name: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f"echo >{tmp_path}/$RANK; sleep 100"]
    code = f"from basp.lab import Cluster\nwith Cluster(2, 1, name={name!r}) as cluster: cluster.run({command!r})"
    with owning(code, name) as owner:
        wait_for(tmp_path, 2, owner)
        owner.send_signal(signal.SIGINT)
        assert owner.wait(timeout=30) == -signal.SIGINT
        assert leftovers(name) == []  # it has seen to that itself


def test_after_sigkill_of_a_run_in_a_lab_that_is_up_its_ranks_end_and_the_lab_stays(name: str, tmp_path: Path) -> None:
    lab = start_lab(nodes=2, ranks_per_node=1, link="1gbit", name=name)
    try:
        start = (
            f"from basp.lab import find_lab; find_lab({name!r}).run(['sh', '-c', 'echo >{tmp_path}/$RANK; sleep 100'])"
        )
        with lab.start(["sleep", "100"]) as another:
            with owning(start, name) as owner:
                wait_for(tmp_path, 2, owner)
                assert len(lab.processes()) > 4
            until = time.monotonic() + 5
            while len(lab.processes()) > 2:
                assert time.monotonic() < until
            assert another.poll() is None
        assert lab.processes() == []
        assert find_lab(name).shape == lab.shape
    finally:
        remove_lab(name)


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.06, 0.1])
def test_killed_while_it_is_made_a_lab_leaves_nothing(name: str, delay: float) -> None:
    code = (
        "import sys, time; from basp.lab import Cluster\n"
        "print('go', flush=True)\n"
        f"with Cluster(8, 1, name={name!r}) as cluster: time.sleep(100)\n"
    )
    with owning(code, name) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        time.sleep(delay)
    wait_until_gone(name, 5)


def test_what_the_owner_was_just_starting_when_it_was_killed_goes_too(name: str, tmp_path: Path) -> None:
    """Between fork and exec a process carries no mark; here one of the owner's is late by a third of a second."""
    made = tmp_path / "made"
    late = f"sleep 0.3; {sweep.find_program('ip')} netns add {sweep.switch_namespace(name)} && echo >{made}"
    code = f"""
import os, signal, subprocess
from basp.lab.watcher import Watcher
watcher = Watcher("mark of {name}", {name!r})
subprocess.Popen(["sh", "-c", {late!r}], env={{}}, start_new_session=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **MODULES}, check=False)
    until = time.monotonic() + 5
    while not made.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_lab_that_cannot_be_finished_is_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.layout, "node_setup", lambda node: ["link set eth0 no-such-word"])
    with pytest.raises(LabError, match="no-such-word"), Cluster(2, 1, name=name):
        pass
    assert leftovers(name) == []


def test_without_its_watcher_the_owner_still_cleans_up(name: str) -> None:
    with Cluster(2, 1, name=name):
        (watcher,) = (line for line in leftovers(name) if "sweep.py" in line)
        os.kill(int(watcher.partition(":")[0]), signal.SIGKILL)
    assert leftovers(name) == []


def test_an_exception_in_the_block_ends_what_runs(name: str) -> None:
    with pytest.raises(ZeroDivisionError), Cluster(2, 1, name=name) as cluster:  # noqa: PT012
        run = cluster.start(["sleep", "100"])
        _ = 1 / 0
    assert run.poll() not in (None, 0)
    assert leftovers(name) == []


def test_a_lab_removed_by_another_hand_takes_its_ranks_along(name: str) -> None:
    with Cluster(2, 1, name=name) as cluster:
        run = cluster.start(["sleep", "100"])
        remove_lab(name)
        assert run.wait(timeout=30) == 128 + signal.SIGKILL
    assert name not in lab_names()


# ---- ranks: codes, output, environment


@pytest.fixture(scope="module")
def cluster(able: None) -> Iterator[Lab]:
    with Cluster(2, 2, "100mbit") as lab:
        yield lab


def test_rank_0_speaks_and_the_others_are_kept(cluster: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    with cluster.start([*TINY, code]) as run:
        assert run.wait(timeout=30) == 0
    assert capfd.readouterr() == ("out 0\n", "err\n")
    assert [sorted(run.output(rank).splitlines()) for rank in range(4)] == [
        [],
        *(["err", f"out {r}"] for r in (1, 2, 3)),
    ]
    assert run.failures() == ""


def test_all_output_is_shown_with_its_rank(cluster: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    assert cluster.run([*TINY, "print('here')"], timeout=30, show_all=True) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[rank {rank}] here" for rank in range(4)]


def test_the_first_rank_that_fails_ends_the_others(cluster: Lab, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys, time; os.environ['RANK'] == '2' and sys.exit('why it failed'); time.sleep(100)"
    assert cluster.run([*TINY, code], timeout=30) == 1
    assert capfd.readouterr().err == "rank 2 on node 1 ended with exit code 1\n  why it failed\n"
    assert cluster.processes() == []


def test_ranks_that_do_not_listen_are_killed_with_all_their_children(cluster: Lab, tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        f"open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(100)\n"
    )
    with cluster.start([*TINY, code]) as run:
        wait_for(tmp_path, 4, run)
        assert len(cluster.processes()) == 8
    assert cluster.processes() == []


def test_ranks_that_take_too_long_are_ended(cluster: Lab) -> None:
    with pytest.raises(TrainingError, match=r"ranks 0, 1, 2, 3, still running after 0\.2 s"):
        cluster.run(["sleep", "100"], timeout=0.2)
    assert cluster.processes() == []


def test_the_callers_variables_arrive_and_have_the_last_word(cluster: Lab, tmp_path: Path) -> None:
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + '/' + os.environ['RANK'], 'w'))"
    assert cluster.run([*TINY, code, str(tmp_path)], env={"OMP_NUM_THREADS": "3", "MASTER_PORT": "21000"}) == 0
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert {each["BASP_LINK_RATE"] for each in told} == set(cluster.rates())
    assert [(each["LOCAL_RANK"], each["GROUP_RANK"]) for each in told] == [
        ("0", "0"),
        ("1", "0"),
        ("0", "1"),
        ("1", "1"),
    ]
    assert {each["OMP_NUM_THREADS"] for each in told} == {"3"}
    assert {each["MASTER_PORT"] for each in told} == {"21000"}


# ---- links

STREAM = """
import os, socket, sys, time
rank, place = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
senders, size = map(int, sys.argv[1:])
if rank == 0:
    listener = socket.create_server(place)
    connections = [listener.accept()[0] for _ in range(senders)]
    while any([connection.recv(1 << 20) for connection in connections]):
        pass
elif rank <= senders:
    while True:
        try:
            sender = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.01)
    for _ in range(0, size, 10_000):
        sender.sendall(bytes(10_000))
"""
"""``STREAM SENDERS SIZE``: ranks 1 to SENDERS send as many bytes to rank 0."""


def megabits(cluster: Lab, *, settle: float, seconds: float) -> float:
    """What node 0's link lets in, per second, once what was queued before has passed.

    The link's own counter is read: how promptly a busy machine runs the receiver cannot make it more.
    """
    time.sleep(settle)
    start, before = time.monotonic(), cluster.counters()[0].received
    time.sleep(seconds)
    after = cluster.counters()[0].received
    return (after - before) * 8e-6 / (time.monotonic() - start)


def test_rates_change_and_nodes_are_cut_off_while_ranks_run(name: str) -> None:
    with Cluster(2, 1, "100mbit", name) as cluster:
        cluster.start([*TINY, STREAM, "1", f"{10**10}"])
        until = time.monotonic() + 30
        while cluster.counters()[0].received < 2_000_000:
            assert time.monotonic() < until
        assert 25 < megabits(cluster, settle=0.2, seconds=1) < 105
        cluster.set_rate("20mbit", node=1)
        assert cluster.rates() == ["100mbit", "20mbit"]
        assert 5 < megabits(cluster, settle=0.3, seconds=1) < 23
        cluster.set_rate("200mbit")
        cluster.cut(1)
        assert cluster.cut_nodes() == [1]
        before = cluster.counters()[1]
        time.sleep(0.5)
        assert cluster.counters()[1] == before
        cluster.join(1)
        assert cluster.cut_nodes() == []
        assert megabits(cluster, settle=1.5, seconds=1) > 30  # more than it was limited to before
        assert cluster.rates() == ["200mbit", "200mbit"]


def test_within_a_node_nothing_is_limited_and_nothing_counted(name: str) -> None:
    with Cluster(2, 2, "1mbit", name) as cluster:
        # Two minutes and a half of the link's time.
        assert cluster.run([*TINY, STREAM, "1", "20_000_000"], timeout=60) == 0
        assert cluster.counters() == [(0, 0), (0, 0)]


def test_two_senders_share_the_receivers_link(name: str) -> None:
    with Cluster(3, 1, "40mbit", name) as cluster:
        cluster.start([*TINY, STREAM, "2", f"{10**10}"])
        until = time.monotonic() + 30
        while min(traffic.sent for traffic in cluster.counters()[1:]) < 500_000:
            assert time.monotonic() < until
        # Were only senders limited, it would be up to twice as much.
        assert 10 < megabits(cluster, settle=0.2, seconds=1) < 44


# ---- several labs, and what is refused


def test_labs_side_by_side_do_not_meet(name: str) -> None:
    other = f"{name}-node1"  # the name of the other's node is no mistake
    with Cluster(2, 1, "10mbit", name) as one, Cluster(3, 1, "20mbit", other) as two:
        assert {name, other} <= set(lab_names())
        ping = "import os, socket; socket.create_server(('10.77.0.1', 20000)) if os.environ['RANK'] == '0' else 0"
        assert one.run([*TINY, ping]) == two.run([*TINY, ping]) == 0  # the same address in both
        assert (one.rates(), two.rates()) == (["10mbit"] * 2, ["20mbit"] * 3)
        remove_lab(other)
        assert find_lab(name).rates() == ["10mbit"] * 2


def test_nothing_outside_can_be_reached_from_a_lab(cluster: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"import socket; s = socket.socket(); s.settimeout(5); s.connect((ADDRESS, {port}))"
        for address in ("127.0.0.1", "192.0.2.1"):
            assert cluster.run([*TINY, code.replace("ADDRESS", repr(address))]) == 1


def test_a_name_that_is_taken_is_refused_and_the_lab_there_stays(name: str) -> None:
    with Cluster(2, 1, name=name) as cluster:
        with pytest.raises(ConfigError, match=f"a second lab '{name}'"), Cluster(3, 1, name=name):
            pass
        assert cluster.run(["true"]) == 0
        assert find_lab(name).shape == cluster.shape


def test_of_two_who_take_a_name_at_once_the_second_leaves_the_firsts_lab_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = sweep.namespaces_of
    with Cluster(2, 1, name=name) as cluster:
        first_looks = iter([[]])  # the second has looked just before the first was there
        monkeypatch.setattr(sweep, "namespaces_of", lambda lab: next(first_looks, find(lab)))
        with pytest.raises(ConfigError, match=f"a second lab '{name}'"), Cluster(2, 1, name=name):
            pass
        assert cluster.run(["true"]) == 0


def test_a_half_made_lab_is_said_to_be_one_and_can_be_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.layout, "description", lambda shape: "link show")
    with Cluster(1, 1, name=name):
        with pytest.raises(LabError, match="only half made"):
            find_lab(name)
        assert remove_lab(name) == name


@pytest.mark.parametrize("node", [-1, 2])
def test_a_node_that_is_not_there_cannot_be_changed(cluster: Lab, node: int) -> None:
    for change in (cluster.cut, cluster.join, lambda number: cluster.set_rate("1gbit", number)):
        with pytest.raises(ConfigError, match="Allowed: 0 to 1"):
            change(node)


def test_a_command_that_is_not_there_starts_nothing(cluster: Lab) -> None:
    with pytest.raises(ConfigError, match="no command 'no-such-program'"):
        cluster.run(["no-such-program"])
    assert cluster.processes() == []
