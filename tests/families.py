"""Small models of the families of transformers whose modules hold lists of lists, are called by other methods than
`forward`, or read each other's weights; with a batch for each. tests/family_search.py finds such families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAE
from transformers.models.emu3.modeling_emu3 import Emu3VQVAE
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from tests.models import Batch


def _size(output: Any) -> torch.Tensor:
    """A number to train on, that is not tiny where the values are; of several tensors the last."""
    tensor = output if isinstance(output, torch.Tensor) else output[-1]
    return tensor.float().square().mean().log()


class Reduced(nn.Module):
    """A model, and of its outputs a number to train on."""

    def __init__(self, inner: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.inner = inner
        self._outputs = outputs

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        found = self.inner(**batch)
        return torch.stack([_size(found[name]) for name in self._outputs]).sum()


def _noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ids(*shape: int, top: int = 64, least: int = 5) -> torch.Tensor:
    return torch.randint(least, top, shape, generator=torch.Generator().manual_seed(1))


def _image(side: int = 32) -> Batch:
    return {"pixel_values": _noise(2, 3, side, side)}


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
_BERT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "max_position_embeddings": 32,
}
_TRUNK: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}


def pvt() -> tuple[nn.Module, Batch]:
    config = hf.PvtConfig(
        image_size=32,
        sequence_reduction_ratios=[2, 1],
        **_ATTENTIVE_PYRAMID | {"patch_sizes": [4, 2], "strides": [4, 2]},
    )
    return hf.PvtForImageClassification(config), _image() | {"labels": _ids(2, top=4, least=0)}


def poolformer() -> tuple[nn.Module, Batch]:
    config = hf.PoolFormerConfig(padding=[1, 1], layer_scale_init_value=0.5, **_PYRAMID)
    return hf.PoolFormerForImageClassification(config), _image() | {"labels": _ids(2, top=4, least=0)}


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
    return hf.GLPNForDepthEstimation(config), _image(64) | {"labels": _noise(2, 128, 128).abs() + 0.5}


def funnel() -> tuple[nn.Module, Batch]:
    config = hf.FunnelConfig(
        vocab_size=64,
        block_sizes=[2, 1, 2],
        block_repeats=[1, 2, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=2,
        d_head=16,
        d_inner=48,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return hf.FunnelForMaskedLM(config), {"input_ids": _ids(2, 16), "labels": _ids(2, 16)}


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
    tokens = torch.cat([torch.full((2, pictured), 4), _ids(2, 8)], dim=1)
    return hf.Florence2ForConditionalGeneration(config), _image(16) | {"input_ids": tokens, "labels": _ids(2, 6)}


def evolla() -> tuple[nn.Module, Batch]:
    config = hf.EvollaConfig(
        protein_encoder_config=_BERT | {"vocab_size": 32, "emb_layer_norm_before": False},
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
        "input_ids": _ids(2, 12),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
        "protein_input_ids": _ids(2, 10, top=30),
        "protein_attention_mask": torch.ones(2, 10, dtype=torch.long),
        "labels": _ids(2, 12),
    }
    return hf.EvollaForProteinText2Text(config), batch


def bridgetower() -> tuple[nn.Module, Batch]:
    config = hf.BridgeTowerConfig(
        hidden_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        text_config=_BERT | {"hidden_size": 64, "intermediate_size": 96},
        vision_config={"hidden_size": 64, "num_hidden_layers": 3, "image_size": 16, "patch_size": 8},
    )
    batch = _image(16) | {"input_ids": _ids(2, 8), "pixel_mask": torch.ones(2, 16, 16, dtype=torch.long)}
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
    labels = _ids(2, 8)
    labels[:, ::2] = -100
    batch = _image(16) | {
        "codebook_pixel_values": _noise(2, 3, 16, 16, seed=2).abs(),
        "input_ids": _ids(2, 8),
        "input_ids_masked": _ids(2, 8),
        "attention_mask": torch.ones(2, 8, dtype=torch.long),
        "mlm_labels": labels,
        "bool_masked_pos": torch.ones(2, 2, 2, dtype=torch.long),
        "itm_labels": torch.tensor([1, 1]),
    }
    return hf.FlavaForPreTraining(config), batch


def perceiver() -> tuple[nn.Module, Batch]:
    config = hf.PerceiverConfig(
        num_latents=8,
        d_latents=32,
        d_model=32,
        num_blocks=2,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        attention_probs_dropout_prob=0.0,
        vocab_size=64,
        max_position_embeddings=16,
    )
    return hf.PerceiverForMaskedLM(config), {"inputs": _ids(2, 16), "labels": _ids(2, 16)}


def deberta() -> tuple[nn.Module, Batch]:
    config = hf.DebertaConfig(relative_attention=True, pos_att_type=["p2c", "c2p"], **_BERT)
    return hf.DebertaForMaskedLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def deberta_v2() -> tuple[nn.Module, Batch]:
    config = hf.DebertaV2Config(
        relative_attention=True, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_buckets=8, **_BERT
    )
    return hf.DebertaV2ForMaskedLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def prophetnet() -> tuple[nn.Module, Batch]:
    config = hf.ProphetNetConfig(
        vocab_size=64,
        hidden_size=32,
        encoder_ffn_dim=48,
        num_encoder_layers=2,
        num_encoder_attention_heads=2,
        decoder_ffn_dim=48,
        num_decoder_layers=2,
        num_decoder_attention_heads=2,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_position_embeddings=32,
    )
    return hf.ProphetNetForConditionalGeneration(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 8)}


def reformer() -> tuple[nn.Module, Batch]:
    config = hf.ReformerConfig(
        attention_head_size=16,
        attn_layers=["local", "lsh", "local"],
        axial_pos_shape=[4, 8],
        axial_pos_embds_dim=[8, 24],
        feed_forward_size=48,
        hash_seed=1,
        hidden_dropout_prob=0.0,
        hidden_size=32,
        is_decoder=False,
        local_attention_probs_dropout_prob=0.0,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        max_position_embeddings=32,
        num_attention_heads=2,
        num_buckets=2,
        vocab_size=64,
    )
    return hf.ReformerForMaskedLM(config), {"input_ids": _ids(2, 32), "labels": _ids(2, 32)}


def git() -> tuple[nn.Module, Batch]:
    config = hf.GitConfig(vision_config=_TRUNK, num_image_with_embedding=2, **_BERT)
    frames = {"pixel_values": _noise(2, 2, 3, 16, 16)}
    return hf.GitForCausalLM(config), frames | {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def jetmoe() -> tuple[nn.Module, Batch]:
    config = hf.JetMoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_key_value_heads=2,
        kv_channels=16,
        intermediate_size=48,
        max_position_embeddings=32,
        num_local_experts=4,
    )
    return hf.JetMoeForCausalLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def gemma3n() -> tuple[nn.Module, Batch]:
    config = hf.Gemma3nTextConfig(
        vocab_size=64,
        vocab_size_per_layer_input=64,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_kv_shared_layers=1,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=8,
        altup_num_inputs=2,
        max_position_embeddings=32,
    )
    return hf.Gemma3nForCausalLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def layoutlmv3() -> tuple[nn.Module, Batch]:
    config = hf.LayoutLMv3Config(
        coordinate_size=6,
        shape_size=4,
        max_2d_position_embeddings=64,
        input_size=16,
        patch_size=8,
        num_labels=4,
        **_BERT,
    )
    batch = _image(16) | {"input_ids": _ids(2, 8), "bbox": _ids(2, 8, 1, top=32).repeat(1, 1, 4)}
    return hf.LayoutLMv3ForTokenClassification(config), batch | {"labels": _ids(2, 8, top=4, least=0)}


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
    batch = _image(32) | {"input_points": _noise(2, 1, 2, 2).abs() * 8, "input_labels": torch.ones(2, 1, 2).long()}
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
    return Reduced(hf.DetrForObjectDetection(config), "logits", "pred_boxes"), _image(32)


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
    return Reduced(hf.Mask2FormerModel(config), "masks_queries_logits"), _image(64)


def encodec() -> tuple[nn.Module, Batch]:
    """Codes have no gradient: what is trained is the decoder."""
    config = hf.EncodecConfig(
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=16,
        sampling_rate=2000,
        target_bandwidths=[1.0, 2.0],
    )
    return Reduced(hf.EncodecModel(config), "audio_values"), {"input_values": _noise(2, 1, 200)}


def mimi() -> tuple[nn.Module, Batch]:
    """As encodec."""
    config = hf.MimiConfig(
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=16,
        num_quantizers=4,
        vector_quantization_hidden_dimension=16,
        upsample_groups=32,
        num_hidden_layers=2,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        sampling_rate=2000,
        frame_rate=125,
    )
    return Reduced(hf.MimiModel(config), "audio_values"), {"input_values": _noise(2, 1, 256)}


def dac() -> tuple[nn.Module, Batch]:
    config = hf.DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        n_codebooks=3,
        codebook_size=16,
        codebook_dim=4,
    )
    return Reduced(hf.DacModel(config), "loss", "audio_values"), {"input_values": _noise(2, 1, 256)}


def janus() -> tuple[nn.Module, Batch]:
    """Its VQVAE alone: the others are ordinary."""
    config = hf.JanusVQVAEConfig(
        embed_dim=8,
        num_embeddings=16,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        num_patches=8,
    )
    return Reduced(hf.JanusVQVAE(config), "decoded_pixel_values", "embedding_loss"), _image(16)


class Decoded(nn.Module):
    """A model that is called by its method `decode` alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _size(self.inner.decode(x))


def emu3() -> tuple[nn.Module, Batch]:
    """Its VQVAE alone."""
    config = hf.Emu3VQVAEConfig(
        codebook_size=16,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        attn_resolutions=[1],
        hidden_size=64,
        temporal_downsample_factor=2,
    )
    return Decoded(Emu3VQVAE(config)), {"x": _ids(2, 4, 4, top=16, least=0)}


class Encoded(nn.Module):
    """A model that is called by its method `encode` alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.encode(x).embedding_loss.log()


def chameleon() -> tuple[nn.Module, Batch]:
    """Its VQVAE alone. Codes have no gradient: what is trained is its embeddings, and what is before them."""
    config = hf.ChameleonVQVAEConfig(
        embed_dim=8,
        num_embeddings=16,
        latent_channels=32,
        base_channels=32,
        channel_multiplier=[1, 2],
        num_res_blocks=1,
        resolution=16,
    )
    return Encoded(ChameleonVQVAE(config)), {"x": _noise(2, 3, 16, 16)}


def xcodec() -> tuple[nn.Module, Batch]:
    """As encodec."""
    config = hf.XcodecConfig(
        sample_rate=2000,
        codebook_size=16,
        target_bandwidths=[1.0, 2.0],
        acoustic_model_config={
            "encoder_hidden_size": 4,
            "downsampling_ratios": [4, 2],
            "decoder_hidden_size": 16,
            "upsampling_ratios": [4, 2],
            "hidden_size": 16,
        },
        semantic_model_config={
            "model_type": "hubert",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "conv_dim": [8, 8],
            "conv_kernel": [4, 4],
            "conv_stride": [4, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    )
    return Reduced(hf.XcodecModel(config), "audio_values"), {"input_values": _noise(2, 1, 256)}


def qwen2_5_omni() -> tuple[nn.Module, Batch]:
    """Its vocoder alone."""
    config = Qwen2_5OmniBigVGANConfig(
        mel_dim=8,
        upsample_initial_channel=32,
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3, 5]],
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
    )
    return Called(Qwen2_5OmniToken2WavBigVGANModel(config)), {"x": _noise(2, 8, 12)}


class Called(nn.Module):
    """A model whose output is one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _size(self.inner(x))


def qwen3_omni_moe() -> tuple[nn.Module, Batch]:
    """Its vocoder alone."""
    config = Qwen3OmniMoeCode2WavConfig(
        codebook_size=16,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        num_hidden_layers=2,
        num_quantizers=2,
        upsample_rates=[2, 2],
        upsampling_ratios=[2, 2],
        decoder_dim=32,
    )
    return Called(Qwen3OmniMoeCode2Wav(config)), {"x": _ids(2, 2, 6, top=16, least=0)}


def zoedepth() -> tuple[nn.Module, Batch]:
    """With two heads, which are lists in a dict."""
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
    return Reduced(hf.ZoeDepthForDepthEstimation(config), "predicted_depth"), _image(32)


def rwkv() -> tuple[nn.Module, Batch]:
    """Where it rescales, its evaluation writes to the weights."""
    config = hf.RwkvConfig(
        vocab_size=64, context_length=32, hidden_size=32, num_hidden_layers=3, rescale_every=0, use_cache=False
    )
    return hf.RwkvForCausalLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


def mobilebert() -> tuple[nn.Module, Batch]:
    config = hf.MobileBertConfig(embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16, **_BERT)
    return hf.MobileBertForMaskedLM(config), {"input_ids": _ids(2, 12), "labels": _ids(2, 12)}


FAMILIES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    family.__name__: family
    for family in (
        pvt,
        poolformer,
        glpn,
        funnel,
        florence2,
        evolla,
        bridgetower,
        flava,
        perceiver,
        deberta,
        deberta_v2,
        prophetnet,
        reformer,
        git,
        jetmoe,
        gemma3n,
        layoutlmv3,
        sam,
        detr,
        mask2former,
        encodec,
        mimi,
        dac,
        janus,
        emu3,
        chameleon,
        xcodec,
        qwen2_5_omni,
        qwen3_omni_moe,
        zoedepth,
        rwkv,
        mobilebert,
    )
}
