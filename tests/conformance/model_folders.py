"""Write small folders for the models that vLLM's tests name, so that they need no model hub.

A relative path that exists goes before a hub's name: the tests run where these folders lie. They
hold the fields and sizes that schedulers and multimodal budgets read, and no weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL_TOKENS = (
    "<s>",
    "</s>",
    "<image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL = 256  # behind the bytes

_OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
}
_LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": FIRST_SPECIAL + _SPECIAL_TOKENS.index("<image>"),
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "image_seq_length": 576,
    "text_config": _LLAMA,
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "torch_dtype": "float16",
}
_LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}
_CLIP_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_QWEN_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": FIRST_SPECIAL + _SPECIAL_TOKENS.index("<|image_pad|>"),
    "video_token_id": FIRST_SPECIAL + _SPECIAL_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": FIRST_SPECIAL + _SPECIAL_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": FIRST_SPECIAL + _SPECIAL_TOKENS.index("<|vision_end|>"),
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "window_size": 112,
        "tokens_per_second": 2,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "torch_dtype": "bfloat16",
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

_FOLDERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "facebook/opt-125m": {"config.json": _OPT},
    "facebook/opt-350m": {"config.json": _OPT},
    "llava-hf/llava-1.5-7b-hf": {
        "config.json": _LLAVA,
        "processor_config.json": _LLAVA_PROCESSOR,
        "preprocessor_config.json": _CLIP_IMAGES,
    },
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "config.json": _QWEN_VL,
        "preprocessor_config.json": _QWEN_IMAGES,
    },
}


def write_model_folders(where: Path) -> None:
    """Write a folder for each model that the tests name."""
    tokenizer = make_byte_tokenizer(_SPECIAL_TOKENS)
    for name, files in _FOLDERS.items():
        folder = where / name
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 4096,
}


def make_byte_tokenizer(special_tokens: Sequence[str]) -> Tokenizer:
    """Return one token for each byte, and the special ones behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special_tokens))
    return tokenizer
