"""The picture of the README is drawn from the files of bench/results."""

from __future__ import annotations

import re

from tests.docs.pages import tool


def test_the_picture_is_what_the_script_draws() -> None:
    chart = tool("chart")
    assert chart.PICTURE.read_text() == chart.picture(), "run `make docs`"


def test_bars_are_as_long_as_steps_take() -> None:
    chart = tool("chart")
    for panel in (chart.on_gpu(), chart.on_cpu()):
        drawn = "".join(chart._panel(panel, 0))
        lengths = [float(width) for width in re.findall(r'width="([0-9.]+)" height="16"', drawn)]
        slowest = max(bar.seconds for bar in panel.bars)
        assert lengths == [round(bar.seconds / slowest * chart.BARS, 1) for bar in panel.bars]
