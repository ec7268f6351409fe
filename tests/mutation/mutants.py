"""All mutants: the guard that each mutant removes, and the tests that must fail without this guard."""

from __future__ import annotations

from tests.mutation.of_activations import OF_ACTIVATIONS
from tests.mutation.of_device_updates import OF_DEVICE_UPDATES
from tests.mutation.of_devices import OF_DEVICES
from tests.mutation.of_experts import OF_EXPERTS
from tests.mutation.of_loops import OF_LOOPS
from tests.mutation.of_micro_batches import OF_MICRO_BATCHES
from tests.mutation.of_ranks import OF_RANKS
from tests.mutation.of_resident_units import OF_RESIDENT_UNITS
from tests.mutation.of_runs import OF_RUNS
from tests.mutation.of_seam import OF_SEAM
from tests.mutation.of_sharing import OF_SHARING
from tests.mutation.of_storage import OF_STORAGE
from tests.mutation.of_token_tiles import OF_TOKEN_TILES
from tests.mutation.of_training import OF_TRAINING

MUTANTS = [
    *OF_STORAGE,
    *OF_TRAINING,
    *OF_DEVICES,
    *OF_EXPERTS,
    *OF_DEVICE_UPDATES,
    *OF_SEAM,
    *OF_ACTIVATIONS,
    *OF_RESIDENT_UNITS,
    *OF_RANKS,
    *OF_SHARING,
    *OF_RUNS,
    *OF_MICRO_BATCHES,
    *OF_TOKEN_TILES,
    *OF_LOOPS,
]
