"""One run of the command over 4 ranks, as a user starts it, and everything that it leaves."""

from __future__ import annotations

import math
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from basp.data.sampling import Batches, cut_documents, split_eval
from basp.strategies import STRATEGIES, plan
from basp.train.settings import check_settings, load_settings
from tests.train.running import LLAMA, SIZES, command, read_records, train, write_documents

pytestmark = pytest.mark.timeout(180)

RANKS, SEED, LR, STEPS = 4, 3, 1e-2, 8
LENGTHS = np.array([size + 1 for size in SIZES])  # the byte tokenizer adds one end token

SETTINGS = """
run_dir = "run"
seed = 3

[model]
dtype = "float64"
kernel = "eager"

[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2

[data]
source = "documents"
max_length = 64

[batch]
sequences = 3

[parallel]
ranks = 4

[optim]
epochs = 1.5
lr = 1e-2
warmup = 2
schedule = "linear"

[log]
eval_fraction = 0.2
eval_every = 4
"""


class Done:
    """The finished run, and what it should have trained on."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder, self.printed = folder, printed
        self.run_dir = folder / "run"
        self.records = read_records(self.run_dir)
        self.steps = [record for record in self.records if "loss" in record]
        self.evaluations = [record for record in self.records if "eval_loss" in record]
        train_ids, self.eval_ids = split_eval(len(SIZES), fraction=0.2, seed=SEED)
        spans = cut_documents(LENGTHS, max_length=64, long_documents="split", documents=train_ids)
        self.span_lengths = spans[:, 2] - spans[:, 1]
        self.batches = Batches(spans=len(spans), sequences=3, accumulation=1, shuffle=True, seed=SEED)

    def lengths(self, step: int) -> list[int]:
        """Of the sequences of optimizer step ``step``, from 1."""
        (numbers,) = self.batches.step(step - 1)
        return self.span_lengths[numbers].tolist()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("command")
    write_documents(folder / "documents")
    (folder / "run.toml").write_text(SETTINGS.replace('"documents"', f'"{folder}/documents"'))
    run_dir = folder / "run"
    with command([str(folder / "run.toml"), "--run-dir", str(run_dir)], run_dir=run_dir) as running:
        printed = running.finish(150)
        assert running.process.returncode == 0, printed
        assert running.alive() == []
    return Done(folder, printed)


# ---- metrics.jsonl -------------------------------------------------------------------------------------------------


def test_every_record_has_every_field_and_no_other(done: Done) -> None:
    speed = {"tokens_per_second", "bytes_per_rank", "seconds"}
    for record in done.steps:
        assert record.keys() == {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "sequences"} | speed
    for record in done.evaluations:
        assert record.keys() == {"step", "eval_loss", "eval_tokens"}
    assert [record["step"] for record in done.steps] == list(range(1, STEPS + 1))
    assert [record["step"] for record in done.evaluations] == [4, STEPS]
    assert [record["step"] for record in done.records] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]


def test_kf09_each_token_is_counted_once(done: Done) -> None:
    for record in done.steps:
        lengths = done.lengths(record["step"])
        assert (record["tokens"], record["sequences"]) == (sum(lengths), len(lengths))
    first_epoch = done.steps[: done.batches.steps_per_epoch]
    assert sum(record["tokens"] for record in first_epoch) == done.span_lengths.sum()


def test_kf26_the_last_batch_of_an_epoch_is_smaller(done: Done) -> None:
    assert done.batches.steps_per_epoch == 5
    assert [record["sequences"] for record in done.steps] == [3, 3, 3, 3, 2, 3, 3, 3]


def test_kf34_one_and_a_half_epochs_are_that_many(done: Done) -> None:
    sequences = len(done.span_lengths)
    assert sequences == 14
    assert [record["epoch"] for record in done.steps] == pytest.approx(
        [3 / 14, 6 / 14, 9 / 14, 12 / 14, 1.0, 1 + 3 / 14, 1 + 6 / 14, 1 + 9 / 14], rel=1e-12
    )
    # 5 steps are the first epoch, whose last is small; the second is half done after its third.


def test_the_learning_rate_warms_up_and_falls(done: Done) -> None:
    expected = [LR / 2, LR, LR, *(LR * left / 6 for left in (5, 4, 3, 2, 1))]
    assert [record["lr"] for record in done.steps] == pytest.approx(expected, rel=1e-12)


def test_kf07_the_logged_loss_is_a_mean_per_token(done: Done) -> None:
    losses = [record["loss"] for record in done.steps]
    assert losses[0] == pytest.approx(math.log(259), rel=0.02)  # a random start guesses over the vocabulary
    assert losses == sorted(losses, reverse=True)
    assert all(0.1 < record["grad_norm"] < 10 for record in done.steps)


def test_bytes_per_rank_are_what_the_plans_predict(done: Done) -> None:
    head_dim = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    for record in done.steps:
        laid_out = plan(done.lengths(record["step"]), ranks=RANKS, heads=4, kv_heads=2, strategy="basp")
        one_forward = int(laid_out.traffic(head_dim, 8).sum())
        both_ways = 2 * one_forward * LLAMA["num_hidden_layers"]
        assert record["bytes_per_rank"] == both_ways / RANKS > 0


def test_the_speed_is_of_the_step(done: Done) -> None:
    for record in done.steps:
        assert record["seconds"] > 0
        assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_nothing_else_is_left(done: Done) -> None:
    assert {item.name for item in done.run_dir.iterdir()} == {"config.toml", "metrics.jsonl", "report.png", "model"}
    assert {item.name for item in done.folder.iterdir()} == {"documents", "run.toml", "run"}
    model = {item.name for item in (done.run_dir / "model").iterdir()}
    needed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert needed <= model <= needed | {"generation_config.json", "special_tokens_map.json"}


def test_files_have_the_modes_that_the_umask_gives(done: Done) -> None:
    modes = {
        str(item.relative_to(done.run_dir)): stat.S_IMODE(item.stat().st_mode)
        for item in done.run_dir.rglob("*")
        if item.is_file()
    }
    assert modes == dict.fromkeys(modes, 0o644)  # a colleague may read the model, too
    assert stat.S_IMODE((done.run_dir / "model").stat().st_mode) == 0o755


def test_the_report_is_a_picture(done: Done) -> None:
    data = (done.run_dir / "report.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data.rstrip()[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    assert 800 < width < 4000
    assert 600 < height < 4000
    assert len(data) > 30_000


def test_it_says_what_it_does_and_makes_no_noise(done: Done) -> None:
    lines = done.printed.splitlines()
    assert lines[0].startswith("LlamaForCausalLM of 32,096 parameters on 14 sequences")
    assert "8 steps on 4 ranks (basp, sharding fsdp, cpu)" in lines[0]
    assert lines.pop(1) == "basp: attention kernel: eager for causal attention"
    told = [line for line in lines[1:] if "evaluation" not in line]
    assert [line.split("  ")[0] for line in told] == [f"step {step}/8" for step in range(1, STEPS + 1)]
    assert f"evaluation loss {done.evaluations[-1]['eval_loss']:.4f}" in lines[-1]
    assert len(lines) == 1 + STEPS + len(done.evaluations)


# ---- config.toml ---------------------------------------------------------------------------------------------------


def test_config_toml_reads_back_to_an_equal_config(done: Done) -> None:
    asked = load_settings(done.folder / "run.toml")
    written = load_settings(done.run_dir / "config.toml")
    assert written.run_dir == str(done.run_dir)
    assert check_settings(written, strategies=STRATEGIES) == written
    assert (written.model, written.data, written.optim) == (asked.model, asked.data, asked.optim)
    assert (written.batch, written.parallel, written.log) == (asked.batch, asked.parallel, asked.log)


def test_config_toml_repeats_the_run(done: Done) -> None:
    again = train([str(done.run_dir / "config.toml"), "--run-dir", str(done.folder / "again")])
    assert again.code == 0, again.errors
    clock = ("tokens_per_second", "seconds")
    plain = [[{k: v for k, v in r.items() if k not in clock} for r in each] for each in (again.records, done.records)]
    assert plain[0] == plain[1]
    (again.run_dir / "metrics.jsonl").unlink()
    weights = "model/model.safetensors"
    assert (again.run_dir / weights).read_bytes() == (done.run_dir / weights).read_bytes()


# ---- model/ --------------------------------------------------------------------------------------------------------


def test_kf38_kf08_the_saved_model_is_the_trained_one(done: Done) -> None:
    """transformers alone, with its own attention, in one process, finds the last evaluation loss that was logged."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(done.run_dir / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model.config._attn_implementation == "sdpa"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for document in done.eval_ids.tolist():
        ids = torch.tensor(tokenizer((done.folder / "documents" / f"{document}.txt").read_text())["input_ids"])
        assert len(ids) == LENGTHS[document] <= 64
        with torch.no_grad():
            logits = model.eval()(ids[None]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        count += len(ids) - 1
    last = done.evaluations[-1]
    assert last["eval_tokens"] == count
    assert last["eval_loss"] == pytest.approx(total / count, rel=1e-7)  # its norms compute in float32
    assert done.evaluations[0]["eval_loss"] > last["eval_loss"] + 0.05  # so an older model would not pass


def test_the_model_loads_without_basp_in_its_config(done: Done) -> None:
    text = (done.run_dir / "model" / "config.json").read_text()
    assert "basp" not in text
    assert "FSDP" not in text
    assert '"architectures": [\n    "LlamaForCausalLM"\n  ]' in text
