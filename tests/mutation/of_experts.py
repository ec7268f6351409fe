"""Mutants of mixtures of experts: routing, idle experts, adapters, and experts in an encoded form."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_BANK = "infinity/runtime/experts.py"
_ADAPTERS = "infinity/runtime/expert_adapters.py"
_MERGED = "infinity/checkpoint/merged_adapters.py"
_ENCODED = "infinity/checkpoint/quantized_files.py"
_BANKS = ("tests/runtime/test_experts.py",)
_FILES = ("tests/checkpoint/test_encoded_experts.py",)

OF_EXPERTS = [
    Mutant(
        "a recomputation that routes other tokens is an error",
        _BANK,
        "            if not torch.equal(chosen, self._chosen):\n",
        "            if False:\n",
        _BANKS,
    ),
    Mutant(
        "a backward does not use experts that were changed since the forward",
        _BANK,
        "        if version_of(inputs[2]) != ctx.version:\n",
        "        if False:\n",
        _BANKS,
    ),
    Mutant(
        "the shared experts of a recomputation are computed without the others",
        _BANK,
        "        if only_saved_tensors_matter():\n",
        "        if False:\n",
        _BANKS,
    ),
    Mutant(
        "an expert without tokens has a gradient of zeros",
        _BANK,
        "                idle.extend(tile.parameters())\n",
        "                pass\n",
        _BANKS,
    ),
    Mutant(
        "a backward does not use adapters that were changed since the forward",
        _ADAPTERS,
        "        if self._versions_now() != self._versions:\n",
        "        if False:\n",
        _BANKS,
    ),
    Mutant(
        "each tile has the adapters of its own experts",
        _ADAPTERS,
        "for weight in each.narrow(self._begin, self._end)]\n",
        "for weight in each.narrow(0, self._end - self._begin)]\n",
        _BANKS,
    ),
    Mutant(
        "merging reads the adapters beside the experts",
        _MERGED,
        "        found = {unit.index} | {",
        "        found = {unit.index} or {",
        _BANKS,
    ),
    Mutant(
        "the encoded form of a tile is that of its own rows",
        "infinity/state/frozen_codecs.py",
        "        remember(part, known.rows(begin, end))\n",
        "        remember(part, known.rows(0, end - begin))\n",
        _FILES,
    ),
    Mutant(
        "experts are joined in the order of the model",
        _ENCODED,
        "        for matrix in matrices[begin:end]:\n",
        "        for matrix in reversed(matrices[begin:end]):\n",
        _FILES,
    ),
]
