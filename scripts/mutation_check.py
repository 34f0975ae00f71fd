"""Plant faults, one at a time, in a copy of the package, and see that named tests notice each.

    python scripts/mutation_check.py            # all, about three minutes on two cores
    python scripts/mutation_check.py loss       # those whose name contains "loss"

Exit code 1 if a fault goes unnoticed, or no longer fits the source.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """A fault in ``file``: ``before`` becomes ``after``; ``test`` must fail."""

    name: str
    file: str
    before: str
    after: str
    test: str


FAULTS = (
    Fault(
        "two rows of a dispatch table swapped",
        "exchange.py",
        "send=Gather(_concatenate([rows for _, rows in sent]),",
        "send=Gather(_concatenate([rows if i else np.roll(rows, 1) for i, (_, rows) in enumerate(sent)]),",
        "tests/parity/test_attend.py::test_kf22_kf23_any_heads_on_any_number_of_ranks",
    ),
    Fault(
        "two rows of a combine table swapped",
        "exchange.py",
        "    index[place] = np.arange(len(place))\n",
        "    index[place] = np.roll(np.arange(len(place)), 1)\n",
        "tests/unit/test_exchange.py::test_calls_of_strategies_read_what_their_tiles_need",
    ),
    Fault(
        "a label dropped at a shard's border",
        "parallel.py",
        "[targets[sequence][start:stop] for",
        "[np.append(targets[sequence][start : stop - 1], IGNORED) for",
        "tests/parity/test_loss.py::test_kf13_kf17_no_label_is_lost_at_a_border_and_positions_are_the_sequences_own",
    ),
    Fault(
        "positions in the slice instead of the sequence",
        "parallel.py",
        "[np.arange(start, stop) for",
        "[np.arange(stop - start) for",
        "tests/parity/test_loss.py::test_kf13_kf17_no_label_is_lost_at_a_border_and_positions_are_the_sequences_own",
    ),
    Fault(
        "the loss's gradient scaled by N",
        "losses.py",
        "ctx.scale = ranks / divisor",
        "ctx.scale = ranks * ranks / divisor",
        "tests/parity/test_loss.py::test_the_worked_example_of_the_docstring",
    ),
    Fault(
        "a mean of means over micro-batches",
        "parallel.py",
        "valid_tokens=step.valid_tokens,",
        "valid_tokens=step.valid_tokens // 2,",
        "tests/parity/test_loss.py::test_kf01_kf03_kf06_every_step_has_the_loss_and_gradient_of_one_process",
    ),
    Fault(
        "key and value gradients of other ranks lost",
        "collectives.py",
        "for rows, places in self.rounds:",
        "for rows, places in self.rounds[1:]:",
        "tests/parity/test_attend.py::test_kf22_kf23_any_heads_on_any_number_of_ranks",
    ),
    Fault(
        "a kv head off by one",
        "exchange.py",
        "kv_index = tuple(head // group - kv_start for",
        "kv_index = tuple((head + 1) // group % (kv_stop - kv_start) for",
        "tests/parity/test_attend.py::test_kf22_kf23_any_heads_on_any_number_of_ranks",
    ),
    Fault(
        "no causal mask",
        "attention/kernels/sdpa.py",
        "is_causal=spec.causal and whole,",
        "is_causal=False,",
        "tests/parity/test_attend.py::test_kf20_kf21_any_length_on_any_number_of_ranks",
    ),
    Fault(
        "values left out of the traffic",
        "plans.py",
        "keys * (head_dim + value_dim)",
        "keys * head_dim",
        "tests/unit/test_plans.py::test_traffic_equals_a_count_by_hand",
    ),
    Fault(
        "own rows counted as sent",
        "collectives.py",
        "    sent[dist.get_rank(route.group)] = 0\n",
        "",
        "tests/parity/test_attend.py::test_kf20_kf21_any_length_on_any_number_of_ranks",
    ),
    Fault(
        "a rank's rows for itself lost between messages",
        "collectives.py",
        "            received.copy_(sent)\n",
        "",
        "tests/parity/test_exchange_in_pairs.py::test_messages_carry_what_the_collective_carries",
    ),
    Fault(
        "a window one token too wide",
        "attention/kernels/masks.py",
        "allowed &= distance < spec.window",
        "allowed &= distance <= spec.window",
        "tests/unit/test_kernels.py::test_equals_plain_loops",
    ),
    Fault(
        "a flash-attn window one key too wide",
        "attention/kernels/flash.py",
        "else spec.window - 1\n",
        "else spec.window\n",
        "tests/unit/test_flash.py::test_what_is_asked_of_them_is_attention_as_the_layer_wants_it",
    ),
    Fault(
        "a block of flex_attention's mask is skipped",
        "attention/kernels/flex.py",
        "some = (farthest >= least) & (nearest <= most)",
        "some = (farthest >= least) & (nearest < most)",
        "tests/unit/test_flex.py::test_blocks_are_those_that_torch_finds_score_by_score",
    ),
    Fault(
        "gradients averaged over some of the ranks",
        "fit.py",
        "others = _averaged_over(model) - {ranks}",
        "others: set[int] = set()",
        "tests/parity/test_sharding.py::test_kf05_averaging_over_some_of_the_ranks_is_refused",
    ),
    Fault(
        "a router loss of each rank's tokens alone",
        "losses.py",
        "sharing = [] if group is None else [group]",
        "sharing = []",
        "tests/parity/test_router_loss.py::test_kf06_router_loss_equals_one_process",
    ),
    Fault(
        "ranks that differ are not noticed",
        "agreement.py",
        "if len(set(values)) > 1:",
        "if len(set(values)) > len(values):",
        "tests/parity/test_agreement.py::test_kf28_kf11_every_rank_names_the_odd_one_and_what_differs",
    ),
    Fault(
        "a copy of the model across nodes",
        "train/sharding.py",
        "    shape = (replicate, ranks // replicate)\n"
        '    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))\n',
        "    shape = (ranks // replicate, replicate)\n"
        '    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_shard", "dp_replicate"))\n',
        "tests/train/test_sharding.py::test_neighbours_share_a_copy",
    ),
    Fault(
        "weights gathered when they are needed",
        "train/sharding.py",
        "layers[index + 1 : index + 1 + count]",
        "layers[index : index + count]",
        "tests/train/test_sharding.py::test_weights_are_on_their_way_before_the_layer_in_front_is_computed",
    ),
    Fault(
        "waiting counted as exchanging",
        "bench/stopwatch.py",
        "        meet()\n",
        "",
        "tests/bench/test_parts.py::test_waiting_for_a_late_rank_is_no_time_of_the_exchange",
    ),
    Fault(
        "bytes within a node counted as across",
        "bench/timing.py",
        "np.asarray(nodes) == nodes[dist.get_rank()]",
        "np.arange(len(nodes)) == dist.get_rank()",
        "tests/bench/test_step.py::test_counted_bytes_are_the_plans_and_none_cross_nodes_with_a_sequence_on_each",
    ),
    Fault(
        "losses compared under AdamW alone",
        "bench/trials.py",
        "for optimizer, losses in trial.losses.items():",
        'for optimizer, losses in [("adamw", trial.losses["adamw"])]:',
        "tests/bench/test_step.py::test_contenders_that_compute_something_else_get_no_time",
    ),
    Fault(
        "neighbouring ranks on different nodes",
        "lab/layout.py",
        "node, local_rank = divmod(rank, shape.ranks_per_node)",
        "local_rank, node = divmod(rank, shape.nodes)",
        "tests/lab/test_layout.py::test_ranks_are_told_their_place_node_by_node",
    ),
)


def notices(fault: Fault) -> bool:
    """Whether the fault's test fails, and not for want of the test, on a copy of the package that has the fault."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "basp"
        shutil.copytree(ROOT / "src" / "basp", package)
        source = package / fault.file
        text = source.read_text(encoding="utf-8")
        if text.count(fault.before) != 1:
            print(
                f"the fault no longer fits {fault.file}: {fault.before!r} stands there {text.count(fault.before)} times"
            )
            return False
        source.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=100", fault.test]
        environment = {**os.environ, "PYTHONPATH": folder}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = run.returncode == 1 and f"FAILED {fault.test}" in run.stdout
    if not failed:
        print(run.stdout[-2000:])
    return failed


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    missed = []
    for fault in FAULTS:
        if wanted in fault.name:
            noticed = notices(fault)
            print(f"{'noticed' if noticed else 'MISSED '}  {fault.name}", flush=True)
            missed += [] if noticed else [fault.name]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
