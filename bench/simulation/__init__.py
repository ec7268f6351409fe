"""A training step in simulated time.

infinity's own modules decide which operation begins when. The duration of an operation is computed from the rates of a
machine.

[Note: what is real and what is imitated]

| real: imported from infinity                                   | imitated here                                   |
|----------------------------------------------------------------|-------------------------------------------------|
| plan/ (make_plan, the policy, the trace)                       | the disks' free bytes (planning.py)             |
| units/: all but parameters                                     | parameters, the timeline's clock (rooms.py)     |
| units/speculative_updates, pump                          | hooks and coordinator around them (training.py) |
| tiers/: all, with arena, slab, slots, queues, window, homes    | an accelerator: streams and copies (gpu.py)     |
| io/arena, store                                                | the store's files (resources.py)                |
|                                                                | csrc/device, the thread pool (native.py)        |
|                                                                | csrc/update's driver (pipeline.py)              |
|                                                                | csrc/aio's queue (disk.py)                      |

infinity's modules run unchanged. When these modules wait for a future, simulated time advances until the future is done
(clock.py). The simulation therefore has one thread, and every run gives the same figures. Transfers and computations
are modelled as fluids (fluid.py): each has its own rate, and shares cores, memory bandwidth, links and the disk with
the other transfers and computations in progress.
"""
