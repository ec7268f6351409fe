"""Small models of those families of transformers that have unusual modules, and a batch for each model.

The modules of these families contain lists of lists, are called by methods other than `forward`, or read each other's
weights. tests/family_search.py finds such families.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from tests.families import audio, language, multimodal, vision
from tests.models import Batch

FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    family.__name__: family
    for family in (
        vision.pvt,
        vision.poolformer,
        vision.glpn,
        language.funnel,
        multimodal.florence2,
        multimodal.evolla,
        multimodal.bridgetower,
        multimodal.flava,
        language.perceiver,
        language.deberta,
        language.deberta_v2,
        language.prophetnet,
        language.reformer,
        multimodal.git,
        language.jetmoe,
        language.gemma3n,
        multimodal.layoutlmv3,
        vision.sam,
        vision.detr,
        vision.mask2former,
        audio.encodec,
        audio.mimi,
        audio.dac,
        vision.janus,
        vision.emu3,
        vision.chameleon,
        audio.xcodec,
        audio.qwen2_5_omni,
        audio.qwen3_omni_moe,
        vision.zoedepth,
        language.rwkv,
        language.mobilebert,
    )
}
