"""A training step in simulated time: the house's own rooms decide what begins when, and what they move takes as long as
the rates of a machine say.

[Note: what is real and what is imitated]

| real: imported from infinity                                   | imitated here                                   |
|----------------------------------------------------------------|-------------------------------------------------|
| plan/ (make_plan)                                              | the disks' free bytes (planning.py)             |
| units/room, weights, unit, updates, update, read_ahead,        | parameters, views of slots, the timeline's      |
| shadows, trace, speculation, arrivals                          | clock (rooms.py)                                |
| coordinator/speculator                                         | the coordinator around it (training.py)         |
| tiers/slots (HostSlots), tiers/home                            | leases, extents, reads of weights (memory.py);  |
|                                                                | a GPU's slots, streams and rings (gpu.py)       |
|                                                                | the driver of csrc/update (pipeline.py)         |
|                                                                | the queue of csrc/aio (disk.py)                 |

The rooms run as they are. Where they wait for a future, simulated time goes on until the future is done (clock.py), so
there is one thread and every run gives the same figures. What is moved or computed is a fluid (fluid.py): it has a rate
of its own, and shares cores, memory bandwidth, links and the disk with what else runs.
"""
