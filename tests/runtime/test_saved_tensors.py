"""The memory that a forward keeps for its backward is counted once for each storage."""

from __future__ import annotations

import torch

from infinity.runtime.saved_tensors import SavedBytesCounter


def test_storages_count_once_and_tensors_that_stay_do_not_count() -> None:
    buffer, kept = torch.zeros(8), torch.zeros(16)
    counter = SavedBytesCounter([buffer])
    for each in (buffer, buffer[2:], kept, kept[1:], kept.view(4, 4)):
        counter.add(each)
    assert counter.nbytes == 16 * 4


def test_a_storage_at_the_address_of_a_dead_one_counts() -> None:
    counter = SavedBytesCounter()
    for _ in range(200):
        counter.add(torch.zeros(1024))
    assert counter.nbytes == 200 * 4096
