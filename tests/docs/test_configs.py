"""Swap configs of the README and the pages, whole ones and single keys in the text, are ones that infinity takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from infinity.config import SwapConfig, load_config
from infinity.strict_parsers import parse_yaml
from tests.docs.pages import ROOT, Block, blocks, pages, text_without_blocks


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_a_swap_config_is_valid(block: Block, tmp_path: Path) -> None:
    assert load_config(parse_yaml(block.text.replace("/mnt/", f"{tmp_path}/"))) != SwapConfig()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_key_in_the_text_has_a_value_that_is_available(page: Path) -> None:
    for code in re.findall(r"`([^`]+)`", text_without_blocks(page)):
        found = re.fullmatch(r"(\w+): (\w+)", " ".join(code.split()))
        if found and found[1] in SwapConfig.model_fields and found[2] != "N":
            load_config(parse_yaml(code))
