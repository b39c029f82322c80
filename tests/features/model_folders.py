"""Write small models that hear, and adapters: random weights, no network.

The folders of the models hold no weights: vLLM makes them up (``load_format="dummy"``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.conformance.model_folders import (
    FIRST_SPECIAL,
    TOKENIZER_CONFIG,
    make_byte_tokenizer,
)
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec

SAMPLING_RATE = 16_000
LORA_RANK = 8

_VOCABULARY = 512
_HEARING = ("<s>", "</s>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_WHISPER = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *("<|en|>", "<|transcribe|>", "<|translate|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
_MEL_BANDS = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "sampling_rate": SAMPLING_RATE,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
}


def write_hearing_model(folder: Path) -> None:
    """Write a decoder that takes audio in its prompt (Qwen2-Audio), 25 tokens a second."""
    text = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 2048,
    }
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    }
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": FIRST_SPECIAL + _HEARING.index("<|AUDIO|>"),
        "text_config": text,
        "audio_config": audio,
        "torch_dtype": "float32",
    }
    extractor = {
        **_MEL_BANDS,
        "processor_class": "Qwen2AudioProcessor",
        "return_attention_mask": True,
    }
    _write(folder, config, extractor, _HEARING, TOKENIZER_CONFIG)


def write_encoder_decoder(folder: Path) -> None:
    """Write an encoder-decoder model (Whisper)."""
    end = FIRST_SPECIAL + _WHISPER.index("<|endoftext|>")
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": _VOCABULARY,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "decoder_start_token_id": FIRST_SPECIAL + _WHISPER.index("<|startoftranscript|>"),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": "float32",
    }
    extractor = {
        **_MEL_BANDS,
        "processor_class": "WhisperProcessor",
        "return_attention_mask": False,
    }
    ends = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "model_max_length": 448}
    _write(folder, config, extractor, _WHISPER, {**TOKENIZER_CONFIG, **ends})


def write_adapter(folder: Path, base: TinyModelSpec, seed: int) -> None:
    """Write a LoRA adapter that changes what the tiny Llama of these sizes says."""
    rng = np.random.default_rng(seed)
    weights = {}
    for layer in range(base.layers):
        for name in ("q_proj", "v_proj"):
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = rng.standard_normal((LORA_RANK, base.hidden_size), dtype=np.float32)
            up = rng.standard_normal((base.hidden_size, LORA_RANK), dtype=np.float32)
            weights[f"{module}.lora_A.weight"] = down
            weights[f"{module}.lora_B.weight"] = 0.1 * up
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _write(
    folder: Path,
    config: Mapping[str, Any],
    extractor: Mapping[str, Any],
    special_tokens: Sequence[str],
    tokenizer_config: Mapping[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_byte_tokenizer(special_tokens).save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": config,
        "preprocessor_config.json": extractor,
        "tokenizer_config.json": tokenizer_config,
    }.items():
        (folder / name).write_text(json.dumps(content))
