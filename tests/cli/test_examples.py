"""Rows with prompts, messages and conversations: which tokens are learned, and that the examples of one sequence are
apart."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import decoders
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from infinity.cli.batches import TokenBatch
from infinity.cli.data import PackedDataset
from infinity.cli.packing import pack
from infinity.cli.packing_support import require_separates
from infinity.errors import ConfigError, ModelError
from tests.cli.test_data import byte_level as bytes_of_text
from tests.cli.test_finetune import run

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content | trim }}<|eot|>{% endgeneration %}{% else %}{{ m.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}<eos>{% elif m.role == 'assistant' %}"
    "<|assistant|>\n{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}<|system|>\n{{ m.content }}<eos>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
ENDS = {CHATML: "<|im_end|>", LLAMA3: "<|eot|>", ZEPHYR: "<eos>"}
TALK = [
    ("system", "be kind"),
    ("user", "who is there"),
    ("assistant", "the fox"),
    ("user", "and"),
    ("assistant", "a hen"),
]
Read = Callable[..., PackedDataset]


@functools.cache
def _byte_level() -> Any:
    by = bytes_of_text()
    by.backend_tokenizer.decoder = decoders.ByteLevel()
    return by


def byte_level() -> Any:
    """Return a tokenizer whose tokens are bytes. Each caller gets its own, which it may change."""
    return copy.deepcopy(_byte_level())


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Read]:
    """PackedDataset of rows that are written to a .jsonl file, or of a path; closed at the end."""
    opened: list[PackedDataset] = []

    def make(rows: Any, template: str | None = CHATML, length: int = 192, **options: Any) -> PackedDataset:
        path = rows
        if not isinstance(rows, Path):
            path = tmp_path / f"rows{len(opened)}.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        by = byte_level()
        by.chat_template = template
        opened.append(PackedDataset([path], by, length, tmp_path, **options))
        return opened[-1]

    yield make
    for data in opened:
        data.close()


def learned(data: PackedDataset) -> list[str]:
    """Return the text that is learned, by example."""
    batch, by = data.rows(range(data.sequences)), byte_level()
    assert batch.labels is not None
    assert batch.positions is not None
    found: list[list[int]] = []
    for labels, positions in zip(batch.labels.tolist(), batch.positions.tolist(), strict=True):
        for label, position in zip(labels, positions, strict=True):
            if not position:
                assert label == TokenBatch.NOTHING
                found.append([])
            elif label != TokenBatch.NOTHING:
                found[-1].append(label)
    return [by.decode(each) for each in found if each]


def spoken(talk: list[tuple[str, str]], role: str = "role", content: str = "content") -> list[dict[str, str]]:
    return [{role: who, content: what} for who, what in talk]


def test_the_template_of_the_documentation_is_chatml_with_marks(read: Read) -> None:
    found = re.search(r"```jinja\n(.*?)```", (Path(__file__).parents[2] / "docs/finetune.md").read_text(), re.DOTALL)
    assert found is not None
    by = byte_level()
    by.chat_template = found[1]
    said = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nwho is there<|im_end|>\n<|im_start|>assistant\n"
    assert by.apply_chat_template(spoken(TALK[:2]), tokenize=False, add_generation_prompt=True) == said
    assert learned(read([{"messages": spoken(TALK)}], found[1])) == ["the fox<|im_end|>a hen<|im_end|>"]


@pytest.mark.parametrize("template", ENDS, ids=["ChatML", "Llama 3", "Zephyr"])
def test_what_the_assistant_says_is_learned_in_every_shape_of_a_row(template: str, read: Read) -> None:
    end = ENDS[template]
    named = {"system": "system", "user": "human", "assistant": "gpt"}
    chats = [
        {"messages": spoken(TALK)},
        {"conversations": spoken([(named[who], what) for who, what in TALK], "from", "value")},
        {"conversations": spoken(TALK)},
    ]
    assert learned(read(chats, template)) == [f"the fox{end}a hen{end}"] * 3
    answers = [{"prompt": spoken(TALK[:-1]), "completion": spoken(TALK[-1:])}]
    assert learned(read(answers, template)) == [f"a hen{end}"]


def test_a_completion_and_its_end_are_learned(read: Read) -> None:
    """The space before the fox is in one token with it."""
    rows = [{"prompt": "who is there? ", "completion": "the fox"}, {"prompt": "and?", "completion": " a hen<eos>"}]
    assert sorted(learned(read(rows))) == [" a hen<eos>", " the fox<eos>"]


def test_all_is_learned_where_that_is_asked_for(read: Read) -> None:
    rows = [{"prompt": "who is there? ", "completion": "the fox"}]
    whole = byte_level()("who is there? the fox<eos>")["input_ids"]
    data = read(rows, loss_on="all")
    assert data.rows([0]).ids[0, : len(whole)].tolist() == whole
    assert learned(data) == [byte_level().decode(whole[1:])]
    unmarked = "{% for m in messages %}{{ m.content }} {% endfor %}"
    assert learned(read([{"messages": spoken(TALK)}], unmarked, loss_on="all"))


def test_the_length_that_a_message_asks_for_is_one(read: Read) -> None:
    rows, text = [{"prompt": "who is there? " * 20, "completion": "the fox"}], [{"text": "the fox"}]
    with pytest.raises(ConfigError, match="Give a larger --sequence-length"):
        read(rows, length=16)
    assert [each.strip() for each in learned(read(rows, length=512))] == ["the fox<eos>"]
    with pytest.raises(ConfigError, match="or a smaller --sequence-length"):
        read(text, length=16)
    assert read(text, length=3).sequences == 1


def test_each_way_on_of_a_template_without_marks_is_one(read: Read) -> None:
    row, unmarked = (
        {"messages": spoken(TALK)},
        CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    )
    with pytest.raises(ConfigError, match="give rows with a 'prompt' and a 'completion' of messages"):
        read([row], unmarked)
    answers = {"prompt": spoken(TALK[:-1]), "completion": spoken(TALK[-1:])}
    assert learned(read([answers], unmarked)) == ["a hen<|im_end|>"]
    assert "the fox" in learned(read([row], unmarked, loss_on="all"))[0]
    assert learned(read([row], CHATML)) == ["the fox<|im_end|>a hen<|im_end|>"]


def test_text_among_examples_is_learned_all_of_it(read: Read) -> None:
    text = "the quick fox " * 40
    data = read([{"text": text}, {"prompt": "a", "completion": "hen"}], length=32)
    begun = [part for part in learned(data) if part != "hen<eos>"]
    tokens = len(byte_level()(text)["input_ids"]) + 1
    assert sum(len(byte_level()(part)["input_ids"]) for part in begun) >= tokens - 2 * len(begun)
    assert not data.notes()


def test_a_template_without_marks_is_refused(read: Read) -> None:
    with pytest.raises(
        ConfigError, match=r"rows0.jsonl:1: .*no \{% generation %\} .* infinity's page on finetune .*--loss-on all"
    ):
        read([{"messages": spoken(TALK)}], "{% for m in messages %}{{ m.content }} {% endfor %}")


def test_examples_without_an_answer_are_counted(read: Read) -> None:
    rows = [{"messages": spoken(TALK[:2])}, {"messages": spoken(TALK)}]
    data = read(rows)
    assert len(learned(data)) == 1
    assert data.notes()[0].startswith("examples left out, because they have no answer: 1 (")
    assert data.notes()[0].endswith("rows0.jsonl:1)")
    with pytest.raises(
        ConfigError, match=r"because they have no answer: 1 \(.*Check that there are messages of the assistant"
    ):
        read(rows[:1])


def test_an_example_that_is_too_long_is_cut_and_said(read: Read) -> None:
    data = read(
        [{"prompt": "who?", "completion": "the fox " * 50}, {"prompt": "who? " * 50, "completion": "a"}], length=32
    )
    assert data.sequences == 1
    assert [re.sub(r"\(.*/", "(", note) for note in data.notes()] == [
        "examples left out, because their answer begins after --sequence-length 32 tokens: 1 (rows0.jsonl:2)",
        "examples cut, because they are longer than --sequence-length 32: 1 (rows0.jsonl:1)",
    ]


@pytest.mark.parametrize("template", [CHATML, ""])
def test_rows_of_alpaca_are_an_instruction_and_an_answer(template: str, read: Read) -> None:
    data = read([{"instruction": "who is there", "input": "a door", "output": "the fox"}], template)
    (answer,) = learned(data)
    assert answer.strip().startswith("the fox")
    assert "who is there\n\na door" in data.preview()
    assert "«" in data.preview()


def test_the_first_document_is_shown_with_what_is_learned(read: Read) -> None:
    shown = read([{"messages": spoken(TALK)}]).preview()
    assert [part.partition("»")[0].strip() for part in shown.split("«")[1:]] == ["the fox<|im_end|>", "a hen<|im_end|>"]


def test_verbose_shows_the_first_document_of_the_data(job: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "the quick", "completion": "brown fox"}) + "\n") * 4)
    assert run(job | {"--data": rows, "--steps": 1}, "--verbose") == 0
    shown = capsys.readouterr().out.partition("the first document of --data, with the learned text in «»:\n")[2]
    assert shown.splitlines()[0].replace(" ", "") == "thequick«brownfox<eos>»"


@pytest.mark.parametrize("kind", ["parquet", "csv", "tsv", "arrow", "saved", "saved splits"])
def test_tables_are_read_as_lines_are(kind: str, read: Read, tmp_path: Path) -> None:
    import datasets

    rows = [{"prompt": f"who is {index}? ", "completion": f"fox {index}"} for index in range(5)]
    expected = learned(read(rows))
    table = datasets.Dataset.from_list(rows)
    path = tmp_path / f"table.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind in ("csv", "tsv"):
        table.to_csv(path, sep="," if kind == "csv" else "\t")
    elif kind == "arrow":
        table.save_to_disk(tmp_path / "folder")
        next((tmp_path / "folder").glob("*.arrow")).rename(path)
    else:
        (table if kind == "saved" else datasets.DatasetDict(train=table)).save_to_disk(path)
    assert learned(read(path)) == expected


def test_a_table_without_rows_for_training_and_a_broken_one_are_named(read: Read, tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(test=datasets.Dataset.from_list([{"text": "fox"}])).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"splits: it has no split 'train' but test"):
        read(tmp_path / "splits")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match=r"broken\.parquet: cannot be read: "):
        read(tmp_path / "broken.parquet")
    (tmp_path / "other.csv").write_text("riddle,answer\na,b\n")
    with pytest.raises(ConfigError, match=r"other\.csv:1: a row needs a 'text' string"):
        read(tmp_path / "other.csv")


def test_every_example_is_in_one_sequence_and_few_are_more_than_needed() -> None:
    drawn = torch.Generator().manual_seed(0)
    for _ in range(50):
        room = int(torch.randint(1, 100, (), generator=drawn))
        lengths = torch.randint(
            1, room + 1, (int(torch.randint(1, 200, (), generator=drawn)),), generator=drawn
        ).tolist()
        bins = pack(lengths, room)
        assert sorted(index for each in bins for index in each) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in each) <= room for each in bins)
        assert len(bins) <= 11 * -(-sum(lengths) // room) / 9 + sum(length > room / 2 for length in lengths)
    assert pack([3, 5, 2, 7, 4], 7) == [[3], [1, 2], [4, 0]]


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 500,
}


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)),
        "gpt2": GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=500)),
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_have_the_loss_of_the_same_apart(name: str, attention: str, read: Read) -> None:
    model = models()[name].eval()
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    require_separates(model)
    rows = [{"prompt": f"who is {index}? ", "completion": "the fox " * (1 + index % 3)} for index in range(12)]
    packed, apart = read(rows, length=48), read(rows, length=48, packing=False)
    assert packed.shares_sequences
    assert not apart.shares_sequences
    assert (packed.sequences, apart.sequences) == (packed.sequences, 12)
    together = packed.rows(range(packed.sequences))
    singly = [apart.rows([index]) for index in range(12)]
    assert together.learned == sum(each.learned for each in singly)
    with torch.no_grad():
        expected = sum(model(**each.of_trainer()).loss.double() * each.learned for each in singly) / together.learned
        found = model(**together.of_trainer()).loss.double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


class Leaky(LlamaForCausalLM):
    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def test_a_model_that_cannot_keep_examples_apart_is_refused() -> None:
    torch.manual_seed(0)
    model = Leaky(LlamaConfig(**SMALL)).train()
    model.config.use_cache = False
    with pytest.raises(ModelError, match="Leaky mixes the examples of one sequence.*--no-packing"):
        require_separates(model)
    assert model.training


def test_a_model_that_cannot_keep_examples_apart_trains_without_packing(
    job: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"prompt": "the quick", "completion": "brown fox"}) + "\n") * 4)
    forward = LlamaForCausalLM.forward

    def leaky(model: Any, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", leaky)
    assert run(job | {"--data": rows, "--steps": 1}) == 2
    assert "Give --no-packing: each sequence then has one example" in capsys.readouterr().err
    assert run(job | {"--data": rows, "--steps": 1}, "--no-packing") == 0
