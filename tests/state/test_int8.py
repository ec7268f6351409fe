"""int8 moments keep their codes and scales wherever their chunks begin."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity import _native
from infinity.state.int8 import recut_int8


@given(st.data())
def test_elements_that_are_cut_into_other_chunks_decode_to_the_same_values(data: st.DataObject) -> None:
    blocks = 3 * _native.CHUNK_NUMEL // _native.BLOCK_NUMEL
    begin = data.draw(st.integers(0, blocks - 1)) * _native.BLOCK_NUMEL
    numel = data.draw(st.integers(1, blocks * _native.BLOCK_NUMEL - begin))
    at = data.draw(st.integers(0, blocks)) * _native.BLOCK_NUMEL
    values = torch.randn(blocks * _native.BLOCK_NUMEL, generator=torch.Generator().manual_seed(begin))
    source = torch.zeros(_native.moment_bytes("int8", values.numel()), dtype=torch.uint8)
    _native.encode_moments(values.numpy(), "int8", is_signed=True, data=source.numpy())
    target = torch.zeros(_native.moment_bytes("int8", at + numel), dtype=torch.uint8)
    recut_int8(source, begin, target, at, numel)
    expected, found = torch.empty(values.numel()), torch.empty(at + numel)
    _native.decode_moments(source.numpy(), "int8", is_signed=True, values=expected.numpy())
    _native.decode_moments(target.numpy(), "int8", is_signed=True, values=found.numpy())
    assert torch.equal(found[at:], expected[begin : begin + numel])
    assert not found[:at].any()
