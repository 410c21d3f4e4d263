"""Tiny models of transformers with random weights: one of each family, most of them with a conversion mapping."""

from __future__ import annotations

from typing import Any

_TEXT = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ENCODER = {key: value for key, value in _TEXT.items() if key != "num_key_value_heads"}
_IMAGE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 16, "n_shared_experts": 1,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

HUB_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}),
    "bart": ("BartForConditionalGeneration", _SEQ2SEQ),
    "beit": ("BeitForImageClassification", _IMAGE),
    "bert": ("BertForMaskedLM", _ENCODER),
    "bloom": ("BloomForCausalLM", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "clip_vision": ("CLIPVisionModel", _IMAGE),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_TEXT, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_TEXT, **_LATENT}),
    "deit": ("DeiTForImageClassification", _IMAGE),
    "distilbert": ("DistilBertForMaskedLM", {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2,
                                             "n_heads": 4}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {**_TEXT, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16,
                                                 "moe_layer_start_index": 0}),
    "falcon": ("FalconForCausalLM", {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2,
                                     "num_attention_heads": 4}),
    "gemma2": ("Gemma2ForCausalLM", {**_TEXT, "head_dim": 8}),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_TEXT, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
                                        "topk_group": 1, "moe_intermediate_size": 16, "head_dim": 8,
                                        "first_k_dense_replace": 1}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "gpt_neox": ("GPTNeoXForCausalLM", _ENCODER),
    "gpt_oss": ("GptOssForCausalLM", {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "jamba": ("JambaForCausalLM", {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2,
                                   "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
                                   "use_mamba_kernels": False, "mamba_d_state": 8}),
    "llama": ("LlamaForCausalLM", _TEXT),
    "minimax": ("MiniMaxForCausalLM", {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
                                       "block_size": 4}),
    "mistral": ("MistralForCausalLM", {**_TEXT, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("Olmo2ForCausalLM", _TEXT),
    "olmoe": ("OlmoeForCausalLM", {**_TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPTForCausalLM", {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
                               "num_attention_heads": 4, "max_position_embeddings": 32, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3ForCausalLM", _TEXT),
    "qwen2": ("Qwen2ForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_TEXT, **_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_TEXT, **_EXPERTS, "head_dim": 8}),
    "roberta": ("RobertaForMaskedLM", _ENCODER),
    "siglip_vision": ("SiglipVisionModel", _IMAGE),
    "swin": ("SwinForImageClassification", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
                                            "num_heads": [2, 2], "window_size": 2}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
                                          "num_heads": 4, "decoder_start_token_id": 0}),
    "vit": ("ViTForImageClassification", _IMAGE),
    "whisper": ("WhisperForConditionalGeneration", {**_SEQ2SEQ, "max_source_positions": 8, "max_target_positions": 16,
                                                    "num_mel_bins": 8}),
}  # fmt: skip
"""By name: the class of a model, and the options of its config."""


def tiny_model(name: str) -> Any:
    """Returns a model with random weights, in evaluation mode."""
    import torch
    import transformers

    kind, options = HUB_MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    model = made(made.config_class(**options))
    with torch.no_grad():
        for parameter in model.parameters():  # many layers begin with zeros or ones, which say nothing of their order
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def outputs(model: Any) -> Any:
    """Returns the first output of a model for a fixed input."""
    import torch

    inputs: dict[str, Any] = {"input_ids": torch.arange(12).view(2, 6) + 3}
    config = model.config
    if model.main_input_name == "pixel_values":
        inputs = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * config.image_size**2).view(2, 3, config.image_size, -1)}
    elif model.main_input_name == "input_features":
        inputs = {
            "input_features": torch.linspace(-1, 1, 2 * config.num_mel_bins * 16).view(2, config.num_mel_bins, 16)
        }
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(8).view(2, 4) + 3
    with torch.no_grad():
        return model(**inputs)[0]
