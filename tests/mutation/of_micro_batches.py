"""Mutants of infinity.backward and of the chunked loss."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_TESTS = "tests/runtime/test_micro_batches.py"
_CHAINS = "tests/runtime/test_stage_chain.py"
_LANES = "tests/runtime/test_pausable_calls.py"
_LOSS = "tests/runtime/test_cross_entropy.py"
_CHUNKED = "tests/integrations/test_chunked_loss.py"
_VERTICAL = "infinity/runtime/vertical_micro_batches.py"
_CHAIN = "infinity/runtime/stage_chain.py"
_MICRO = "infinity/runtime/micro_batches.py"

OF_MICRO_BATCHES = [
    Mutant(
        "gradients come in another order of micro-batches",
        _VERTICAL,
        "                for index, forward in numbered:\n",
        "                for index, forward in reversed(numbered):\n",
        (_TESTS, "-k", "both_orders"),
    ),
    Mutant(
        "micro-batches share their random numbers",
        _VERTICAL,
        "        with self._streams.of(self._numbers[index]):\n            forward.resume()\n",
        "        if True:\n            forward.resume()\n",
        (_TESTS, "-k", "both_orders"),
    ),
    Mutant(
        "learning draws random numbers",
        _MICRO,
        "            with streams.unchanged(0):\n",
        "            with streams.of(0):\n",
        (_TESTS, "-k", "both_orders"),
    ),
    Mutant(
        "learning changes buffers",
        _MICRO,
        "            buffers.put_back()\n",
        "            pass\n",
        (_CHAINS, "-k", "a_buffer or while_the_stages_are_learned"),
    ),
    Mutant(
        "updates begin after any micro-batch",
        _VERTICAL,
        "for unit in units if is_last and ",
        "for unit in units if ",
        (_TESTS, "-k", "updates_begin"),
    ),
    Mutant(
        "a weight of several stages is complete after the first",
        _VERTICAL,
        "if is_last and self._first_stage(unit) == stage]",
        "if is_last]",
        (_CHAINS, "-k", "begins_after_both"),
    ),
    Mutant(
        "edges past a cut do not matter",
        _CHAIN,
        "                if not (is_cut and upper in kept)\n",
        "                if False\n",
        (_CHAINS, "-k", "goes_past"),
    ),
    Mutant(
        "a cut that was given up is no edge",
        _CHAIN,
        "                if not (is_cut and upper in kept)\n",
        "                if not is_cut\n",
        (_CHAINS, "-k", "amid_a_stage"),
    ),
    Mutant(
        "buffers that change do not matter",
        _MICRO,
        "        if changed:\n",
        "        if False:\n",
        (_CHAINS, "-k", "a_buffer"),
    ),
    Mutant(
        "a lane that nobody wants runs on",
        "infinity/runtime/pausable_calls.py",
        "        if self._unwanted:\n            raise _CallAbandoned\n",
        "",
        (_LANES,),
    ),
    Mutant(
        "room for micro-batches does not matter",
        _MICRO,
        "        groups = -(-count // self.fit)\n",
        "        groups = 1\n",
        (_TESTS, "-k", "in_groups"),
    ),
    Mutant(
        "the slope of the softcap",
        "infinity/runtime/cross_entropy.py",
        "        if slope is not None:\n            gradient.mul_(slope)\n",
        "",
        (_LOSS, "-k", "fp32"),
    ),
    Mutant(
        "small gradients of fp16 are scaled before they are rounded",
        "infinity/runtime/cross_entropy.py",
        "return math.frexp(1.0 / self.divisor)[0] if",
        "return 1.0 / self.divisor if",
        (_LOSS, "-k", "vanish"),
    ),
    Mutant(
        "the loss has the labels of its own tokens",
        "infinity/integrations/chunked_loss.py",
        "targets = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]",
        "targets = labels",
        (_CHUNKED, "-k", "every_causal_model"),
    ),
    Mutant(
        "what a model does with its logits does not matter",
        "infinity/integrations/chunked_loss.py",
        "        loss = _loss_after(self.steps, call.divisor)\n",
        "        loss = ChunkedLossOptions(divisor=call.divisor)\n",
        (_CHUNKED, "-k", "every_causal_model"),
    ),
]
