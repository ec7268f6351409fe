"""When things move: per-unit ledger, trace, prefetch, device slots, gradients. Where runtime and optim meet."""
