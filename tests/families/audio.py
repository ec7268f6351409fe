"""Audio families: codecs and vocoders."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.families.parts import Called, Reduced, ids, noise
from tests.models import Batch


def encodec() -> tuple[nn.Module, Batch]:
    """Return the model. Codes have no gradient, so only the decoder is trained."""
    config = hf.EncodecConfig(
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[4, 2],
        codebook_size=16,
        codebook_dim=16,
        sampling_rate=2000,
        target_bandwidths=[1.0, 2.0],
    )
    return Reduced(hf.EncodecModel(config), "audio_values"), {"input_values": noise(2, 1, 200)}


def mimi() -> tuple[nn.Module, Batch]:
    """Return the model, of which only the decoder is trained, like encodec's."""
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
    return Reduced(hf.MimiModel(config), "audio_values"), {"input_values": noise(2, 1, 256)}


def dac() -> tuple[nn.Module, Batch]:
    config = hf.DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=32,
        n_codebooks=3,
        codebook_size=16,
        codebook_dim=4,
    )
    return Reduced(hf.DacModel(config), "loss", "audio_values"), {"input_values": noise(2, 1, 256)}


def xcodec() -> tuple[nn.Module, Batch]:
    """Return the model, of which only the decoder is trained, like encodec's."""
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
    return Reduced(hf.XcodecModel(config), "audio_values"), {"input_values": noise(2, 1, 256)}


def qwen2_5_omni() -> tuple[nn.Module, Batch]:
    """Return only the vocoder of the family's model."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

    config = Qwen2_5OmniBigVGANConfig(
        mel_dim=8,
        upsample_initial_channel=32,
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3, 5]],
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
    )
    return Called(Qwen2_5OmniToken2WavBigVGANModel(config)), {"x": noise(2, 8, 12)}


def qwen3_omni_moe() -> tuple[nn.Module, Batch]:
    """Return only the vocoder of the family's model."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

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
    return Called(Qwen3OmniMoeCode2Wav(config)), {"x": ids(2, 2, 6, top=16, least=0)}
