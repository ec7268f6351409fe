"""A training step in simulated time: the house's own rooms decide what begins when, and what they move takes as long as
the rates of a machine say.

[Note: what is real and what is imitated]

| real: imported from infinity                                   | imitated here                                   |
|----------------------------------------------------------------|-------------------------------------------------|
| plan/ (make_plan, the policy, the trace)                       | the disks' free bytes (planning.py)             |
| units/: all but parameters                                     | parameters, the timeline's clock (rooms.py)     |
| units/speculator, progress                               | hooks and coordinator around them (training.py) |
| tiers/: all, with arena, slab, slots, queues, window, homes    | an accelerator: streams and copies (gpu.py)     |
| io/arena, store                                                | the store's files (resources.py)                |
|                                                                | csrc/device, the thread pool (native.py)        |
|                                                                | csrc/update's driver (pipeline.py)              |
|                                                                | csrc/aio's queue (disk.py)                      |

The rooms run as they are. Where they wait for a future, simulated time goes on until the future is done (clock.py), so
there is one thread and every run gives the same figures. What is moved or computed is a fluid (fluid.py): it has a rate
of its own, and shares cores, memory bandwidth, links and the disk with what else runs.
"""
