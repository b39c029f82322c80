import json
from pathlib import Path

import pytest

from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.serving.tiny_model import TinyModelSpec, make_tiny_model

SMALL = TinyModelSpec(
    hidden_size=16, intermediate_size=32, layers=2, attention_heads=2, vocab_size=400
)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "layers must be >= 1, got 0"),
        ({"hidden_size": 10, "attention_heads": 4}, "multiple of attention_heads"),
        ({"vocab_size": 200}, "vocab_size must be >= 258, got 200"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_a_bad_size_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TinyModelSpec(**sizes)


@pytest.mark.vllm
def test_the_same_seed_writes_the_same_files_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, TinyModelSpec(layers=1, vocab_size=300, seed=seed))

    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    a, b, c = ([(tmp_path / run / name).read_bytes() for name in names] for run in "abc")
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert a == b
    assert a != c


@pytest.mark.vllm
def test_the_weights_have_the_shapes_that_the_config_states(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    parameters = make_tiny_model(tmp_path, SMALL)

    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    assert config["num_hidden_layers"] == 2
    assert weights["model.embed_tokens.weight"].shape == (400, 16)
    assert weights["model.layers.1.mlp.down_proj.weight"].shape == (16, 32)
    assert sum(tensor.size for tensor in weights.values()) == parameters


@pytest.mark.vllm
def test_transformers_loads_the_tokenizer_offline_and_it_loses_no_character(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    make_tiny_model(tmp_path, SMALL)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Prefill tokens delay decodes, naïvely: 日本"
    assert len(tokenizer) == 400
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "Hello"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "<s>user: Hello\nassistant:"
