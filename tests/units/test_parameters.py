"""The parameters of a unit: placeholders, views of a slot, or gathered copies; and the class of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from infinity.errors import ModelError
from infinity.units.parameters import ParameterViews
from infinity.units.released_parameters import ReleasedParameter
from tests.tiers.fakes import few
from tests.units.fakes import RELEASED, Slot, parameters_of, slot_of, unit_of

UNIT = unit_of(0, (1, 2))
NAMES = sorted(parameters_of(UNIT))


class Own(nn.Parameter):
    """A class of the user's."""


def adopted() -> ParameterViews:
    parameters = parameters_of(UNIT)
    parameters[NAMES[0]].__class__ = Own
    views = ParameterViews(UNIT, parameters, RELEASED)
    views.adopt(torch.device("cpu"))
    return views


def data_of(parameter: nn.Parameter) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


class ParametersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.views = adopted()
        self.slot: Slot | None = None
        self.content = 0.0
        self.copies: dict[str, torch.Tensor] = {}
        self.open = False

    @rule()
    def show(self) -> None:
        self.content += 1.0
        self.slot = slot_of(self.content, UNIT.weight_bytes)
        self.views.show(self.slot)

    @rule()
    def hide(self) -> None:
        self.views.hide()
        self.slot, self.open = None, False

    @rule()
    def open_up(self) -> None:
        self.views.open_up()
        self.open = True

    @rule()
    def close(self) -> None:
        self.views.close()
        self.open = False

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def gather(self, names: set[str]) -> None:
        copies = {name: torch.full(self.views.named[name].shape, -1.0) for name in names - self.copies.keys()}
        self.views.gather(copies, self.slot)
        self.copies |= copies

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def scatter(self, data: Any) -> None:
        names = data.draw(st.sets(st.sampled_from(sorted(self.copies)), min_size=1))
        self.views.scatter(names, self.slot)
        for name in names:
            del self.copies[name]

    @invariant()
    def the_data_is_what_was_asked_for_last(self) -> None:
        assert self.views.gathered == self.copies.keys()
        for name, parameter in self.views.named.items():
            data, expected = data_of(parameter), self.views.placeholders[name]
            if name in self.copies:
                expected = self.copies[name]
            elif self.slot is not None:
                expected = self.views.value_in(self.slot, name)
                assert (data == self.content).all()
            else:
                assert data.isnan().all()
            assert data.untyped_storage()._cdata == expected.untyped_storage()._cdata
            assert (data.shape, data.storage_offset()) == (expected.shape, expected.storage_offset())

    @invariant()
    def what_may_not_be_read_has_the_released_class(self) -> None:
        assert self.views.open == self.open
        for name, parameter in self.views.named.items():
            own = Own if name == NAMES[0] else nn.Parameter
            assert type(parameter) is (own if self.open or name in self.copies else RELEASED)
            assert isinstance(parameter, ReleasedParameter) == (type(parameter) is RELEASED)

    @invariant()
    def the_slot_knows_how_many_views_count_for_nothing(self) -> None:
        if self.slot is not None:
            assert self.slot.expected == len(NAMES) - len(self.copies)

    @invariant()
    def nobody_touched_them(self) -> None:
        self.views.require_untouched()


TestParameters = ParametersMachine.TestCase
TestParameters.settings = few


def test_a_view_of_a_slot_has_the_values_of_its_parameter_alone() -> None:
    views = adopted()
    slot = Slot(torch.arange(UNIT.weight_bytes // 4, dtype=torch.float32).view(torch.uint8))
    views.show(slot)
    views.open_up()
    values = torch.cat([views.named[spec.name].detach() for group in UNIT.groups for spec in group.specs])
    assert torch.equal(values, torch.arange(UNIT.weight_bytes // 4, dtype=torch.float32))


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_what_changed_a_parameter_behind_our_back_is_told(how: str) -> None:
    views = adopted()
    views.show(slot_of(1.0, UNIT.weight_bytes))
    views.open_up()
    views.require_untouched()
    changed = views.named[NAMES[1]]
    with torch.no_grad():
        if how == "in place":
            changed.add_(1)
        else:
            changed.data = changed.data.clone()
    with pytest.raises(ModelError, match=f"parameter '{NAMES[1]}' of unit '0' was changed outside infinity"):
        views.require_untouched()
    views.gather({NAMES[1]: torch.zeros_like(changed)}, None)
    views.require_untouched()


def test_autograd_that_saves_a_parameter_keeps_the_slot() -> None:
    views = adopted()
    views.show(slot_of(1.0, UNIT.weight_bytes))
    views.open_up()
    assert not views.saved_by_autograd()  # outside a backward pass hooks pack what it saves
    views.close()
    seen = []

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            views.open_up()
            parameter = views.named[NAMES[1]]
            seen.append(views.saved_by_autograd())
            with torch.enable_grad():
                squared = parameter * parameter
            seen.append(views.saved_by_autograd())
            del squared
            seen.append(views.saved_by_autograd())
            return gradients[0]

    Backward.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [False, True, False]


def test_a_parameter_that_was_set_to_itself_is_untouched_and_a_change_before_that_is_told() -> None:
    views = adopted()
    views.show(slot_of(1.0, UNIT.weight_bytes))
    views.open_up()
    parameter = views.named[NAMES[1]]

    def set_to_itself() -> None:
        with torch.no_grad():
            parameter.set_(parameter)
        views.set_to_itself(NAMES[1])

    set_to_itself()
    set_to_itself()
    views.require_untouched()
    with torch.no_grad():
        parameter.add_(1)
    set_to_itself()
    with pytest.raises(ModelError, match=f"parameter '{NAMES[1]}' of unit '0' was changed outside infinity"):
        views.require_untouched()
