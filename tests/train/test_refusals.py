"""Bad input is refused with exit code 2, in words, and leaves everything as it was."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from basp.data.tokenizers import load_tokenizer
from basp.train.config import DataConfig, ModelConfig, TrainConfig
from basp.train.model import build_model
from tests.train.running import ONE_LAYER, Outcome, flags, snapshot, train, trained, write_documents

pytestmark = pytest.mark.timeout(120)


class Place:
    """Documents, a finished run to continue from, and room for runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, folder / "documents"
        self.refusals = 0
        write_documents(self.source)
        self.done = trained(flags(self.source, folder / "done", ONE_LAYER, ranks=1, optim__steps=1))

    def refused(self, said: str, model: dict[str, Any] | None = None, **changes: Any) -> Outcome:
        """Run with ``changes``, and check everything that all refusals have in common."""
        self.refusals += 1
        run_dir = self.folder / f"refused-{self.refusals}"
        words = flags(changes.pop("source", self.source), run_dir, model or ONE_LAYER, **changes)
        before = snapshot(self.folder)
        outcome = train(words)
        assert outcome.code == 2, outcome.errors
        assert re.search(said, outcome.errors), outcome.errors
        assert re.fullmatch(r"basp: error: .+\. Allowed: .+\. To do: .+\.\n", outcome.errors, re.DOTALL)
        assert ".." not in outcome.errors.replace("...", "")
        assert "Traceback" not in outcome.errors
        assert len(outcome.errors) < 1000  # a message is read on a terminal
        assert not run_dir.exists()
        assert snapshot(self.folder) == before
        return outcome

    def checkpoint(self, name: str, change: Callable[[Path], None]) -> Path:
        """The finished run's model, with ``change`` done to its folder."""
        folder = self.folder / name
        shutil.copytree(self.done.run_dir / "model", folder)
        change(folder)
        return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("refusals"))


# ---- settings ------------------------------------------------------------------------------------------------------


def test_no_ranks(place: Place) -> None:
    place.refused(r"parallel\.ranks is 0\. Allowed: at least 1", ranks=0)


def test_kf37_an_unknown_key_of_the_file_is_refused_with_the_nearest(place: Place, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[optim]\nlearning_rate = 1\nwarmup_steps = 3\n")
    outcome = train([str(tmp_path / "run.toml"), "--run-dir", str(place.folder / "refused")])
    assert outcome.code == 2
    assert "run.toml: unknown key 'optim.learning_rate'" in outcome.errors
    (tmp_path / "run.toml").write_text("[optim]\nwarmup_steps = 3\n")
    outcome = train([str(tmp_path / "run.toml"), "--run-dir", str(place.folder / "refused")])
    assert outcome.code == 2
    assert "unknown key 'optim.warmup_steps'. Allowed: in [optim]: steps, epochs, lr," in outcome.errors
    assert "write 'optim.warmup', the nearest key" in outcome.errors
    assert not (place.folder / "refused").exists()


def test_kf37_an_unknown_key_of_the_architecture_is_refused_with_the_nearest(place: Place) -> None:
    place.refused("'hiden_size'.*'hidden_size'", {**ONE_LAYER, "hiden_size": 64})


def test_ranks_other_than_torchruns(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    place.refused(r"RANK in the environment, but not MASTER_ADDR, MASTER_PORT")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    place.refused(r"parallel\.ranks is 3 under a torchrun of 2\. Allowed: 2, or leave it out", ranks=3)


# ---- the run folder ------------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_touched(place: Place) -> None:
    before = snapshot(place.folder)
    outcome = train(flags(place.source, place.done.run_dir))
    assert outcome.code == 2
    assert re.search("done' exists already.*--run-dir.*--overwrite", outcome.errors)
    assert snapshot(place.folder) == before


def test_a_strangers_folder_is_not_overwritten(place: Place) -> None:
    before = snapshot(place.folder)
    outcome = train(flags(place.source, place.source, overwrite=True))
    assert outcome.code == 2
    assert re.search(r"documents' holds '\d\.txt', which no run of basp wrote", outcome.errors)
    assert snapshot(place.folder) == before


def test_overwrite_puts_the_old_run_back_when_the_new_one_fails_before_a_step(place: Place) -> None:
    before = snapshot(place.folder)
    outcome = train(flags(place.folder / "no source", place.done.run_dir, overwrite=True))
    assert outcome.code == 2
    assert "no source' does not exist" in outcome.errors
    assert snapshot(place.folder) == before


def test_overwrite_replaces_a_run(place: Place) -> None:
    run_dir = place.folder / "twice"
    first = trained(flags(place.source, run_dir, ONE_LAYER, ranks=1, optim__steps=1)).records
    second = trained(flags(place.source, run_dir, ONE_LAYER, ranks=1, optim__steps=1, seed=5, overwrite=True))
    assert second.records[0]["loss"] != first[0]["loss"]
    assert "seed = 5\n" in (run_dir / "config.toml").read_text()
    assert [item.name for item in place.folder.iterdir() if item.name.startswith("twice")] == ["twice"]


# ---- data ----------------------------------------------------------------------------------------------------------


def test_data_that_is_not_there(place: Place) -> None:
    place.refused("document' does not exist.*did you mean '.*documents'", source=place.folder / "document")


def test_a_bad_line_is_named(place: Place, tmp_path: Path) -> None:
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "good"}\n\n{"text": oops}\n')
    place.refused(re.escape(f"{lines}:3: not JSON"), source=lines)


def test_an_empty_source(place: Place, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    place.refused("empty' holds no document with text", source=tmp_path / "empty")


def test_a_long_document(place: Place) -> None:
    place.refused(
        r"1\.txt has 151 tokens \(and 4 more are too long\)\. Allowed: at most max_length = 64.*to 151",
        data__long_documents="refuse",
    )


def test_a_tokenizer_that_is_not_there(place: Place) -> None:
    place.refused("tokenizer 'words' is not a folder here", data__tokenizer="words")


# ---- architectures -------------------------------------------------------------------------------------------------


def test_an_unknown_model_type_with_the_nearest(place: Place) -> None:
    place.refused("lama.*'llama'", {**ONE_LAYER, "model_type": "lama"})


def test_heads_that_do_not_fit_the_hidden_size(place: Place) -> None:
    place.refused(r"hidden size \(30\) is not a multiple.*heads \(4\)", {**ONE_LAYER, "hidden_size": 30})


def test_kv_heads_that_do_not_fit_the_heads(place: Place) -> None:
    place.refused("4 query heads with 3 kv heads", {**ONE_LAYER, "num_key_value_heads": 3})


def test_a_vocabulary_smaller_than_the_tokenizers(place: Place) -> None:
    place.refused("vocabulary of 100 for a tokenizer with 259", {**ONE_LAYER, "vocab_size": 100})


def test_fewer_positions_than_max_length(place: Place) -> None:
    place.refused("max_length 64 with .* 32.*Allowed: at most 32", {**ONE_LAYER, "max_position_embeddings": 32})


def test_kf14_what_no_plan_can_honour_is_refused(place: Place) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    place.refused(r"LlamaForCausalLM has rope of type dynamic", {**ONE_LAYER, "rope_parameters": rope})


def test_settings_of_the_run_in_the_architecture(place: Place) -> None:
    place.refused(r"model\.config has 'dtype'.*set model\.dtype", {**ONE_LAYER, "dtype": "bfloat16"})


def test_kf32_attention_dropout_is_refused(place: Place) -> None:
    place.refused(r"layers\.0\.self_attn has attention_dropout 0\.1", {**ONE_LAYER, "attention_dropout": 0.1})


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_not_there(place: Place) -> None:
    place.refused("model.path '.*nowhere' is not a folder", model__path=place.folder / "nowhere")


def test_a_folder_that_is_no_checkpoint(place: Place) -> None:
    place.refused("documents' cannot be loaded", model__path=place.source)


def test_a_truncated_checkpoint(place: Place) -> None:
    def cut(folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])

    place.refused("truncated' cannot be loaded.*incomplete", model__path=place.checkpoint("truncated", cut))


def test_a_checkpoint_that_lacks_a_weight(place: Place) -> None:
    """transformers would start it at random, and say so in a table that scrolls by."""

    def drop(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.0.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    place.refused(r"model\.layers\.0\.mlp\.up_proj\.weight", model__path=place.checkpoint("lacking", drop))


def test_a_checkpoint_with_more_weights_than_its_config(place: Place) -> None:
    """A layer of the checkpoint would be left out in silence."""

    def shrink(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        more = {name.replace("layers.0", "layers.1"): tensor.clone() for name, tensor in weights.items()}
        save_file({**more, **weights}, folder / "model.safetensors", metadata={"format": "pt"})

    place.refused(r"model\.layers\.1\.", model__path=place.checkpoint("surplus", shrink))


def test_a_checkpoint_of_other_sizes(place: Place) -> None:
    def widen(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))

    place.refused("wide' cannot be loaded", model__path=place.checkpoint("wide", widen))


def test_a_pickle_is_not_opened(place: Place) -> None:
    def pickle(folder: Path) -> None:
        import torch
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()

    place.refused(r"no file named model\.safetensors", model__path=place.checkpoint("pickle", pickle))


def test_a_checkpoint_cannot_choose_a_kernel_from_a_hub(place: Place) -> None:
    def ask(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "someone/kernel"}))

    asking = str(place.checkpoint("asks for a kernel", ask))  # transformers alone would fetch it and run it
    config = TrainConfig(model=ModelConfig(path=asking), data=DataConfig(max_length=64))
    loaded = build_model(config, load_tokenizer("bytes"))
    assert loaded.config._attn_implementation == "eager"


def test_positions_of_a_checkpoint(place: Place) -> None:
    def shorten(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))

    place.refused("max_length 64 with .* 48", model__path=place.checkpoint("short", shorten))
