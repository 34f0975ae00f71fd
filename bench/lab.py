"""How true the links of an emulated cluster are, and what it costs to have one. Needs root, on Linux.

    python bench/lab.py [--seconds 2] [--rates 50mbit,200mbit,1gbit]

First, plain TCP streams between three nodes, for each rate. ``goodput`` is what arrives, as a share of the link's rate,
over the last three quarters of the time: headers leave 95.6 % of it, and streams that end at one node share its link.
``0>0`` stays within a node. ``counted`` is what the receiving links have counted, as a share of what arrived: a bundle
of packets is counted with one header, so that it is close to 1.

Then, how long it takes to bring a lab of 2 x 4 ranks up and down, and from SIGKILL of a lab's owner, with a process on
every rank, until no namespace and no process is left.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from basp.lab import Cluster, Lab, sweep
from basp.lab.layout import address, parse_rate

STREAMS = ("0>1", "1>0", "0>1,1>0", "0>2,1>2", "0>0")
PORT = 7000


def pairs(streams: str) -> list[tuple[int, int]]:
    """(from, to) of each: "0>1,1>0" is both ways between two nodes."""
    return [(int(pair[0]), int(pair[2])) for pair in streams.split(",")]


# ---- on a rank ----------------------------------------------------------------------------------------------------


def stream(streams: str, seconds: float, folder: str) -> None:
    """This rank's part of the streams; a receiver writes its record to a file."""
    rank, threads = int(os.environ["RANK"]), []
    for number, (source, target) in enumerate(pairs(streams)):
        if target == rank:
            listener = socket.create_server((address(rank), PORT + number))
            threads.append(threading.Thread(target=receive, args=(listener, Path(folder, str(number)))))
        if source == rank:
            threads.append(threading.Thread(target=send, args=((address(target), PORT + number), seconds)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def receive(listener: socket.socket, record: Path) -> None:
    connection, buffer = listener.accept()[0], bytearray(1 << 20)
    arrived, start, marks = 0, time.monotonic(), []
    while got := connection.recv_into(buffer):
        arrived += got
        marks.append((time.monotonic() - start, arrived))
    began, before = next(mark for mark in marks if mark[0] > marks[-1][0] / 4)
    ended, after = marks[-1]
    record.write_text(json.dumps({"rate": 8 * (after - before) / (ended - began), "arrived": arrived}))


def send(place: tuple[str, int], seconds: float) -> None:
    while True:
        try:
            connection = socket.create_connection(place)
            break
        except OSError:
            time.sleep(0.02)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection.sendall(bytes(1 << 18))
    connection.close()


# ---- here -----------------------------------------------------------------------------------------------------------


def measure_links(rates: list[str], seconds: float) -> None:
    print(f"{'rate':>8}  {'streams':<10}  {'goodput':<15}  counted")
    with Cluster(3, 1) as lab:
        for rate in rates:
            lab.set_rate(rate)
            for streams in STREAMS:
                records, counted = run_streams(lab, streams, seconds)
                shares = ", ".join(f"{record['rate'] / parse_rate(rate):.1%}" for record in records)
                ratio = counted / sum(record["arrived"] for record in records)
                print(f"{rate:>8}  {streams:<10}  {shares:<15}  {ratio:.4f}", flush=True)


def run_streams(lab: Lab, streams: str, seconds: float) -> tuple[list[dict[str, float]], int]:
    targets = {target for _, target in pairs(streams)}
    with tempfile.TemporaryDirectory() as folder:
        before = lab.counters()
        code = lab.run([sys.executable, __file__, "--stream", streams, "--seconds", str(seconds), "--folder", folder])
        assert code == 0
        after = lab.counters()
        records = [json.loads(Path(folder, str(number)).read_text()) for number in range(len(pairs(streams)))]
    return records, sum(after[target].received - before[target].received for target in targets)


def measure_lab(repeats: int) -> None:
    up, down, removal = [], [], []
    for _ in range(repeats):
        start = time.monotonic()
        with Cluster(2, 4):
            up.append(time.monotonic() - start)
            start = time.monotonic()
        down.append(time.monotonic() - start)
        removal.append(removal_seconds())
    for what, seconds in (("up, 2 x 4", up), ("down", down), ("owner killed, all gone", removal)):
        figures = (1000 * figure for figure in (statistics.median(seconds), min(seconds), max(seconds)))
        print("{:<24} median {:.0f} ms, min {:.0f}, max {:.0f}".format(what, *figures))


def removal_seconds() -> float:
    name = f"bench-{os.getpid()}"
    owner = subprocess.Popen([sys.executable, __file__, "--own", name])
    while len(ranks := sweep.processes_in(sweep.namespaces_of(name))) < 8:
        time.sleep(0.01)
    start = time.monotonic()
    owner.kill()
    while sweep.namespaces_of(name) or any(map(runs, ranks)):
        time.sleep(0.002)
    owner.wait()
    return time.monotonic() - start


def runs(pid: int) -> bool:
    """Whether it has not ended; one that has may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own(name: str) -> None:
    with Cluster(2, 4, name=name) as lab:
        lab.run(["sleep", "60"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each line of the first table")
    parser.add_argument("--rates", default="50mbit,200mbit,1gbit")
    parser.add_argument("--repeats", type=int, default=10, help="of the second table")
    parser.add_argument("--stream", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--own", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stream:
        stream(given.stream, given.seconds, given.folder)
    elif given.own:
        own(given.own)
    else:
        measure_links(given.rates.split(","), given.seconds)
        measure_lab(given.repeats)


if __name__ == "__main__":
    main()
