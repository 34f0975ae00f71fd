"""The command ``basp check``: what it prints, and its exit codes: 0 equal, 1 not, 2 refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

import basp
from basp.cli import main
from tests.check.test_check import tiny_llama


def test_it_prints_a_table_and_exits_by_its_verdict(capsys, monkeypatch) -> None:
    assert main(["check", "llama", "--ranks", "2", "--lengths", "7,12"]) == 0
    out = capsys.readouterr().out
    assert "llama: 1 process against 2 ranks, basp, kernel auto, float64" in out
    assert "casts to float32 removed in both runs" in " ".join(out.split())
    assert "all equal" in out
    assert "FAIL" not in out
    whole = basp.check
    monkeypatch.setattr(
        "basp.checks.check", lambda **options: whole(**options, _in_each_rank="tests.check.faults:loss_times_ranks")
    )
    assert main(["check", "llama", "--ranks", "2", "--lengths", "7,12"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "first difference: loss: loss: loss is" in " ".join(out.split())


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def lose_a_file(folder: Path) -> None:
    min(folder.glob("*.safetensors")).unlink()


def cut_a_file(folder: Path) -> None:
    file = min(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def cut_the_config(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text()[:40])


def spoil_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def say(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | values))

    return change


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (shutil.rmtree, "unknown model '.*spoilt': no folder, file or model_type has this name"),
    "empty": (empty, "spoilt/config.json' cannot be read: No such file or directory"),
    "a weight file missing": (
        lose_a_file,
        "spoilt' is incomplete: No such file or directory: .*model-00001-of-",
    ),
    "a weight file cut short": (cut_a_file, "spoilt' is incomplete: .*not fully covered"),
    "an index of nothing": (spoil_the_index, "spoilt' is incomplete: model.safetensors.index.json has no weight_map"),
    "half a config": (cut_the_config, "spoilt/config.json' cannot be read: Unterminated"),
    "unknown architecture": (say(model_type="lamma"), "unknown model 'lamma': .*spoilt/config.json'.*write 'llama'"),
    "no architecture": (say(model_type=None), "spoilt/config.json' has no model_type"),
    "no layers": (say(num_hidden_layers=0), "llama has num_hidden_layers 0"),
    "no vocabulary": (say(vocab_size=0), "llama has vocab_size 0"),
    "no language model": (say(model_type="vit"), "unknown model 'vit': transformers has no causal LM"),
    "heads": (say(num_attention_heads=6, num_key_value_heads=4), "has 6 query heads and 4 kv heads"),
    "more kv heads": (say(num_key_value_heads=4), "has 2 query heads and 4 kv heads"),
    "no heads": (say(num_attention_heads=0), "has 0 query heads"),
    "no whole number of heads": (say(num_attention_heads=2.5), "has 2.5 query heads"),
    "heads that do not fit": (say(hidden_size=17), r"hidden size \(17\) is not a multiple of .* heads \(2\)"),
}


def assert_refused(arguments: list[str], message: str, capsys) -> None:
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"basp: error: .+\. Allowed: .+\. To do: .+\.\n", err), err
    assert re.search(message, err), err


@pytest.mark.parametrize("flags", [[], ["--full", "--lengths", "7,12"]], ids=["shrunk", "full"])
@pytest.mark.parametrize("case", SPOILT)
def test_a_spoilt_checkpoint_is_refused(case: str, flags: list[str], tmp_path: Path, capsys) -> None:
    spoil, message = SPOILT[case]
    folder = tmp_path / "spoilt"
    LlamaForCausalLM(tiny_llama()).save_pretrained(folder, max_shard_size="4KB")
    spoil(folder)
    capsys.readouterr()
    assert_refused([str(folder), *flags], message, capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "0"], "sequence 0 has 0 tokens"),
        (["--lengths", "4,0"], "sequence 1 has 0 tokens"),
        (["--lengths", "-3"], "sequence 0 has -3 tokens"),
        (["--lengths", "7,17"], "17 tokens with a model of max_position_embeddings 16"),
        (["--lengths", "7,17", "--full"], "17 tokens with a model of max_position_embeddings 16"),
        (["--full", "--lengths", "7"], r"has no \*\.safetensors"),
        (["--batch", "0"], "batch is 0"),
        (["--ranks", "0"], "ranks is 0"),
    ],
)
def test_lengths_and_numbers_that_are_refused(flags: list[str], message: str, tmp_path: Path, capsys) -> None:
    tiny_llama().save_pretrained(tmp_path)
    assert_refused([str(tmp_path), *flags], message, capsys)


@pytest.mark.parametrize(
    "arguments", [[], ["llama", "--lengths", "4,x"], ["llama", "--ranks"], ["llama", "--rank", "2"]]
)
def test_flags_that_it_does_not_know(arguments: list[str], capsys) -> None:
    assert main(["check", *arguments]) == 2
    assert capsys.readouterr().err
