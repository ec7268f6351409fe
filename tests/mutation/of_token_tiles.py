"""Mutants of tiles of tokens: what a tile recomputes, which modules are refused, and when tiles are made."""

from __future__ import annotations

from tests.mutation.mutant import Mutant

_TILES = "infinity/runtime/token_tiles.py"
_AUTO = "infinity/runtime/auto_tile_tokens.py"
_TESTS = "tests/runtime/test_token_tiles.py"
_AUTO_TESTS = "tests/runtime/test_auto_tile_tokens.py"


def _mutant(name: str, old: str, new: str, test: str) -> Mutant:
    return Mutant(name, _TILES, old, new, (f"{_TESTS}::{test}",))


_REFUSES = "test_the_first_call_refuses_a_module_that_does_not_treat_each_token_alone"

OF_TOKEN_TILES = [
    _mutant(
        "the gradients of tiles are added in fp32",
        "gradient.to(torch.promote_types(gradient.dtype, torch.float32))",
        "gradient",
        "test_the_gradients_of_tiles_are_added_in_fp32",
    ),
    _mutant(
        "a tile's gradient is added once",
        "gradient, leaf.grad = leaf.grad, None\n",
        "gradient = leaf.grad\n",
        "test_the_gradients_of_tiles_are_added_in_fp32",
    ),
    _mutant(
        "a tile draws the random numbers of the forward again",
        "        torch.set_rng_state(cpu)\n",
        "",
        "test_the_backward_draws_the_random_numbers_of_the_forward",
    ),
    _mutant(
        "dropout is off while a module is tried",
        "        each.training = False\n",
        "        pass\n",
        "test_the_backward_draws_the_random_numbers_of_the_forward",
    ),
    _mutant(
        "a tile is recomputed with the autocast of the forward",
        "            torch.autocast(*ctx.autocast),\n",
        "",
        "test_autocast_of_the_forward_holds_in_the_backward",
    ),
    _mutant(
        "the tokens of a tile are contiguous",
        "*part).contiguous()",
        "*part)",
        "test_outputs_and_gradients_of_inputs_have_the_bits_of_the_whole_module",
    ),
    _mutant(
        "tiles have no second derivative",
        "    @once_differentiable\n",
        "",
        "test_a_second_derivative_is_refused",
    ),
    _mutant(
        "a small dependence on other tokens is seen",
        " and all(bool(each.isfinite().all()) for each in others)",
        "",
        _REFUSES,
    ),
    _mutant(
        "a dependence on the position of a token is seen",
        "bool((alone - together).abs().max() <= limit)",
        "True",
        _REFUSES,
    ),
    _mutant(
        "outputs that are not finite show nothing",
        "bool(together.isfinite().all())",
        "True",
        "test_a_module_is_tried_with_random_tokens_until_its_output_is_finite",
    ),
    _mutant(
        "layers that were added to a module in tiles are seen",
        "why_not_tokens(module) or _why_not_alone(",
        "_why_not_alone(",
        "test_layers_that_were_added_after_the_call_are_seen",
    ),
    _mutant(
        "a module in tiles is fetched as one unit",
        "    if len(units) > 1:",
        "    if False:",
        "test_a_module_whose_parts_are_fetched_apart_is_refused",
    ),
    Mutant(
        "a module that mixes tokens runs as a whole in automatic tiles",
        _TILES,
        "            if module.required:\n",
        "            if True:\n",
        (f"{_AUTO_TESTS}::test_a_module_that_turns_out_to_mix_tokens_runs_as_a_whole_and_a_line_says_so",),
    ),
    Mutant(
        "a block that fits gets no tiles",
        _AUTO,
        "if nbytes <= room_bytes)",
        "if nbytes <= room_bytes and tiles > 1)",
        (f"{_AUTO_TESTS}::test_a_block_that_fits_runs_as_a_whole",),
    ),
    Mutant(
        "only recomputed blocks get automatic tiles",
        _AUTO,
        " or not plan.placement.recompute:",
        ":",
        (f"{_AUTO_TESTS}::test_a_plan_that_has_room_for_a_block_and_the_tensors_between_blocks_gets_no_tiles",),
    ),
    Mutant(
        "the tensors between blocks need room beside a block",
        _AUTO,
        "plan.device_bytes - between",
        "plan.device_bytes",
        (f"{_AUTO_TESTS}::test_a_plan_that_has_room_for_a_block_and_the_tensors_between_blocks_gets_no_tiles",),
    ),
]
