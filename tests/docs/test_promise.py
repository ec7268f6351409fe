"""Each page that says what is exact says the same."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize("page", ["README.md", "docs/exact.md", "docs/unchanged.md"])
def test_losses_are_compared_with_plain_torch_in_the_same_words(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert "the losses of plain torch to about 1e-6 in fp32" in text
    assert re.search("(?:losses|weights) (?:equal|are) those of plain torch", text) is None
