"""Lightning's strategy for offloaded models, for scripts that import `lightning`: `Trainer(strategy="infinity")`.

With a swap config: `Trainer(strategy=InfinityStrategy("swap.yaml"))`.
"""

from __future__ import annotations

from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from infinity.integrations.strategy import OffloadingStrategyMixin


class InfinityStrategy(OffloadingStrategyMixin, SingleDeviceStrategy):  # type: ignore[misc]
    __doc__ = OffloadingStrategyMixin.__doc__


StrategyRegistry.register(
    InfinityStrategy.strategy_name,
    InfinityStrategy,
    description=str(OffloadingStrategyMixin.__doc__).split(".")[0],
    override=True,
)
