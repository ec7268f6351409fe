"""`infinity generate` writes what plain transformers writes, from weights on NVMe, as they come."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from infinity.cli.main import main
from tests.cli.test_examples import CHATML, byte_level
from tests.cli.test_finetune import run
from tests.models import gpt2, llama

PROMPT = "the quick brown"


@pytest.fixture(params=[llama, gpt2], ids=["llama", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    made = request.param()[0]
    made.resize_token_embeddings(500)
    made.generation_config.eos_token_id = made.generation_config.bos_token_id = None
    made.generation_config.repetition_penalty = 1.1  # a model has settings of its own
    made.save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def arguments(model: Path, *flags: str, **changes: Any) -> list[str]:
    config = {
        "weights": "nvme",
        "optimizer": "nvme",
        "memory": {"device": "640KiB", "host": "64MiB"},
        "nvme": {"paths": [str(model.parent / "swap")]},
    }
    (model.parent / "swap.yaml").write_text(yaml.safe_dump(config | changes))
    return ["generate", "--model", str(model), "--config", str(model.parent / "swap.yaml"), "--dtype", "fp32", *flags]


def plain(model: Path, prompt: str = PROMPT, **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    written = made.generate(ids, attention_mask=torch.ones_like(ids), **(settings | options))
    return str(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_likeliest_tokens_are_those_of_transformers(model: Path, capsys: Any) -> None:
    assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "12")) == 0
    said = capsys.readouterr()
    assert said.out.rstrip("\n") == plain(model).rstrip("\n")
    assert re.search(r"12 tokens after \d+ of the prompt in", said.err)
    assert set(os.listdir(model.parent)) == {"model", "swap.yaml"}, "nothing of the store stays"


@pytest.mark.parametrize("flags", [[], ["--seed", "7"]])
def test_drawn_tokens_are_those_of_transformers(flags: list[str], model: Path, capsys: Any) -> None:
    given = arguments(model, "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0.8", *flags)
    assert main(given) == 0
    torch.manual_seed(7 if flags else 0)
    expected = plain(model, do_sample=True, temperature=0.8)
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")


def test_the_weights_come_from_the_disk_for_every_token(tmp_path: Path, capsys: Any) -> None:
    made = llama(layers=12)[0]
    made.resize_token_embeddings(500)
    made.save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    weights = sum(parameter.numel() * 4 for parameter in made.parameters())
    assert main(arguments(tmp_path / "model", "--prompt", PROMPT, "--max-tokens", "5")) == 0
    read = re.search(r"; ([\d.]+) MiB read", capsys.readouterr().err)
    assert read is not None
    assert float(read[1]) * 2**20 > 3 * weights


def test_tokens_are_shown_as_they_come(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, shown = [0], list[int]()
    forward, put = torch.nn.Module.__call__, TextStreamer.put

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes[0] += hasattr(self, "lm_head")
        return forward(self, *args, **kwargs)

    def note(self: Any, value: Any) -> None:
        shown.append(passes[0])
        put(self, value)

    monkeypatch.setattr(torch.nn.Module, "__call__", count)
    monkeypatch.setattr(TextStreamer, "put", note)
    assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "12")) == 0
    assert shown == list(range(13))  # the prompt, then each token after its pass


@pytest.mark.parametrize("model", [llama], ids=["llama"], indirect=True)  # GPT-2's positions are too few
def test_a_prompt_is_a_users_message_where_there_is_a_chat_template(model: Path, capsys: Any) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    said = [{"role": "system", "content": "be kind"}, {"role": "user", "content": PROMPT}]
    for flags, messages in ([], said[1:]), (["--system", "be kind"], said):
        assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "12", *flags)) == 0
        asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = capsys.readouterr()
        assert given.out.rstrip("\n") == plain(model, asked).rstrip("\n")
        assert "--raw passes it unchanged" in given.err
    assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "12", "--raw")) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain(model).rstrip("\n")


def test_adapters_are_put_onto_their_model(model: Path, capsys: Any) -> None:
    from peft import PeftModel

    flags = ["--lora", "2", "--loss-on", "all", "--lr", "0.1"]
    (model.parent / "text.txt").write_text("a red fox and the lazy hen\n" * 40)
    arguments(model)
    job = {"--model": model, "--data": model.parent / "text.txt", "--config": model.parent / "swap.yaml"}
    job |= {"--output": model.parent / "out", "--steps": 2, "--sequence-length": 16, "--dtype": "fp32"}
    (model.parent / "swap.yaml").write_text((model.parent / "swap.yaml").read_text().replace("640KiB", "8MiB"))
    assert run(job, *flags) == 0
    capsys.readouterr()
    assert main(arguments(model.parent / "out", "--prompt", PROMPT, "--max-tokens", "12")) == 0
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    PeftModel.from_pretrained(base, str(model.parent / "out")).merge_and_unload().save_pretrained(model.parent / "both")
    byte_level().save_pretrained(model.parent / "both")
    expected = plain(model.parent / "both", repetition_penalty=1.1)
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    assert expected != plain(model), "the adapters change nothing"


def test_the_prompt_may_come_from_stdin(model: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as at_a_terminal:
        at_a_terminal.setattr("sys.stdin", StdinOfATerminal())
        assert main(arguments(model, "--max-tokens", "12")) == 2
        assert "give a --prompt, or the prompt on stdin" in capsys.readouterr().err
        assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "12")) == 0
        assert capsys.readouterr().out.rstrip("\n") == plain(model).rstrip("\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert main(arguments(model, "--max-tokens", "12")) == 0
    assert capsys.readouterr().out.rstrip("\n") == plain(model).rstrip("\n")


class StdinOfATerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("model", [llama], ids=["llama"], indirect=True)
def test_several_processes_are_refused_and_one_writes(
    model: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(model, "--prompt", PROMPT, "--max-tokens", "2")
    with monkeypatch.context() as under_torchrun:
        under_torchrun.setenv("WORLD_SIZE", "2")
        assert main(given) == 2
        assert "start it without torchrun" in capsys.readouterr().err
    assert main(given) == 0


def test_an_interrupted_one_leaves_nothing(model: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TextStreamer, "end", interrupt)
    assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "2")) == 130
    assert set(os.listdir(model.parent)) == {"model", "swap.yaml"}


def test_the_store_of_a_run_in_the_same_directory_stays(model: Path, capsys: Any) -> None:
    (model.parent / "swap").mkdir()
    (model.parent / "swap" / "of-somebody").touch()
    assert main(arguments(model, "--prompt", PROMPT, "--max-tokens", "2")) == 0
    assert os.listdir(model.parent / "swap") == ["of-somebody"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--prompt", ""], "argument --prompt: is empty"),
        (["--prompt", "x", "--seed", "5"], "--seed does nothing without --temperature"),
        (["--prompt", "x", "--system", "be kind"], "the tokenizer has no chat template"),
        (["--prompt", "fox " * 2500], "and the model 2048 positions: shorten it"),
        (["--prompt", "x", "--temperature", "-1"], "must be positive or 0"),
    ],
)
def test_what_cannot_be_done_is_an_error_of_one_line(flags: list[str], says: str, tmp_path: Path, capsys: Any) -> None:
    made = llama()[0]
    made.resize_token_embeddings(500)
    made.save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    capsys.readouterr()
    assert main(arguments(tmp_path / "model", *flags)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("model", [gpt2], ids=["gpt2"], indirect=True)  # it has 64 positions
def test_room_for_fewer_tokens_is_said(model: Path, capsys: Any) -> None:
    assert main(arguments(model, "--prompt", "fox " * 20, "--max-tokens", "500")) == 0
    found = re.search(r"at most (\d+) tokens: the model has 64 positions", capsys.readouterr().err)
    assert found is not None
