"""Process groups: any subset of ranks in any order, and meshes that average over some dimensions and not others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from basp import SequenceParallel
from basp.attention import attend
from basp.errors import BaspError, BatchError, ConfigError, DisagreementError
from tests.parity.test_attend import Case, run_case
from tests.support import oracle
from tests.support.ranks import run_ranks

Batch = list[list[int]]


def batch_of(lengths: Sequence[int], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, oracle.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def train_step(sp: SequenceParallel, batches: list[Batch], labels: list[Batch] | None = None) -> dict[str, Any]:
    """One optimizer step of a ``TinyLM`` on this rank: its loss, and gradients averaged over ``sp.average_groups``."""
    model = oracle.TinyLM(attend=attend)
    total = torch.zeros((), dtype=torch.float64)
    for step in sp.shard_steps(batches, labels):
        loss = sp.loss(model, step)
        loss.backward()
        total += loss.detach()
    return {"loss": total, "grads": averaged(model, sp.average_groups)}


def averaged(model: torch.nn.Module, groups: Sequence[dist.ProcessGroup]) -> dict[str, Tensor]:
    grads: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for group in groups:
            dist.all_reduce(grad, group=group)
            grad /= dist.get_world_size(group)
        grads[name] = grad
    return grads


def assert_equals_one_process(
    got: dict[str, Any], batches: list[Batch], labels: list[Batch] | None = None, what: str = ""
) -> None:
    """Called on the rank itself, so that no tensor has to leave it."""
    loss, grads = oracle.run_model(oracle.TinyLM(), batches, labels)
    oracle.assert_close(got["loss"], loss, f"{what} loss")
    oracle.assert_same_grads(got["grads"], grads, f"{what} gradient")


# -- subsets and orders ----------------------------------------------------------------------------------------------

TWO_BATCHES = {(1, 3): batch_of((9, 4), 1), (0, 2): batch_of((3, 7, 6), 2)}


def two_groups(rank: int, world: int) -> list[str]:
    made = {ranks: dist.new_group(list(ranks)) for ranks in TWO_BATCHES}
    ((ranks, group),) = [(ranks, group) for ranks, group in made.items() if rank in ranks]
    faults = [x for case in (Case((9, 4)), Case((5,), strategy="ulysses")) for x in run_case(case, group)]
    got = train_step(SequenceParallel(group), [TWO_BATCHES[ranks]])
    assert_equals_one_process(got, [TWO_BATCHES[ranks]], what=f"rank {rank}")
    return faults


def test_two_groups_at_once_each_with_its_own_batch() -> None:
    assert run_ranks(4, two_groups) == [[]] * 4


def reversed_group(rank: int, world: int) -> dict[str, Any] | None:
    group = dist.new_group([3, 1, 0], sort_ranks=False)
    if rank == 2:
        return None
    sp = SequenceParallel(group)
    faults = [
        x
        for case in (Case((9, 4)), Case((1, 1)), Case((8,), heads=7, kv_heads=7, strategy="ulysses"))
        for x in run_case(case, group)
    ]
    step = sp.shard([list(range(9))])
    assert_equals_one_process(train_step(sp, [batch_of((9, 4), 3)]), [batch_of((9, 4), 3)], what=f"rank {rank}")
    return {"faults": faults, "place": sp.rank, "ids": step.input_ids[0].tolist()}


def test_a_group_in_reverse_order_that_leaves_a_rank_out() -> None:
    results = run_ranks(4, reversed_group)
    assert results[2] is None
    for rank, place in ((3, 0), (1, 1), (0, 2)):
        ids = [3 * place, 3 * place + 1, 3 * place + 2]  # the plan's ranks are places in the group
        assert results[rank] == {"faults": [], "place": place, "ids": ids}


def outside(rank: int, world: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        return ""
    with pytest.raises(ConfigError) as refused:
        SequenceParallel(group)
    return str(refused.value)


def test_a_rank_outside_the_group_is_told_so() -> None:
    for message in run_ranks(3, outside)[2:]:
        assert "group" in message


# -- meshes ----------------------------------------------------------------------------------------------------------

MESHES = [
    ((2, 2), ("dp_replicate", "sp")),
    ((2, 2), ("dp_shard", "sp")),
    ((2, 2), ("sp", "dp_shard")),
    ((2, 2, 1), ("dp_replicate", "dp_shard", "sp")),
    ((4, 1), ("dp_shard", "sp")),
    ((1, 4), ("dp_shard", "sp")),
    ((2, 2), ("sp", "tp")),
    ((2, 1, 2), ("dp_shard", "tp", "sp")),
]
# Data-parallel group g reads the g-th: two micro-batches each, with unequal numbers of tokens.
DATA = [
    [batch_of((9, 4), 10), batch_of((2,), 11)],
    [batch_of((1, 1), 12), batch_of((20, 5, 1), 13)],
    [batch_of((3,), 14), batch_of((1,), 15)],
    [batch_of((11,), 16), batch_of((6, 6), 17)],
]


def _place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which data-parallel group this rank is in, and how many there are."""
    place, count = 0, 1
    for name in mesh.mesh_dim_names or ():
        if name.startswith("dp"):
            size = mesh.size(mesh.mesh_dim_names.index(name))  # type: ignore[union-attr]
            place, count = place * size + mesh.get_local_rank(name), count * size
    return place, count


def on_mesh(rank: int, world: int, shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place, count = _place(mesh)
    sp = SequenceParallel(mesh)
    faults = run_case(Case((9, 4), heads=6, kv_heads=3), mesh.get_group("sp"))
    with torch.no_grad():
        model = oracle.TinyLM(attend=attend)
        eval_loss = sum(float(sp.loss(model, step)) for step in sp.shard_steps(DATA[place]))
    everything = [batch for data in DATA[:count] for batch in data]
    got = train_step(sp, DATA[place])
    assert_equals_one_process(got, everything, what=f"rank {rank}")
    assert eval_loss == pytest.approx(got["loss"].item(), rel=1e-12, abs=0)
    return {"faults": faults, "average_ranks": sp.average_ranks}


@pytest.mark.parametrize(("shape", "names"), MESHES, ids=lambda x: "-".join(map(str, x)))
def test_kf04_kf06_loss_is_normalised_over_data_parallel_groups_and_never_over_tp(
    shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    average_ranks = 4 // dict(zip(names, shape, strict=True)).get("tp", 1)
    assert run_ranks(4, on_mesh, shape, names) == [{"faults": [], "average_ranks": average_ranks}] * 4


def refused_meshes(rank: int, world: int) -> list[str]:
    messages: list[str] = []
    for names in (("dp_shard", "tp"), None, ("dp", "sp"), ("cp", "sp")):
        with pytest.raises(ConfigError) as refused:
            SequenceParallel(init_device_mesh("cpu", (1, 2), mesh_dim_names=names))
        messages.append(str(refused.value))
    return messages


def test_kf37_meshes_that_cannot_be_meant_are_refused() -> None:
    for without_sp, without_names, unknown, other in run_ranks(2, refused_meshes):
        assert "'dp_shard', 'tp'" in without_sp
        assert "no names" in without_names
        assert "'dp'" in unknown  # neither averaged over nor known to hold equal data
        assert "'cp'" in other
        for message in (without_sp, without_names, unknown, other):
            assert '"sp"' in message
            assert "init_device_mesh" in message


def unequal_steps(rank: int, world: int) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "sp"))
    sp = SequenceParallel(mesh)
    batches = [[[1, 2, 3]]] * (2 + mesh.get_local_rank("dp_shard"))
    return attempt(sp, batches)


def attempt(sp: SequenceParallel, batches: Any, labels: Any = None) -> tuple[str, str, float]:
    """(kind of error, its message, seconds) of a ``shard_steps`` that must fail."""
    started = time.monotonic()
    try:
        sp.shard_steps(batches, labels)
    except BaspError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "nothing", "", time.monotonic() - started


def test_kf29_data_parallel_groups_with_unequal_numbers_of_micro_batches_raise_everywhere() -> None:
    for kind, message, seconds in run_ranks(4, unequal_steps):
        assert kind == BatchError.__name__
        assert "2 to 3 micro-batches" in message
        assert seconds < 10


def one_of_four_has_more(rank: int, world: int) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    return attempt(SequenceParallel(mesh), [[[1, 2, 3]]] * (3 if rank == 0 else 2))


def test_kf29_every_dimension_hears_of_unequal_micro_batches() -> None:
    for kind, message, seconds in run_ranks(4, one_of_four_has_more, timeout=20):
        assert kind == BatchError.__name__
        assert "2 to 3 micro-batches" in message
        assert seconds < 10


def refuse_in_one_group(rank: int, world: int, how: str) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "sp"))
    sequences = [[1, 2, 3], [4, 5]]
    if rank == 1:
        sequences = [[1, 2, 3], []] if how == "refused" else [[1, 2, 3], [4, 6]]
    return attempt(SequenceParallel(mesh), [sequences])


@pytest.mark.parametrize("how", ["refused", "other"])
def test_kf28_a_bad_batch_in_one_data_parallel_group_raises_in_all_of_them(how: str) -> None:
    results = run_ranks(4, refuse_in_one_group, how, timeout=20)
    assert results[1][0] == (BatchError.__name__ if how == "refused" else DisagreementError.__name__)
    for rank in (0, 2, 3):
        kind, message, seconds = results[rank]
        assert kind == DisagreementError.__name__, f"rank {rank}: {kind}"
        assert message
        assert seconds < 10
