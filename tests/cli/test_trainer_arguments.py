"""The schedule of a run that goes on."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from infinity.cli.trainer_arguments import take_up_rates


def test_another_end_of_the_run_changes_the_next_rate_and_what_trackers_are_told_of_it() -> None:
    made = [torch.optim.SGD([torch.zeros(1)], lr=8.0) for _ in range(2)]
    ended, longer = (get_scheduler("linear", each, 0, steps) for each, steps in zip(made, (4, 8), strict=True))
    for _ in range(2):
        made[0].step()
        ended.step()
    longer.load_state_dict(ended.state_dict())
    assert longer.get_last_lr() == [4.0]
    take_up_rates(made[1], longer)
    assert longer.get_last_lr() == [made[1].param_groups[0]["lr"]] == [6.0]
    made[1].step()
    longer.step()
    assert made[1].param_groups[0]["lr"] == pytest.approx(5.0)
