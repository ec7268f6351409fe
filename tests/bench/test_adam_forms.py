"""`bench/adam_forms.py` measures every form that it names."""

from __future__ import annotations

from adam_forms import FORMATS, run_adam

from infinity import _native


def test_every_form_instruction_set_and_thread_count_has_a_row() -> None:
    isas = _native.supported_isas()
    report = run_adam(70_000, [1, 2], isas, 2)
    settings = {(isa, count) for isa in isas for count in (1, 2)}
    assert {(row.format, row.isa, row.threads) for row in report.results} == {
        (name, *setting) for name in FORMATS for setting in settings
    }
    assert all(row.parameters_per_s > 0 and row.of_bound > 0 for row in report.results)
    assert len(report.bound) == len(settings)
