"""A LightningModule that knows nothing of infinity trains the same with its model offloaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import infinity
from infinity.cli.main import main
from infinity.coordinator import registry
from infinity.integrations.strategy import _pins_of
from infinity.optim.adamw import AdamW
from infinity.runtime.pins import pinned
from tests.conftest import weights_of
from tests.integrations.conftest import Launch
from tests.models import gpt2

if TYPE_CHECKING:
    import lightning.pytorch as pl

Rows = list[dict[str, torch.Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Once, before `launch` changes anything."""
    import lightning.pytorch  # noqa: F401


def made(name: str, *arguments: Any, **options: Any) -> Any:
    """Return a module of lightning_modules."""
    from tests.integrations import lightning_modules

    return getattr(lightning_modules, name)(*arguments, **options)


def language(source: Path | nn.Module) -> Any:
    """Fine-tunes a model that it loads, or that it is given."""
    return made("Language", source)


def strategy(swap: dict[str, Any]) -> Any:
    from infinity.integrations.lightning import InfinityStrategy

    return InfinityStrategy(swap)


def trainer(directory: Path, **options: Any) -> pl.Trainer:
    import lightning.pytorch as pl

    given: dict[str, Any] = {
        "accelerator": "cpu",
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(directory),
    }
    return pl.Trainer(**(given | options))


def loader(rows: Rows) -> DataLoader[Any]:
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def saving(directory: Path, **options: Any) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    given: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    return {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(directory, **(given | options))]}


def test_a_module_whose_parameters_are_in_memory_is_offloaded_itself(
    rows: Rows, swap: dict[str, Any], tmp_path: Path
) -> None:
    modules, logits = [made("Small"), made("Small")], []
    for module, chosen in zip(modules, ("auto", strategy(swap)), strict=True):
        one = trainer(tmp_path, strategy=chosen)
        one.fit(module, loader(rows))
        logits.append(torch.cat(one.predict(module, loader(rows[:8]))))
    assert registry.is_offloaded(modules[1])
    torch.testing.assert_close(modules[1].losses, modules[0].losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-5, atol=1e-5)
    infinity.close(modules[1])


def test_what_a_callback_unfreezes_later_trains_as_in_plain_lightning(
    rows: Rows, swap: dict[str, Any], tmp_path: Path
) -> None:
    modules, embeddings = [made("TrainsWhatIsNotFrozen"), made("TrainsWhatIsNotFrozen")], []
    for module, chosen in zip(modules, ("auto", strategy(swap)), strict=True):
        options = {"max_steps": -1, "max_epochs": 3, "callbacks": [made("Unfreezing")]}
        trainer(tmp_path, strategy=chosen, **options).fit(module, loader(rows[:8]))
        embeddings.append(module.state_dict()["embed.weight"])
    assert len(modules[0].losses) == 6
    torch.testing.assert_close(modules[1].losses, modules[0].losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*embeddings, rtol=1e-5, atol=1e-5)
    assert not torch.equal(embeddings[0], made("Small").embed.weight)
    infinity.close(modules[1])


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_unfreezes_goes_on_as_in_plain_lightning(
    epochs: int, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    """Before and after it did. Lightning has the param groups again, and leaves frozen what was unfrozen."""
    losses = []
    for name, context in (("plain", nullcontext), ("offloaded", launch)):
        for max_epochs, ckpt_path in ((epochs, None), (3, tmp_path / name / f"step={2 * epochs}.ckpt")):
            with context():
                module = made("TrainsWhatIsNotFrozen")
                options = saving(tmp_path / name, every_n_train_steps=2 * epochs)
                options |= {"max_steps": -1, "max_epochs": max_epochs}
                options["callbacks"].append(made("Unfreezing"))
                trainer(tmp_path, **options).fit(module, loader(rows[:8]), ckpt_path=ckpt_path)
        losses.append(module.losses)
    assert len(losses[0]) == 6 - 2 * epochs
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)


WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipping, accumulation": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    "validation": {"val_check_interval": 2},
    "named": {"strategy": "infinity"},
}


@pytest.mark.covering(strength=1, most=3)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_the_plain_script(
    way: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    found = []
    for context in (nullcontext(), launch()):
        with context as run:
            module = language(checkpoint)
            options = WAYS[way] if run is not None else {k: v for k, v in WAYS[way].items() if k != "strategy"}
            one = trainer(tmp_path, **options)
            one.fit(module, loader(rows), loader(rows[:8]))
            assert (run is not None) == registry.is_offloaded(module.model)
            metrics = [float(one.callback_metrics["val"])] if "val" in one.callback_metrics else []
            found.append(module.losses + metrics)
    assert len(found[0]) >= 6
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("launched", [True, False], ids=["launched", "strategy"])
def test_lower_precision_is_near_the_plain_script(
    precision: str, launched: bool, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, swap: dict[str, Any]
) -> None:
    found = []
    for context in (nullcontext(), launch() if launched else nullcontext()):
        with context:
            module = language(checkpoint)
            chosen = strategy(swap) if found and not launched else "auto"
            one = trainer(tmp_path, precision=precision, strategy=chosen, gradient_clip_val=0.5)
            one.fit(module, loader(rows))
            found.append(module.losses)
            if len(found) == 2:
                assert {value.dtype for value in weights_of(module.model).values()} == {torch.bfloat16}
                infinity.close(module.model)
    torch.testing.assert_close(found[1], found[0], rtol=2e-2, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_fp16_is_near_the_plain_script(
    precision: str, checkpoint: Path, rows: Rows, tmp_path: Path, swap: dict[str, Any]
) -> None:
    """The losses are scaled in mixed precision. Given by its name, the precision is bf16 for Lightning on a CPU."""
    from lightning.pytorch.plugins import MixedPrecision

    found = []
    for chosen in ("auto", strategy(swap)):
        module = made("InHalf", checkpoint)
        mixed = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
        one = trainer(tmp_path, strategy=chosen, **(mixed if precision == "16-mixed" else {"precision": precision}))
        one.fit(module, loader(rows[:2] * 16))
        assert one.precision_plugin.precision == precision
        found.append(module.losses)
    assert {value.dtype for value in weights_of(module.model).values()} == {torch.float16}
    infinity.close(module.model)
    assert found[0][-1] < 0.97 * found[0][0]
    torch.testing.assert_close(found[1], found[0], rtol=5e-3, atol=5e-3)


def test_infinitys_own_optimizers_work(rows: Rows, swap: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    module = made("Lion", checkpoint)
    trainer(tmp_path, strategy=strategy(swap)).fit(module, loader(rows))
    assert module.losses[-1] < module.losses[0]
    infinity.close(module.model)


def test_pytorch_lightning_is_the_same(rows: Rows, launch: Launch, tmp_path: Path) -> None:
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = made("Small")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.small.training_step(batch, index)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    with launch():
        module = Other()
        one = pytorch_lightning.Trainer(
            accelerator="cpu", max_steps=4, logger=False, enable_progress_bar=False, default_root_dir=tmp_path
        )
        one.fit(module, loader(rows))
        assert registry.is_offloaded(module)


def test_validating_and_predicting_before_training(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    found = []
    for context in (nullcontext(), launch()):
        with context:
            module, one = language(checkpoint), trainer(tmp_path)
            before = one.validate(module, loader(rows[:8]), verbose=False)[0]["val"]
            logits = torch.cat(one.predict(module, loader(rows[:8])))
            one.fit(module, loader(rows))
            found.append([before, *module.losses, *logits.flatten()[:99].tolist()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("launched", [True, False], ids=["launched", "strategy"])
def test_fit_goes_on_from_a_checkpoint_to_the_bits_of_the_uninterrupted_run(
    launched: bool, dropout: float, rows: Rows, launch: Launch, swap: dict[str, Any], tmp_path: Path
) -> None:
    """From the end of the first epoch."""
    torch.manual_seed(0)
    gpt2(dropout)[0].save_pretrained(tmp_path / "model")
    ends = []
    for ckpt_path in (None, str(tmp_path / "step=4.ckpt")):
        with launch() if launched else nullcontext():
            torch.manual_seed(1)
            module = language(tmp_path / "model")
            chosen = "auto" if launched else strategy(swap)
            one = trainer(tmp_path, strategy=chosen, **saving(tmp_path, every_n_train_steps=4))
            one.fit(module, DataLoader(rows[:16], batch_size=4, shuffle=True), ckpt_path=ckpt_path)  # type: ignore[arg-type]
            assert one.global_step == 6
            ends.append((module.losses[-2:], weights_of(module.model)))
            assert len(module.losses) == (6 if ckpt_path is None else 2)
            infinity.close(module.model)
    assert ends[1][0] == ends[0][0]
    assert all(torch.equal(value, ends[0][1][name]) for name, value in ends[1][1].items())


def test_old_checkpoints_let_their_generations_go(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch():
        module = language(checkpoint)
        trainer(tmp_path, **saving(tmp_path, save_top_k=2, monitor="step", mode="max", save_last="link")).fit(
            module, loader(rows)
        )
        folders = {tmp_path / "step=4.ckpt.infinity": 4, tmp_path / "step=6.ckpt.infinity": 6}
        assert pinned(module.model) == folders
        assert set(tmp_path.glob("*.infinity")) == set(folders)
        expected = weights_of(module.model)
    again = type(module).load_from_checkpoint(tmp_path / "step=6.ckpt", source=checkpoint, weights_only=False)
    assert all(torch.equal(again.model.get_parameter(name), value) for name, value in expected.items())
    with launch():
        module = language(checkpoint)
        options = saving(tmp_path, save_top_k=2, monitor="step", mode="max", save_last="link")
        trainer(tmp_path, max_steps=8, **options).fit(module, loader(rows), ckpt_path=tmp_path / "last.ckpt")
        assert len(module.losses) == 2


@pytest.mark.long
def test_fit_goes_on_with_more_files_kept_in_the_room_that_the_store_has(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    def options(kept: int) -> dict[str, Any]:
        return saving(tmp_path, save_top_k=kept, monitor="step", mode="max")

    with launch():
        trainer(tmp_path, max_steps=4, **options(1)).fit(language(checkpoint), loader(rows))
    with launch():
        module = language(checkpoint)
        trainer(tmp_path, max_steps=8, **options(3)).fit(module, loader(rows), ckpt_path=tmp_path / "step=4.ckpt")
        assert pinned(module.model) == {tmp_path / f"step={step}.ckpt.infinity": step for step in (6, 8)}
    assert (tmp_path / "step=4.ckpt.infinity" / "portable").is_dir()


@pytest.mark.long
def test_of_checkpoints_that_are_all_kept_older_ones_hold_a_copy(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        module = language(checkpoint)
        trainer(tmp_path, **saving(tmp_path)).fit(module, loader(rows[:8]))
        expected = weights_of(module.model)
    assert (tmp_path / "step=2.ckpt.infinity" / "portable").is_dir()
    with launch(nvme={"paths": [str(tmp_path / "other")]}):
        module = language(checkpoint)
        trainer(tmp_path).fit(module, loader(rows[:8]), ckpt_path=tmp_path / "step=2.ckpt")
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(module.model).items())


def test_the_best_checkpoint_can_be_validated_after_training(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        module = language(checkpoint)
        options = saving(tmp_path, monitor="val", mode="max", save_top_k=1, every_n_train_steps=None)
        one = trainer(tmp_path, val_check_interval=2, **options)
        one.fit(module, loader(rows), loader(rows[:8]))
        best = one.checkpoint_callback.best_model_score
        assert float(one.callback_metrics["val"]) < float(best)
        again = one.validate(module, loader(rows[:8]), ckpt_path="best", weights_only=False, verbose=False)
        assert again[0]["val"] == pytest.approx(float(best), rel=1e-6)


def test_weights_that_do_not_fit_in_memory_stay_in_the_generation(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinity.integrations.strategy.fits_memory", lambda root: not registry.is_offloaded(root))
    ends = []
    for ckpt_path in (None, tmp_path / "step=4.ckpt"):
        with launch():
            module = language(checkpoint)
            trainer(tmp_path, **saving(tmp_path, save_top_k=-1, every_n_train_steps=2)).fit(
                module, loader(rows[:16]), ckpt_path=ckpt_path
            )
            ends.append(module.losses[-2:])
        assert not torch.load(tmp_path / "step=6.ckpt", weights_only=False)["state_dict"]
    assert ends[1] == ends[0]
    with pytest.raises(infinity.ResumeError, match="has no weights"), launch(nvme={"paths": [str(tmp_path / "b")]}):
        trainer(tmp_path).validate(language(checkpoint), loader(rows[:16]), ckpt_path=ckpt_path)


@pytest.mark.parametrize(
    ("options", "pins"),
    [
        ({"save_top_k": 2, "monitor": "val"}, 3),
        ({"save_top_k": -1}, 2),
        ({"save_top_k": 1, "save_last": True}, 3),
        ({"save_top_k": 1, "save_last": "link"}, 2),
        ({"save_top_k": 0, "save_last": "link"}, 1),
        ({"save_top_k": 0}, 0),
        ({"save_top_k": 3, "monitor": "val", "save_weights_only": True}, 0),
    ],
    ids=str,
)
def test_there_is_room_for_as_many_generations_as_files_are_kept(options: dict[str, Any], pins: int) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    assert _pins_of(ModelCheckpoint(**options)) == pins


def test_clipping_by_value_works_as_its_refusal_says(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    found = []
    for context in (nullcontext(), launch()):
        with context:
            module = made("ClippedByValue", checkpoint)
            trainer(tmp_path).fit(module, loader(rows))
            found.append(module.losses)
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, "inf"])
def test_grad_norm_is_that_of_a_model_in_memory(order: float | str, offload: Any) -> None:
    from lightning.pytorch.utilities import grad_norm

    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model, batch = gpt2()
        model = offload(model, "host") if offloads else model
        model(**batch).loss.backward()
        found.append({name: float(norm) for name, norm in grad_norm(model, order).items()})
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_early_stopping_stops(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping

    with launch():
        one = trainer(
            tmp_path, max_steps=20, val_check_interval=2, callbacks=[EarlyStopping("val", 1.0, 1, mode="min")]
        )
        one.fit(language(checkpoint), loader(rows), loader(rows[:8]))
        assert one.global_step < 8


@pytest.mark.long
def test_a_run_that_ended_well_leaves_the_store_only_where_checkpoints_need_it(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "infinity")
    with launch():
        trainer(tmp_path).fit(language(checkpoint), loader(rows))
    assert not list((tmp_path / "swap").glob("*.infinity*"))
    with launch():
        trainer(tmp_path, **saving(tmp_path)).fit(language(checkpoint), loader(rows))
    assert list((tmp_path / "swap").glob("generation-*.infinity"))
    assert "names of the states" not in caplog.text


# -- what is refused --------------------------------------------------------------------------------------------------


def calling(name: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
    """With a callback of Lightning."""

    def options() -> dict[str, Any]:
        import lightning.pytorch.callbacks as of_lightning

        return {"callbacks": [getattr(of_lightning, name)(*arguments)]}

    return options


def fp16_and_clipping() -> dict[str, Any]:
    from lightning.pytorch.plugins import MixedPrecision

    return {"plugins": MixedPrecision("16-mixed", "cpu"), "gradient_clip_val": 1.0}


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "clipping by value": (
        lambda: {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        "algorithm='norm'.*configure_gradient_clipping",
    ),
    "another strategy": (lambda: {"strategy": "ddp"}, r"leave strategy= out"),
    "several devices": (lambda: {"devices": 2}, r"devices=1"),
    "several machines": (lambda: {"num_nodes": 2}, "num_nodes=2"),
    "double": (lambda: {"precision": "64-true"}, "bf16-mixed"),
    "fp16 and clipping": (fp16_and_clipping, "bf16-mixed"),
    "finding a learning rate": (calling("LearningRateFinder"), r"LambdaLR\(optimizer, lambda step: 10 \*\*"),
    "averaging": (calling("EMAWeightAveraging"), r"WeightAveraging: .* infinity\.state_dict\(model\)"),
    "averaging stochastically": (calling("StochasticWeightAveraging", 1e-2), r"infinity\.state_dict\(model\)"),
    "pruning": (calling("ModelPruning", "l1_unstructured"), "Prune the saved model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_work_names_the_fix(
    what: str, checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    options, fix = REFUSED[what]
    with launch(), pytest.raises(infinity.ConfigError, match=fix):
        trainer(tmp_path, **options()).fit(language(checkpoint), loader(rows))


def test_finding_a_batch_size_is_done_by_runs_of_their_own_as_the_error_says(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = calling("BatchSizeFinder")()
    with launch(), pytest.raises(infinity.ConfigError, match="infinity plan --batch-size"):
        trainer(tmp_path, **options).fit(made("OwnData", checkpoint, rows))
    sizes = ["--batch-size", "8", "--sequence-length", "16"]
    assert main(["plan", "--model", str(checkpoint), "--machine", "consumer", *sizes]) == 0
    assert capsys.readouterr().out.startswith("fits: ")
    with launch():
        module = made("OwnData", checkpoint, rows)
        module.batch_size = 8
        trainer(tmp_path, max_steps=2).fit(module)
        assert len(module.losses) == 2


def test_a_trainer_without_the_strategy_that_is_refused_trains(rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch(), pytest.raises(infinity.ConfigError, match="leave strategy= out, and set devices=1"):
        trainer(tmp_path, strategy="ddp", devices=2)
    with launch():
        module = made("Small")
        trainer(tmp_path, devices=1, max_steps=2).fit(module, loader(rows))
        assert registry.is_offloaded(module)


@pytest.mark.parametrize("way", ["bf16-mixed", "max_grad_norm"])
def test_what_clips_in_fp16_or_after_it_trains_as_the_refusal_says(
    way: str, checkpoint: Path, rows: Rows, swap: dict[str, Any], tmp_path: Path
) -> None:
    refused = fp16_and_clipping()
    with pytest.raises(infinity.ConfigError, match=r"precision='bf16-mixed', or infinity.AdamW\(..., max_grad_norm="):
        trainer(tmp_path, strategy=strategy(swap), **refused).fit(language(checkpoint), loader(rows))
    clips_itself = way == "max_grad_norm"
    module = made("Clipping" if clips_itself else "Language", checkpoint)
    chosen = {"plugins": refused["plugins"]} if clips_itself else {"precision": way, "gradient_clip_val": 1e-3}
    trainer(tmp_path, strategy=strategy(swap), max_steps=2, **chosen).fit(module, loader(rows))
    assert len(module.losses) == 2
    infinity.close(module.model)


def test_a_learning_rate_is_found_by_a_run_of_its_own(rows: Rows, swap: dict[str, Any], tmp_path: Path) -> None:
    """The error's advice works, in the steps of Tuner.lr_find."""
    from lightning.pytorch.tuner import Tuner

    found, mine = made("GrowingRate", None), made("GrowingRate", lambda step: 1000 ** ((step + 1) / 8) if step else 1.0)
    options: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 1e-1, "num_training": 8, "early_stop_threshold": None}
    Tuner(trainer(tmp_path, max_steps=8)).lr_find(found, loader(rows), update_attr=False, **options)
    trainer(tmp_path, max_steps=8, strategy=strategy(swap)).fit(mine, loader(rows))
    torch.testing.assert_close(mine.losses, found.losses[:8], rtol=1e-6, atol=1e-6)
    infinity.close(mine)


def test_a_callback_of_ones_own_averages_weights(rows: Rows, swap: dict[str, Any], tmp_path: Path) -> None:
    """The error's advice gives the result of Lightning's own callback."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    theirs, mine = made("Small"), made("Small")
    trainer(tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(theirs, loader(rows))
    averaging = made("Averaging")
    trainer(tmp_path, strategy=strategy(swap), callbacks=[averaging]).fit(mine, loader(rows))
    assert averaging.averages.keys() == dict(theirs.named_parameters()).keys()
    for name, average in averaging.averages.items():
        torch.testing.assert_close(average, theirs.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    infinity.close(mine)


def test_a_plain_checkpoint_is_refused(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    trainer(tmp_path, **saving(tmp_path)).fit(language(checkpoint), loader(rows))
    with launch(), pytest.raises(infinity.ResumeError, match=r"step=6\.ckpt\.infinity.*infinity\.json"):
        trainer(tmp_path).fit(language(checkpoint), loader(rows), ckpt_path=tmp_path / "step=6.ckpt")


def test_going_back_in_the_same_process_is_refused(
    checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path
) -> None:
    with launch():
        module = language(checkpoint)
        trainer(tmp_path, **saving(tmp_path)).fit(module, loader(rows))
        with pytest.raises(infinity.ModelError, match="Resume in a new process"):
            trainer(tmp_path).fit(module, loader(rows), ckpt_path=tmp_path / "step=4.ckpt")


def test_the_launchers_resume_names_ckpt_path(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch():
        trainer(tmp_path, **saving(tmp_path)).fit(language(checkpoint), loader(rows))
    told = f"trainer.fit\\(..., ckpt_path='{tmp_path}/step=6.ckpt'\\)"
    with launch(), pytest.raises(infinity.StoreNotEmptyError, match=told):
        trainer(tmp_path).fit(language(checkpoint), loader(rows))
    with launch(resume=tmp_path / "step=6.ckpt.infinity"), pytest.raises(infinity.ConfigError, match="ckpt_path="):
        trainer(tmp_path).fit(language(checkpoint), loader(rows))
    with launch():
        again = trainer(tmp_path, max_steps=7)
        again.fit(language(checkpoint), loader(rows), ckpt_path=tmp_path / "step=6.ckpt")
        assert again.global_step == 7


def test_two_swap_configs_are_refused(launch: Launch, swap: dict[str, Any]) -> None:
    with launch():
        with pytest.raises(infinity.ConfigError, match="leave one out"):
            strategy(swap)
        strategy(None)
    strategy(swap)


def test_two_optimizers_by_hand_train_as_in_plain_lightning(rows: Rows, launch: Launch, tmp_path: Path) -> None:
    found = []
    for context in (nullcontext(), launch()):
        with context:
            torch.manual_seed(0)
            module = made("TwoOptimizers", net=nn.Sequential(nn.Embedding(96, 32), nn.Linear(32, 96)))
            trainer(tmp_path, max_steps=12).fit(module, loader(rows))
            found.append(module.losses)
    assert len(found[0]) == 6
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_optimizing_layers_of_the_module_itself_by_hand_is_refused(rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch(), pytest.raises(infinity.ConfigError, match=r"self\.net = Net"):
        trainer(tmp_path).fit(made("TwoOptimizers", embed=nn.Embedding(96, 32), head=nn.Linear(32, 96)), loader(rows))


def test_the_optimizer_is_infinitys(checkpoint: Path, rows: Rows, launch: Launch, tmp_path: Path) -> None:
    with launch():
        one = trainer(tmp_path)
        one.fit(language(checkpoint), loader(rows))
        assert type(one.optimizers[0]) is AdamW
