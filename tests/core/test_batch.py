import pytest
from hypothesis import given

from tests.strategies import shapes
from vllm_penalty_sched import BatchShape, ConfigError


def test_prefill_ratio_is_prefill_tokens_over_all_tokens() -> None:
    shape = BatchShape(
        prefills=((24, 0), (8, 100)), decode_seqs=4, decode_tokens=8, decode_context=4096
    )

    assert shape.prefill_tokens == 32
    assert shape.tokens == 40
    assert shape.prefill_ratio == 0.8


def test_an_empty_step_has_ratio_zero() -> None:
    assert BatchShape().prefill_ratio == 0.0


@given(shapes())
def test_the_ratio_is_a_share(shape: BatchShape) -> None:
    assert 0.0 <= shape.prefill_ratio <= 1.0
    assert shape.without_prefill().prefill_ratio == 0.0


def test_adding_no_tokens_changes_nothing() -> None:
    shape = BatchShape(decode_seqs=2, decode_tokens=2, decode_context=10)

    assert shape.with_prefill(0, 5) == shape
    assert shape.with_prefill(3, 5).prefills == ((3, 5),)


@pytest.mark.parametrize(
    "fields",
    [
        {"decode_seqs": -1},
        {"decode_context": -1},
        {"prefills": ((0, 0),)},
        {"prefills": ((1, -1),)},
    ],
)
def test_impossible_counts_are_refused(fields: dict) -> None:
    with pytest.raises(ConfigError, match=">= "):
        BatchShape(**fields)
