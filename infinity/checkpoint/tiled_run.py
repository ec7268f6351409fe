"""A run that goes on has its linear layers in the tiles that it had, also in those that infinity.offload has chosen."""

from __future__ import annotations

from torch import nn

from infinity.config import SwapConfig
from infinity.durable.records import parse_body
from infinity.errors import ManifestError
from infinity.io.directory import generations_in, pinned_in
from infinity.io.manifest import read_manifest
from infinity.ranks.ranks import rank_and_world
from infinity.runtime.tiles import tile_as
from infinity.sharded.stores import rank_path


def tile_as_run(model: nn.Module, config: SwapConfig) -> None:
    """Tile a model as the run in the swap directory is tiled. All its generations are alike, so one manifest that can
    be read says it; where none can, resuming says what is wrong."""
    if not config.nvme.paths:
        return
    path = rank_path(config.nvme.paths[0].expanduser().absolute(), *rank_and_world())
    for manifest in (*generations_in(path).values(), *pinned_in(path)):
        try:
            body = parse_body(read_manifest(manifest).body, manifest)
        except ManifestError:
            continue
        tile_as(model, body.model.shapes())
        return
