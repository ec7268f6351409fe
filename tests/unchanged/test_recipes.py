"""Each recipe of examples/recipes trains a small model of the same class as its script does without infinity."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from infinity.cli.main import main
from infinity.config import load_config
from tests.docs.pages import blocks
from tests.runtime.test_frozen import replaced
from tests.unchanged import configs
from tests.unchanged.results import history_of, weights_of
from tests.unchanged.scripts import ROOT, SCRIPTS, STEPS, Job

FOLDER = ROOT / "examples" / "recipes"
RECIPES = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
COMMENT = re.compile(
    r"# .*\. For (?:one GPU|a server) .*\n# MODEL=\.\.\. DATA=(?P<data>\w+)\.jsonl OUTPUT=out (?P<command>.*)\n"
)

KEPT = pytest.mark.long(kept="a swap config of a recipe, with its script")

Plain = Callable[..., Job]


def comment_of(recipe: Path) -> re.Match[str]:
    found = COMMENT.match(recipe.read_text())
    assert found is not None, recipe
    return found


def job_of(recipe: Path, plain: Plain, directory: Path) -> Job:
    """Return the command of the recipe's comment, which was not started."""
    command = comment_of(recipe)["command"]
    script = SCRIPTS[command.split()[-1].removesuffix(".py")]
    ranks = int(command.split()[2]) if command.startswith("torchrun --nproc-per-node ") else 1
    config = configs.of_recipe(recipe, directory, reference=script.reference, ranks=ranks)
    return replace(plain(script, "float32", ranks), output=directory / "output", config=config)


def decoded(inputs: Path, directory: Path) -> Path:
    """Copy the inputs, with a model whose blocks have the values that their NF4 form decodes to."""
    shutil.copytree(inputs, directory, ignore=shutil.ignore_patterns("text", "hf"))
    model = AutoModelForCausalLM.from_pretrained(inputs / "checkpoint").requires_grad_(False)
    replaced(model, "model.layers", "nf4")
    model.save_pretrained(directory / "checkpoint")
    return directory


def test_there_are_six_recipes_each_of_which_says_its_machine_and_its_command() -> None:
    assert set(RECIPES) == {"full", "lora", "dpo", "reward", "ranks", "deepspeed"}
    for recipe in RECIPES.values():
        comment = comment_of(recipe)
        *launcher, config, script = comment["command"].split()
        assert launcher in (["infinity", "run"], ["torchrun", "--nproc-per-node", "2", "-m", "infinity.run"])
        assert config == recipe.name
        assert comment["data"] == SCRIPTS[script.removesuffix(".py")].data
        load_config(recipe)


def test_the_page_shows_the_recipes_as_they_are() -> None:
    shown = {block.marks["file"]: block.text for block in blocks("yaml", "json") if block.page == "docs/recipes.md"}
    assert shown == {path.name: path.read_text() for path in FOLDER.iterdir() if path.suffix in (".yaml", ".json")}


def test_the_recipe_from_deepspeed_is_what_convert_makes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(FOLDER)
    assert main(["convert", "deepspeed.json"]) == 0
    assert RECIPES["deepspeed"].read_text().partition("\n\n")[2] == capsys.readouterr().out


def require_printed(page: str, log: str) -> None:
    """Check that each line of the block of text was printed, with some text in place of "…"."""
    block = next(each for each in blocks("text") if each.page == page)
    printed = [re.sub(r"^\s*\x1b\[A", "", line) for line in log.splitlines()]  # a bar of tqdm before it
    for line in block.text.splitlines():
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        assert any(pattern.fullmatch(each) for each in printed), line


@pytest.mark.cpu_only("one of them has several ranks")
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, marks=KEPT if path.stem == "full" else pytest.mark.long) for path in RECIPES.values()],
    ids=RECIPES,
)
def test_losses_and_weights_are_those_of_the_plain_script(recipe: Path, plain: Plain, tmp_path: Path) -> None:
    job = job_of(recipe, plain, tmp_path)
    expected = plain(job.script, "float32", job.ranks)
    if load_config(job.config).frozen == "nf4":
        expected = replace(expected, inputs=decoded(expected.inputs, tmp_path / "decoded"), output=tmp_path / "plain")
        expected.run()
    job.run()
    if recipe.stem == "full":
        require_printed("docs/recipes.md", job.log.read_text())
    ours, theirs = history_of(job), history_of(expected)
    assert {step for step, name in ours if name == "loss"} == set(range(1, STEPS + 1))
    assert ours.keys() == theirs.keys()
    for (step, name), value in ours.items():
        allowed = 2e-5 if name == "grad_norm" else 1e-6 if job.ranks == 1 else 1e-5
        assert value == pytest.approx(theirs[step, name], rel=allowed, abs=allowed), (step, name)
    weights = weights_of(expected)
    for name, weight in weights_of(job).items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5)
