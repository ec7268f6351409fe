"""Families with text and images, or text and proteins, as input."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn

from tests.families.parts import BERT, TRUNK, Reduced, ids, image, noise
from tests.models import Batch


def florence2() -> tuple[nn.Module, Batch]:
    vision = {
        "depths": [1, 2],
        "patch_size": [3, 3],
        "patch_stride": [2, 2],
        "patch_padding": [1, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 2],
        "num_groups": [2, 2],
        "window_size": 4,
        "drop_path_rate": 0.0,
        "projection_dim": 32,
    }
    text = {
        "model_type": "bart",
        "vocab_size": 64,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "dropout": 0.0,
    }
    config = hf.Florence2Config(text_config=text, vision_config=vision, image_token_id=4)
    pictured = 4 * 4 + 1
    tokens = torch.cat([torch.full((2, pictured), 4), ids(2, 8)], dim=1)
    return hf.Florence2ForConditionalGeneration(config), image(16) | {"input_ids": tokens, "labels": ids(2, 6)}


def evolla() -> tuple[nn.Module, Batch]:
    config = hf.EvollaConfig(
        protein_encoder_config=BERT | {"vocab_size": 32, "emb_layer_norm_before": False},
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        aligner_num_add_layers=2,
        aligner_ffn_mult=2,
        aligner_attention_probs_dropout_prob=0.0,
        resampler_depth=2,
        resampler_dim_head=8,
        resampler_heads=2,
        resampler_num_latents=4,
        resampler_ff_mult=2,
        bos_token_id=1,
        eos_token_id=2,
    )
    batch = {
        "input_ids": ids(2, 12),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "protein_input_ids": ids(2, 10, top=30),
        "protein_attention_mask": torch.ones(2, 10, dtype=torch.long),
        "labels": ids(2, 12),
    }
    return hf.EvollaForProteinText2Text(config), batch


def bridgetower() -> tuple[nn.Module, Batch]:
    config = hf.BridgeTowerConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        text_config=BERT | {"hidden_size": 64, "intermediate_size": 96},
        vision_config={"hidden_size": 64, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8},
    )
    batch = image(16) | {"input_ids": ids(2, 8), "pixel_mask": torch.ones(2, 16, 16, dtype=torch.long)}
    model = hf.BridgeTowerModel(config)
    return Reduced(model, "text_features", "image_features", "pooler_output"), batch


def flava() -> tuple[nn.Module, Batch]:
    trunk = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    config = hf.FlavaConfig(
        image_config=trunk | {"image_size": 16, "patch_size": 8, "vocab_size": 16},
        text_config=trunk | {"vocab_size": 64, "max_position_embeddings": 32},
        multimodal_config=trunk,
        image_codebook_config={"hidden_size": 8, "vocab_size": 16, "num_blocks_per_group": 1, "freeze": False},
        hidden_size=32,
        projection_dim=16,
    )
    labels = ids(2, 8)
    labels[:, ::2] = -100
    batch = image(16) | {
        "codebook_pixel_values": noise(2, 3, 16, 16, seed=2).abs(),
        "input_ids": ids(2, 8),
        "input_ids_masked": ids(2, 8),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "mlm_labels": labels,
        "bool_masked_pos": torch.ones(2, 2, 2, dtype=torch.long),
        "itm_labels": torch.tensor([1, 1]),
    }
    return hf.FlavaForPreTraining(config), batch


def git() -> tuple[nn.Module, Batch]:
    config = hf.GitConfig(vision_config=TRUNK, num_image_with_embedding=2, **BERT)
    frames = {"pixel_values": noise(2, 2, 3, 16, 16)}
    return hf.GitForCausalLM(config), frames | {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def layoutlmv3() -> tuple[nn.Module, Batch]:
    config = hf.LayoutLMv3Config(
        coordinate_size=6,
        shape_size=4,
        max_2d_position_embeddings=64,
        input_size=16,
        patch_size=8,
        num_labels=4,
        **BERT,
    )
    batch = image(16) | {"input_ids": ids(2, 8), "bbox": ids(2, 8, 1, top=32).repeat(1, 1, 4)}
    return hf.LayoutLMv3ForTokenClassification(config), batch | {"labels": ids(2, 8, top=4, least=0)}
