"""Vision families: images in; labels, boxes, depths or images out."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from torch import nn

from tests.families.parts import Called, Reduced, ids, image, noise, size
from tests.models import Batch

_PYRAMID: dict[str, Any] = {
    "depths": [2, 2],
    "num_encoder_blocks": 2,
    "hidden_sizes": [16, 32],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_labels": 4,
    "drop_path_rate": 0.0,
}


_ATTENTIVE_PYRAMID = _PYRAMID | {"num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}


def pvt() -> tuple[nn.Module, Batch]:
    config = hf.PvtConfig(
        image_size=32,
        sequence_reduction_ratios=[2, 1],
        **_ATTENTIVE_PYRAMID | {"patch_sizes": [4, 2], "strides": [4, 2]},
    )
    return hf.PvtForImageClassification(config), image() | {"labels": ids(2, top=4, least=0)}


def poolformer() -> tuple[nn.Module, Batch]:
    config = hf.PoolFormerConfig(padding=[1, 1], layer_scale_init_value=0.5, **_PYRAMID)
    return hf.PoolFormerForImageClassification(config), image() | {"labels": ids(2, top=4, least=0)}


def glpn() -> tuple[nn.Module, Batch]:
    config = hf.GLPNConfig(
        num_encoder_blocks=4,
        depths=[1, 2, 1, 1],
        sr_ratios=[2, 2, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        patch_sizes=[3, 3, 3, 3],
        strides=[2, 2, 2, 2],
        num_attention_heads=[1, 2, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
        drop_path_rate=0.0,
        decoder_hidden_size=16,
    )
    return hf.GLPNForDepthEstimation(config), image(64) | {"labels": noise(2, 128, 128).abs() + 0.5}


def sam() -> tuple[nn.Module, Batch]:
    config = hf.SamConfig(
        vision_config={
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
            "initializer_range": 0.02,
            "mlp_dim": 48,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 8},
        mask_decoder_config={
            "hidden_size": 16,
            "mlp_dim": 32,
            "num_attention_heads": 2,
            "iou_head_depth": 2,
            "iou_head_hidden_dim": 16,
        },
    )
    batch = image(32) | {"input_points": noise(2, 1, 2, 2).abs() * 8, "input_labels": torch.ones(2, 1, 2).long()}
    return Reduced(hf.SamModel(config), "iou_scores", "pred_masks"), batch


def _resnet(*stages: str) -> hf.ResNetConfig:
    return hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=list(stages),
    )


def detr() -> tuple[nn.Module, Batch]:
    config = hf.DetrConfig(
        backbone_config=_resnet("stage4"),
        num_queries=5,
        encoder_layers=2,
        encoder_ffn_dim=48,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_ffn_dim=48,
        decoder_attention_heads=2,
        d_model=32,
        dropout=0.0,
    )
    return Reduced(hf.DetrForObjectDetection(config), "logits", "pred_boxes"), image(32)


def mask2former() -> tuple[nn.Module, Batch]:
    config = hf.Mask2FormerConfig(
        backbone_config=_resnet("stage1", "stage2", "stage3", "stage4"),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=2,
        dim_feedforward=32,
        num_queries=5,
        num_labels=4,
    )
    return Reduced(hf.Mask2FormerModel(config), "masks_queries_logits"), image(64)


def zoedepth() -> tuple[nn.Module, Batch]:
    """Return a model with two heads; the heads are lists of modules in a dict."""
    backbone = hf.BeitConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        reshape_hidden_states=False,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    heads = [
        {"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "indoors"},
        {"n_bins": 8, "min_depth": 0.1, "max_depth": 80.0, "name": "outdoors"},
    ]
    config = hf.ZoeDepthConfig(
        backbone_config=backbone,
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        bottleneck_features=16,
        num_relative_features=16,
        num_attractors=[4, 4, 2, 1],
        bin_embedding_dim=16,
        bin_configurations=heads,
        num_patch_transformer_layers=4,
        patch_transformer_hidden_size=128,
        patch_transformer_intermediate_size=32,
        patch_transformer_num_attention_heads=2,
    )
    return Reduced(hf.ZoeDepthForDepthEstimation(config), "predicted_depth"), image(32)


def janus() -> tuple[nn.Module, Batch]:
    """Return only the VQVAE of the family's model, because the other modules are ordinary."""
    config = hf.JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=16,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        num_patches=8,
    )
    return Reduced(hf.JanusVQVAE(config), "decoded_pixel_values", "embedding_loss"), image(16)


def emu3() -> tuple[nn.Module, Batch]:
    """Return only the VQVAE of the family's model."""
    from transformers.models.emu3.modeling_emu3 import Emu3VQVAE

    config = hf.Emu3VQVAEConfig(
        codebook_size=16,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        attn_resolutions=[1],
        hidden_size=64,
        temporal_downsample_factor=2,
    )
    return Called(Emu3VQVAE(config), lambda inner, x: size(inner.decode(x))), {"x": ids(2, 4, 4, top=16, least=0)}


def chameleon() -> tuple[nn.Module, Batch]:
    """Return only the VQVAE of the family's model. Codes have no gradient, so only embeddings and the modules before
    the embeddings are trained.
    """
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE

    config = hf.ChameleonVQVAEConfig(
        embed_dim=8,
        num_embeddings=16,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        resolution=16,
    )
    return Called(ChameleonVQVAE(config), lambda inner, x: inner.encode(x).embedding_loss.log()), {
        "x": noise(2, 3, 16, 16)
    }
