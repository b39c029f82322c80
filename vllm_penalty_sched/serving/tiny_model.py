"""A small random-weight Llama with a real tokenizer, made without a network or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_penalty_sched.errors import ConfigError, MissingDependencyError
from vllm_penalty_sched.files import write_json

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 0, 1  # order of the special tokens given to the trainer
BYTE_TOKENS = 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModelSpec:
    """Sizes of the model; the defaults give 3.7 million parameters.

    Attributes:
        hidden_size: Width of a layer, a multiple of ``attention_heads``.
        intermediate_size: Width inside the gated MLP.
        layers: Decoder layers.
        attention_heads: Query heads, and as many key-value heads.
        vocab_size: Tokens, at least the 256 bytes and two special ones.
        max_tokens: Longest sequence.
        weight_std: Standard deviation of the matrices. At the usual 0.02 attention hardly
            matters and the outputs are near constant; at 0.08 the whole prompt does.
        seed: Seed of the weights, >= 0.

    Raises:
        ConfigError: If a size or the seed breaks its rule.
    """

    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 4
    attention_heads: int = 4
    vocab_size: int = 2048
    max_tokens: int = 8192
    weight_std: float = 0.08
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "layers", "attention_heads", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.hidden_size % self.attention_heads:
            raise ConfigError(
                f"hidden_size must be a multiple of attention_heads ({self.attention_heads}), "
                f"got {self.hidden_size}"
            )
        if self.vocab_size < BYTE_TOKENS + 2:
            raise ConfigError(f"vocab_size must be >= {BYTE_TOKENS + 2}, got {self.vocab_size}")
        if self.seed < 0:
            raise ConfigError(f"seed must be >= 0, got {self.seed}")


# Steps of some 40 ms on one core: what else runs on a small machine steals tens of ms now and then,
# which an SLO of four such steps can absorb and one of four 10 ms steps cannot.
DEMO_MODEL = TinyModelSpec(layers=14, hidden_size=320, intermediate_size=864, attention_heads=5)
"""What the demo and the benchmarks on real servers serve: 18M parameters."""


def make_tiny_model(folder: Path, spec: TinyModelSpec | None = None) -> int:
    """Write a model folder that vLLM and transformers load offline.

    Args:
        folder: Created if absent; files of the same names are replaced.
        spec: Sizes and seed; the default sizes if None.

    Returns:
        The number of parameters.

    Raises:
        MissingDependencyError: If ``safetensors`` or ``tokenizers`` is not installed.
    """
    spec = spec or TinyModelSpec()
    folder.mkdir(parents=True, exist_ok=True)
    weights = _weights(spec)
    _save_weights(folder / "model.safetensors", weights)
    _train_tokenizer(spec).save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", _model_config(spec))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(spec))
    return sum(tensor.size for tensor in weights.values())


def _weights(spec: TinyModelSpec) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(spec.seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return spec.weight_std * rng.standard_normal((rows, columns), dtype=np.float32)

    hidden, inter = spec.hidden_size, spec.intermediate_size
    ones = np.ones(hidden, dtype=np.float32)
    weights = {"model.embed_tokens.weight": matrix(spec.vocab_size, hidden)}
    for index in range(spec.layers):
        layer = f"model.layers.{index}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{layer}.self_attn.{name}.weight"] = matrix(hidden, hidden)
        weights[f"{layer}.mlp.gate_proj.weight"] = matrix(inter, hidden)
        weights[f"{layer}.mlp.up_proj.weight"] = matrix(inter, hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, inter)
        weights[f"{layer}.input_layernorm.weight"] = ones
        weights[f"{layer}.post_attention_layernorm.weight"] = ones
    weights["model.norm.weight"] = ones
    return weights


def _save_weights(path: Path, weights: dict[str, NDArray[np.float32]]) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise MissingDependencyError(
            "making a model needs safetensors: pip install 'vllm-penalty-sched[vllm]'"
        ) from error
    save_file(weights, path, metadata={"format": "pt"})


def _train_tokenizer(spec: TinyModelSpec) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingDependencyError(
            "making a model needs tokenizers: pip install 'vllm-penalty-sched[vllm]'"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    return tokenizer


def _training_texts() -> list[str]:
    # The help texts of the interpreter: half a megabyte of English that ships with Python.
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _model_config(spec: TinyModelSpec) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.attention_heads,
        "num_key_value_heads": spec.attention_heads,
        "head_dim": spec.hidden_size // spec.attention_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }


def _tokenizer_config(spec: TinyModelSpec) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": spec.max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
