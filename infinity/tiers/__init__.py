"""Where bytes rest and how they move: homes in RAM or the store, device slots, the window of spilled gradients.

[Note: adding a tier]
A tier has no class of its own. What a further one for optimizer states (compressed RAM, say) needs:

    config.py, plan/placement.py    which states are to rest there, and how many the budget holds
    plan/layout.py                  its bytes
    tiers/resources.py              opens them; tiers/home.py: a Home that rests there, and its codec
    tiers/destination.py            how the native update reads and writes them (StateStream of csrc/update)
    durable/commits.py              how a commit gets them to the store
"""
