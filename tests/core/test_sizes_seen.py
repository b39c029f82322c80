from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched import BatchShape, StepTimeModel
from vllm_penalty_sched.learning.features import EDGES
from vllm_penalty_sched.learning.sizes_seen import SizesSeen


def test_a_size_is_known_after_three_steps_between_the_same_edges() -> None:
    sizes = SizesSeen()
    for tokens in (EDGES[5], EDGES[4] + 1):
        sizes.add(tokens)
    assert not sizes.knows(EDGES[5])

    sizes.add(EDGES[5])

    assert sizes.knows(EDGES[5])
    assert sizes.knows(EDGES[4] + 1)
    assert not sizes.knows(EDGES[4])
    assert not sizes.knows(EDGES[5] + 1)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=20))
def test_a_loaded_model_knows_the_sizes_that_were_learned_from(prefills: list[int]) -> None:
    model = StepTimeModel()
    for prefill_tokens in prefills:
        shape = BatchShape(decode_seqs=4, decode_tokens=4, decode_context=4000)
        for _ in range(3):
            model.observe(shape.with_prefill(prefill_tokens, 0), 1e-2 + 1e-4 * prefill_tokens)

    loaded = StepTimeModel.from_state(model.state())

    for tokens in (1, *EDGES, 5000):
        assert loaded.knows_size(tokens) == model.knows_size(tokens)
    assert all(model.knows_size(4 + prefill_tokens) for prefill_tokens in prefills)
