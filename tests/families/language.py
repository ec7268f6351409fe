"""Text families."""

from __future__ import annotations

import transformers as hf
from torch import nn

from tests.families.parts import BERT, ids
from tests.models import Batch


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
    return hf.FunnelForMaskedLM(config), {"input_ids": ids(2, 16), "labels": ids(2, 16)}


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
    return hf.PerceiverForMaskedLM(config), {"inputs": ids(2, 16), "labels": ids(2, 16)}


def deberta() -> tuple[nn.Module, Batch]:
    config = hf.DebertaConfig(relative_attention=True, pos_att_type=["p2c", "c2p"], **BERT)
    return hf.DebertaForMaskedLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def deberta_v2() -> tuple[nn.Module, Batch]:
    config = hf.DebertaV2Config(
        relative_attention=True, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", position_buckets=8, **BERT
    )
    return hf.DebertaV2ForMaskedLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}


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
    return hf.ProphetNetForConditionalGeneration(config), {"input_ids": ids(2, 12), "labels": ids(2, 8)}


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
    return hf.ReformerForMaskedLM(config), {"input_ids": ids(2, 32), "labels": ids(2, 32)}


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
    return hf.JetMoeForCausalLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}


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
    return hf.Gemma3nForCausalLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def rwkv() -> tuple[nn.Module, Batch]:
    """Return the model without rescaling, which would write to the weights during evaluation."""
    config = hf.RwkvConfig(
        vocab_size=64, context_length=32, hidden_size=32, num_hidden_layers=3, rescale_every=0, use_cache=False
    )
    return hf.RwkvForCausalLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}


def mobilebert() -> tuple[nn.Module, Batch]:
    config = hf.MobileBertConfig(embedding_size=16, true_hidden_size=16, intra_bottleneck_size=16, **BERT)
    return hf.MobileBertForMaskedLM(config), {"input_ids": ids(2, 12), "labels": ids(2, 12)}
