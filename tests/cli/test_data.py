"""Text becomes sequences of tokens, all of it and nothing else; what is no text is named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from infinity.cli import documents
from infinity.cli.data import PackedDataset
from infinity.cli.training_examples import LossOn
from infinity.errors import ConfigError
from tests.cli.test_finetune import TEXT, tokenizer

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }} {% endfor %}"
Pack = Callable[..., PackedDataset]


@pytest.fixture
def pack(tmp_path: Path) -> Iterator[Pack]:
    """PackedDataset of paths, by default for a tokenizer with a chat template; closed at the end."""
    opened: list[PackedDataset] = []

    def make(*paths: Path, by: Any = None, length: int = 1, loss_on: LossOn = "all") -> PackedDataset:
        if by is None:
            by = tokenizer()
            by.chat_template = CHAT
        opened.append(PackedDataset(list(paths), by, length, tmp_path, loss_on=loss_on))
        return opened[-1]

    yield make
    for data in opened:
        data.close()


def tokens_of(data: PackedDataset) -> list[int]:
    return data.rows(range(data.sequences)).ids.flatten().tolist()


def text_of(data: PackedDataset) -> str:
    return str(tokenizer().decode(tokens_of(data)))


def byte_level() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<eos>"], initial_alphabet=alphabet)
    bpe.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


@pytest.mark.covering(most=2)
@pytest.mark.parametrize("between", ["\n", " ", "\n\n", "\r\n", "\t"])
def test_a_long_text_is_one_document_with_the_tokens_of_the_whole(
    between: str, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 1 << 14)
    words = TEXT.split()
    text = between.join(words[index % 17] for index in range(16_000))
    (tmp_path / "long.txt").write_text(text, newline="")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text.replace("\r\n", "\n")}))
    by = byte_level()
    assert len(text) > 3 * documents.PIECE_CHARS
    whole = by(text.replace("\r\n", "\n"), add_special_tokens=False, verbose=False)["input_ids"]
    for name in ("long.txt", "long.jsonl"):
        tokens = tokens_of(pack(tmp_path / name, by=by))
        assert tokens.count(by.eos_token_id) == 1
        different = sum(mine != theirs for mine, theirs in zip(tokens, [*whole, by.eos_token_id], strict=False))
        assert abs(len(tokens) - len(whole) - 1) <= 2
        assert between in ("\n\n", "\t") or not different


def test_a_long_text_without_white_space_is_one_document(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARS", 1 << 14)
    (tmp_path / "long.txt").write_text("ab" * 30_000)
    by = byte_level()
    assert tokens_of(pack(tmp_path / "long.txt", by=by)).count(by.eos_token_id) == 1


def test_jsonl_and_directories_are_read_in_a_fixed_order(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "docs" / "b.txt").write_text("the hen\n")
    (tmp_path / "docs" / "sub" / "a.jsonl").write_text('{"text": "the fox"}\n\n{"text": "the dog"}\n')
    (tmp_path / "docs" / "image.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "last.jsonl").write_text('{"text": "slow red hen"}\n')
    decoded = text_of(pack(tmp_path / "docs", tmp_path / "last.jsonl"))
    order = [decoded.index(word) for word in ("the hen", "the fox", "the dog", "slow red hen")]
    assert order == sorted(order)
    assert decoded.count("<eos>") == 4
    assert sorted(os.listdir(tmp_path)) == ["docs", "last.jsonl"]


def test_too_little_data_is_named(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the fox")
    with pytest.raises(ConfigError, match="less than one sequence of 64"):
        pack(tmp_path / "text.txt", length=64)


def messages(*contents: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **more} for content in contents]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"conversations": [{"from": "nobody", "value": "fox"}]},
            r"messages\[0\] has the role 'nobody', .*: give one of system",
        ),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\] needs a 'content' that is a string"),
        ({"conversations": []}, "conversations is empty"),
        (
            {"riddle": "fox", "answer": "hen"},
            "this one has 'riddle', 'answer'. If its columns have other names, give --columns",
        ),
        (messages("fox", role="bot"), r"messages\[0\] has the role 'bot', .*: give one of system"),
        ({"prompt": "fox"}, "a row needs .* a 'prompt' and a 'completion', .* this one has 'prompt'"),
        ({"completion": "fox"}, "this one has 'completion'"),
        ({"prompt": "fox", "completion": 3}, "'completion' is a int"),
        ({"prompt": "fox", "completion": messages("hen")["messages"]}, "'prompt' and 'completion' must all be strings"),
        ({"prompt": "fox", "completion": []}, "completion is empty"),
        ({"prompt": [], "completion": []}, "prompt is empty"),
        ({**messages("fox"), "tools": 3}, "'tools' is a int; it must be a list"),
        ({**messages("fox"), "tools": "{"}, "'tools' is not valid JSON"),
        (messages("fox", **{"from": "human"}), r"messages\[0\] has 'from' and 'role'; remove one of the two"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] needs a 'content' that is a string; this one has none"),
        (messages("fox", None), r"messages\[1\] needs a 'content' that is a string; this one has null"),
        (messages([{"type": "image_url", "image_url": {}}]), "'content' has a part of the type 'image_url'"),
        (messages([{"type": "text"}]), "'content' has a part of the type 'text', and infinity trains on text only"),
        (messages(["fox"]), "'content' has a part of the type 'str'"),
        (messages({"text": "fox"}), "needs a 'content' that is a string; this one has a dict"),
        (messages(7), "needs a 'content' that is a string; this one has a int"),
        (messages("fox", role=3), "needs a 'role' that is a string; this one has a int"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hi", 3]}, r"messages\[0\] is not an object with a 'role' and a 'content'"),
        ({"messages": "hi"}, "'messages' is a str; it must be a list of messages"),
        ({"messages": None}, "a row needs a 'text' string, a list of 'messages'"),
        ({"text": None}, "a row needs a 'text' string, a list of 'messages'"),
        ({"text": ["fox"]}, "'text' is a list; it must be a string"),
        (
            {"text": "fox", **messages("hen")},
            "both 'messages' and 'text', .* remove one of the two, or name the columns",
        ),
        ({"role": "user", "text": "fox", "parent_id": "a"}, "has 'parent_id', .* join those of a conversation"),
        (
            {"question": "a", "answer": "b", "solution": "c"},
            "both 'answer' and 'solution'.*--columns instruction=quest",
        ),
        (
            {**messages("fox"), "chat_template_kwargs": {"tools": []}},
            "may only have variables of the chat template; this one has 'tools'",
        ),
        (
            {**messages("fox"), "chat_template_kwargs": "fox"},
            "may only have variables of the chat template; this one has a str",
        ),
        ({"text": "a \ud800 fox"}, "half of a surrogate pair"),
        (messages("a \udfff fox"), "half of a surrogate pair"),
        (["fox"], "a row needs a 'text' string, a list of 'messages'"),
        ("fox", "a row needs a 'text' string, a list of 'messages'"),
        (None, "null instead of an object"),
    ],
)
def test_a_record_of_another_shape_is_named_with_its_line(
    record: Any, message: str, pack: Pack, tmp_path: Path
) -> None:
    (tmp_path / "chat.jsonl").write_text('{"text": "the fox"}\n\n' + json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=rf"--data .*chat\.jsonl:3: .*{message}"):
        pack(tmp_path / "chat.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8 .*iconv"),
        (b"[" * 100_000, "lists or objects are nested too deeply"),
        (b'{"text": ' + b'{"a":' * 100_000, "lists or objects are nested too deeply"),
        (b'{"text": "a\x00"}', "not valid JSON"),
        (b'{"text": 1' + b"1" * 5000 + b"}", "not valid JSON"),
        ('{"text": "fox"}'.encode("utf-16"), "not UTF-8"),
        (b'{"text": "' + b"a" * (17 << 20) + b'"}', "longer than 16 MiB"),
    ],
)
def test_a_line_that_is_no_json_is_named(line: bytes, message: str, pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "the fox"}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{message}") as caught:
        pack(tmp_path / "bad.jsonl")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses the row: TemplateError: roles must alternate. Change the row, or chat_template.jinja",
        ),
        ("{{ messages[0].content + 1 }}", "refuses the row: TypeError"),
        ("{{ 1 // 0 }}", "refuses the row: ZeroDivisionError"),
        ("{{ nothing.like.this }}", "refuses the row: UndefinedError"),
        ("{% if %}", "refuses the row: TemplateSyntaxError"),
        ("<s>{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}", "leaves out everything"),
    ],
)
def test_a_chat_template_that_fails_is_named(template: str, message: str, pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text(json.dumps(messages("the fox")))
    by = tokenizer()
    by.chat_template = template
    with pytest.raises(ConfigError, match=rf"chat\.jsonl:1: .*{message}"):
        pack(tmp_path / "chat.jsonl", by=by)


def test_marks_at_the_beginning_of_a_file_are_no_text(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfthe fox")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "the hen"}\r\n')
    assert text_of(pack(tmp_path / "a.txt", tmp_path / "b.jsonl")).split() == [
        "the",
        "fox",
        "<eos>",
        "the",
        "hen",
        "<eos>",
    ]


@pytest.mark.parametrize(
    "content", [b"caf\xe9 " * 400_000, "the fox".encode("utf-16-le"), b"the fox " * 200_000 + b"\xff"]
)
def test_a_file_that_is_no_text_is_left_out_and_said_alone_or_not(content: bytes, pack: Pack, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "b.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=r"there is no text in it \(.*b\.txt: it "):
        pack(folder / "b.txt")
    with pytest.raises(ConfigError, match=r"there is no text in it \(.*b\.txt: it "):
        pack(folder)
    for name in ("a.txt", "c.txt"):
        (folder / name).write_text("the fox")
    wanted = tokens_of(pack(folder / "a.txt", folder / "c.txt"))
    for data in (pack(folder), pack(*sorted(folder.iterdir()))):
        assert tokens_of(data) == wanted
        (note,) = data.notes()
        assert "left out: 1 (" in note
        assert "b.txt: it " in note


def test_blank_documents_are_counted(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the fox"}\n{"text": ""}\n{"text": " \\n"}\n')
    data = pack(tmp_path / "a.jsonl")
    assert text_of(data).split() == ["the", "fox", "<eos>"]
    assert data.notes() == ["documents left out, because they are blank: 2"]
    (tmp_path / "b.txt").write_text(" \n" * 1000)
    with pytest.raises(ConfigError, match="there is no text in it"):
        pack(tmp_path / "b.txt")


@pytest.mark.parametrize("name", ["a.feather", "a.gz", "a.csv.gz", "a.tar.gz", "a.zip"])
def test_other_formats_are_refused_with_what_to_do(name: str, pack: Pack, tmp_path: Path) -> None:
    """Alone, or where a directory has nothing else; beside text they are left out, and said to be."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / name).write_text("the,hen\n1,2\n")
    for path in (tmp_path / "docs" / name, tmp_path / "docs"):
        with pytest.raises(ConfigError, match=rf"{name}: a .* file is not read\. (Give|Unpack) "):
            pack(path)
    (tmp_path / "docs" / "a.txt").write_text("the fox")
    data = pack(tmp_path / "docs")
    assert text_of(data).split() == ["the", "fox", "<eos>"]
    assert "files left out: 1 (" in data.notes()[0]
    assert f"{name}: a " in data.notes()[0]


@pytest.mark.parametrize("packer", [gzip, bz2, lzma], ids=["gz", "bz2", "xz"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_a_packed_file_is_read_as_what_is_in_it(packer: Any, ending: str, pack: Pack, tmp_path: Path) -> None:
    row = {"txt": "the fox", "json": '[{"text": "the fox"}]', "jsonl": '{"text": "the fox"}\n'}[ending].encode()
    (tmp_path / f"a.{ending}").write_bytes(row)
    packed = tmp_path / f"a.{ending}.{ {gzip: 'gz', bz2: 'bz2', lzma: 'xz'}[packer] }"
    packed.write_bytes(packer.compress(row))
    assert tokens_of(pack(packed)) == tokens_of(pack(tmp_path / f"a.{ending}"))
    packed.write_bytes(packer.compress(row)[:-9])
    with pytest.raises(ConfigError, match=rf"{packed.name}: cannot be read: "):
        pack(packed)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_list_that_is_too_long_for_memory_is_refused_however_short_its_file_is(
    name: str, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "_LIST_BYTES_MAX", 1 << 20)
    rows = json.dumps([{"text": "the fox"}] * 60_000).encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    with pytest.raises(ConfigError, match="larger than 1 MiB.*give .jsonl instead"):
        pack(tmp_path / name)


def test_a_packed_file_without_a_name_for_what_is_in_it_can_be_named(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b'{"text": "the fox"}'))
    with pytest.raises(ConfigError, match=r"or give the file a name that says its format, such as \.jsonl\.gz"):
        pack(tmp_path / "a.gz")
    (tmp_path / "a.gz").rename(tmp_path / "a.jsonl.gz")
    assert text_of(pack(tmp_path / "a.jsonl.gz")).split() == ["the", "fox", "<eos>"]


def test_a_list_of_rows_is_read_where_it_is_named(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    path = tmp_path / "docs" / "a.json"
    path.write_text(json.dumps([{"text": "the fox"}, {"text": "the hen"}], indent=1))
    assert text_of(pack(path)).split() == ["the", "fox", "<eos>", "the", "hen", "<eos>"]
    with pytest.raises(ConfigError, match=r"a\.json: a \.json file is read only if its own path is given"):
        pack(tmp_path / "docs")
    for text, says in (
        ('{"text": "a"}\n{"text": "b"}', "a file with one object per line must have the ending .jsonl"),
        ('{"text": "a"}', "needs a list of rows"),
        ("[]", "needs a list of rows"),
        ('[{"text": 3}]', r"a\.json:1: 'text' is a int"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            pack(path)


def test_what_is_no_regular_file_is_refused_alone_and_left_out_of_a_directory(pack: Pack, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("the fox")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "gone.txt").symlink_to("nowhere")
    (folder / "circle.txt").symlink_to("circle.txt")
    (folder / "sub" / "up").symlink_to(folder)
    os.mkfifo(folder / "fifo.txt")
    for name, why in [("zero.txt", "not a regular file"), ("fifo.txt", "not a regular file"), ("gone.txt", "nowhere")]:
        with pytest.raises(ConfigError, match=rf"{name}: .*{why}"):
            pack(folder / name)
    with pytest.raises(ConfigError, match="circle.txt: Too many levels"):
        pack(folder / "circle.txt")
    data = pack(folder)
    assert text_of(data).split() == ["the", "fox", "<eos>"]
    assert "left out: 4 (" in data.notes()[0]


def test_linked_directories_are_read_and_hidden_ones_are_not(pack: Pack, tmp_path: Path) -> None:
    for name in ("docs", "docs/.git", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "docs" / ".git" / "config").write_text("the dog")
    (tmp_path / "more" / "a.txt").write_text("the hen")
    (tmp_path / "docs" / "link").symlink_to(tmp_path / "more")
    assert text_of(pack(tmp_path / "docs")).split() == ["the", "hen", "<eos>"]


def test_a_file_that_may_not_be_read_is_named(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("the fox")
    opened = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "a.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"--data .*a\.txt: cannot be read: Permission denied"):
        pack(tmp_path / "a.txt")


def test_names_that_would_command_a_terminal_are_shown_without_doing_so(pack: Pack, tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[2J\n.txt"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError) as caught:
        pack(path)
    assert str(caught.value).isprintable()


def test_text_that_the_tokenizer_does_not_know_is_refused(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("猫 犬 鳥\n" * 10)
    with pytest.raises(ConfigError, match="tokenizer knows none of the text"):
        pack(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "text", ["猫 猫 <eos>", "猫 猫 猫 猫 fox"], ids=["separators in it", "known words after the last sequence"]
)
def test_sequences_in_which_nothing_is_known_are_refused(text: str, pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text(text)
    with pytest.raises(ConfigError, match="tokenizer knows none of the"):
        pack(tmp_path / "other.txt", length=4)


def test_documents_that_nothing_parts_are_said(pack: Pack, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the fox"}\n{"text": "the hen"}\n')
    by = tokenizer()
    by.eos_token = None
    assert pack(tmp_path / "a.jsonl", by=by).notes() == [
        "the tokenizer has no end-of-text token, so no token separates one document from the next"
    ]
