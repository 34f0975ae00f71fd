"""Options of a run, each changing what it says and nothing else: dtypes, recomputation, sources, models, compile."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from basp.ranks import Place
from basp.train.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from basp.train.loop import Trainer, train_rank
from basp.train.run_dir import RunDir
from tests.support.ranks import run_ranks
from tests.train.running import ONE_LAYER, WORDS, Outcome, flags, read_records, trained, write_documents

pytestmark = pytest.mark.timeout(180)


class Plain:
    """The same documents in each format, and a run of two steps on them that others are compared with."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.folder, self.source = folder, folder / "documents"
        texts = write_documents(self.source)
        self.jsonl = folder / "lines.jsonl"
        self.jsonl.write_text("\n".join(json.dumps({"id": i, "body": text}) for i, text in enumerate(texts)))
        self.parquet = folder / "rows.parquet"
        pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), self.parquet)
        self.run = trained(flags(self.source, folder / "plain"))
        self.checkpoint = self.run.run_dir / "model"

    @functools.cached_property
    def continued(self) -> Outcome:
        """Two more steps from its checkpoint, in float64. (A random start draws other numbers in each dtype.)"""
        return self.trained("continued", model__path=self.checkpoint)

    def trained(self, name: str, model: dict[str, Any] | None = None, **changes: Any) -> Outcome:
        words = flags(changes.pop("source", self.source), self.folder / name, model, **changes)
        return trained(words)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    return Plain(tmp_path_factory.mktemp("options"))


def reloaded(run: Outcome) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(run.run_dir / "model")


def test_jsonl_with_gradient_checkpointing_trains_alike(plain: Plain) -> None:
    run = plain.trained("jsonl", source=plain.jsonl, data__text_field="body", model__gradient_checkpointing=True)
    assert run.column("tokens") == plain.run.column("tokens")
    assert run.column("loss") == pytest.approx(plain.run.column("loss"), rel=1e-8)
    assert run.column("grad_norm") == pytest.approx(plain.run.column("grad_norm"), rel=1e-7)
    # Recomputation is a second forward's exchange: 3 instead of 2.
    for mine, others in zip(run.column("bytes_per_rank"), plain.run.column("bytes_per_rank"), strict=True):
        assert mine == others * 3 / 2


def test_another_kernel_trains_alike(plain: Plain) -> None:
    run = plain.trained("eager", model__kernel="eager")
    assert run.column("loss") == pytest.approx(plain.run.column("loss"), rel=1e-8)


def test_parquet_in_float32(plain: Plain) -> None:
    run = plain.trained("parquet", source=plain.parquet, model__dtype="float32", model__path=plain.checkpoint)
    assert_close(run, plain.continued, rel=1e-5)
    assert [sent * 2 for sent in run.column("bytes_per_rank")] == plain.continued.column("bytes_per_rank")
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.float32}


@pytest.mark.parametrize("sharding", ["fsdp", "none"])
def test_bfloat16(plain: Plain, sharding: str) -> None:
    changes = {"model__dtype": "bfloat16", "parallel__sharding": sharding, "model__path": plain.checkpoint}
    run = plain.trained(f"bfloat16-{sharding}", **changes)
    assert_close(run, plain.continued, rel=2e-2)
    assert [sent * 4 for sent in run.column("bytes_per_rank")] == plain.continued.column("bytes_per_rank")
    assert {tensor.dtype for tensor in run.weights.values()} == {torch.bfloat16}
    assert reloaded(run).dtype == torch.bfloat16


def assert_close(run: Outcome, reference: Outcome, *, rel: float) -> None:
    assert run.column("tokens") == reference.column("tokens")
    assert run.column("loss") == pytest.approx(reference.column("loss"), rel=rel)
    assert run.column("grad_norm") == pytest.approx(reference.column("grad_norm"), rel=5 * rel)


def test_tied_embeddings_and_a_tokenizer_folder(plain: Plain) -> None:
    """kf38: a tied weight is written once, and both of its names hold it after loading."""
    folder, size = plain.folder / "tokenizer", word_tokenizer(plain.folder / "tokenizer")
    run = plain.trained("tied", {**ONE_LAYER, "tie_word_embeddings": True}, data__tokenizer=folder, optim__steps=3)
    saved, model = run.weights, reloaded(run)
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == size
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    assert state.keys() == saved.keys() - {"lm_head.weight"}
    assert all(torch.equal(state[name], saved[name]) for name in state)
    assert model.config.eos_token_id == 1

    from transformers import AutoTokenizer

    one, other = (AutoTokenizer.from_pretrained(path) for path in (folder, run.run_dir / "model"))
    text = (plain.source / "3.txt").read_text()
    assert one(text)["input_ids"] == other(text)["input_ids"]
    assert sum(run.column("tokens")) < sum(plain.run.column("tokens"))  # words, not bytes


def word_tokenizer(folder: Path) -> int:
    """A transformers tokenizer of whole words; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[END]", *WORDS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[END]")
    tokenizer.save_pretrained(folder)
    return len(words)


def test_a_checkpoint_is_where_the_next_run_starts(plain: Plain) -> None:
    assert plain.continued.steps[0]["loss"] < plain.run.steps[0]["loss"] - 0.1  # the same batch, two steps later
    run = plain.trained("still", model__path=plain.checkpoint, optim__steps=1, optim__lr=1e-30, ranks=1)
    assert run.steps[0]["loss"] == pytest.approx(plain.continued.steps[0]["loss"], rel=1e-8)
    saved = plain.run.weights  # which lr 1e-30 does not move
    assert run.weights.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in run.weights.items())
    before, after = (json.loads((r.run_dir / "model" / "config.json").read_text()) for r in (plain.run, run))
    assert after == before


def test_long_documents_split_or_truncated(plain: Plain) -> None:
    """Whole epoch in one step: of a document of 151 tokens "split" trains on 64 + 64 + 25, two of them twice."""
    whole = {"batch__sequences": 30, "optim__steps": 1, "data__shuffle": False}
    split = plain.trained("split", ONE_LAYER, **whole, data__long_documents="split")
    cut = plain.trained("truncate", ONE_LAYER, **whole, data__long_documents="truncate")
    lengths = [31, 151, 71, 11, 91, 46, 65, 64, 21, 111]
    assert cut.column("tokens") == [sum(min(length, 64) for length in lengths)]
    assert cut.column("sequences") == [len(lengths)]
    pieces = [1, 3, 2, 1, 2, 1, 2, 1, 1, 2]
    assert split.column("sequences") == [sum(pieces)]
    assert split.column("tokens") == [sum(lengths) + sum(pieces) - len(lengths)]


# ---- compile -------------------------------------------------------------------------------------------------------


def train_here(rank: int, world: int, source: str, run_dir: str, compiled: bool) -> list[int]:
    """A run on this rank; how many graphs dynamo had after each step. The default backend takes a minute to build."""
    torch.nn.Module.compile = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore[assignment,method-assign]
    graphs: list[int] = []
    take_step = Trainer._step

    def step(self: Trainer, index: int) -> Any:
        taken = take_step(self, index)
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        return taken

    Trainer._step = step  # type: ignore[method-assign]
    Path(run_dir).mkdir(exist_ok=True)
    config = TrainConfig(
        run_dir=run_dir,
        model=ModelConfig(config=ONE_LAYER, dtype="float64", compile=compiled),
        data=DataConfig(source=source, max_length=64),
        optim=OptimConfig(steps=5, lr=1e-2),
    )
    train_rank(config, Place(rank, world, rank, 0, torch.device("cpu")), RunDir(Path(run_dir)))
    return graphs


def test_kf27_compiled_layers_train_alike(plain: Plain) -> None:
    """Losses of later steps depend on the gradients of earlier ones: zero q/k/v gradients would show."""
    records = {}
    for compiled in (True, False):
        run_dir = plain.folder / f"compile-{compiled}"
        graphs = run_ranks(2, train_here, str(plain.source), str(run_dir), compiled, timeout=150)
        for counts in graphs:
            assert len(counts) == 5
            assert (counts[0] > 0) == compiled
            assert len(set(counts[1:])) == 1  # the second step compiles for any number of tokens; each has another
        records[compiled] = read_records(run_dir)
    for name in ("loss", "grad_norm"):
        got, want = ([record[name] for record in records[compiled]] for compiled in (True, False))
        assert len(got) == 5
        assert got == pytest.approx(want, rel=1e-7)
