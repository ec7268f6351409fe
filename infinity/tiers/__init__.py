"""The places where states are kept, and the transfers between them: homes in RAM or the store, slots on the device, and
the landing window of gradients.

[Note: adding a tier]
No class represents a tier. A further tier for optimizer states, such as compressed RAM, needs changes in these files:

    config.py, plan/placement.py    which states the tier keeps, and how many the budget allows
    plan/layout.py                  the bytes of the tier
    tiers/resources.py              opening the tier; tiers/home.py: a Home in the tier, and its codec
    tiers/destination.py            how the native update reads and writes the tier (StateStream of csrc/update)
    durable/commits.py              how a commit writes the states to the store
"""
