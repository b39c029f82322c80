import gzip
import importlib.util
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_penalty_sched.batch import BatchShape
from vllm_penalty_sched.errors import ConfigError
from vllm_penalty_sched.simulation.cost_files import parse_costs
from vllm_penalty_sched.simulation.table_costs import TableCosts, largest_chunk

# Milliseconds. The linear part falls from 64 to 96 tokens, as measured ones do at some counts.
TABLE = """table,x,y,ms
linear,1,0,10
linear,32,0,12
linear,64,0,20
linear,96,0,18
linear,256,0,40
gemm,1,0,999
lm_head,1,0,0.5
lm_head,11,0,1.5
attn_prefill,1,0,1
attn_prefill,1,1000,2
attn_prefill,100,0,10
attn_prefill,100,1000,30
attn_decode,1,100,0.1
attn_decode,1,200,0.2
attn_decode,10,100,1
"""
MIXED = "p,c,d,ctx,ms\n" + "\n".join(
    f"{p},{c},{d},{ctx},{0.1 * p + 0.01 * c + 0.2 * d + 0.001 * ctx * (d > 0)}"
    for p in (0, 10, 100)
    for c in (0, 1000)
    for d in (0, 4)
    for ctx in (0, 500)
)


def parsed(**options: object) -> TableCosts:
    return parse_costs(TABLE, source="table.csv", **options)  # type: ignore[arg-type]


def decodes(seqs: int, context: int) -> BatchShape:
    return BatchShape(decode_seqs=seqs, decode_tokens=seqs, decode_context=context)


shapes = st.builds(
    BatchShape,
    prefills=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), max_size=3).map(tuple),
    decode_seqs=st.integers(0, 40),
    decode_tokens=st.integers(0, 40),
    decode_context=st.integers(0, 20_000),
)


def test_a_decode_only_step_costs_what_the_table_says() -> None:
    costs = parsed()

    step_ms = 1e3 * costs.step_s(decodes(1, 100))

    assert step_ms == pytest.approx(10 + 0.5 + 0.1)


def test_the_linear_part_jumps_to_the_next_measured_count_and_grows_in_proportion_beyond() -> None:
    costs = parsed()

    chunk_ms = [
        1e3 * (costs.step_s(BatchShape(prefills=((new, 0),))) - costs.prefill.cost_s(new, 0))
        for new in (2, 32, 33, 65, 512)
    ]

    assert chunk_ms == pytest.approx([12.5, 12.5, 20.5, 18.5, 80.5])


def test_attention_is_log_log_in_the_new_tokens_and_linear_in_the_cached_ones() -> None:
    prefill = parsed().prefill

    assert 1e3 * prefill.cost_s(10, 0) == pytest.approx(math.sqrt(1 * 10))
    assert 1e3 * prefill.cost_s(100, 500) == pytest.approx(20)
    assert 1e3 * prefill.cost_s(200, 0) == pytest.approx(20)
    assert 1e3 * prefill.cost_s(100, 2000) == pytest.approx(60)


def test_decodes_that_were_not_measured_cost_in_proportion_to_their_context() -> None:
    decode = parsed().decode

    assert 1e3 * decode.cost_s(10, 200) == pytest.approx(2)


def test_heads_are_interpolated_over_the_sequences_of_the_step() -> None:
    costs = parsed()
    both = BatchShape(prefills=((10, 0),), decode_seqs=5, decode_tokens=5, decode_context=500)

    step_ms = 1e3 * costs.step_s(both)

    attention_ms = 1e3 * (costs.prefill.cost_s(10, 0) + costs.decode.cost_s(5, 100))
    assert step_ms == pytest.approx(12 + 1.0 + attention_ms)


def test_overhead_and_a_mixed_decode_factor_are_added_where_they_belong() -> None:
    plain = parsed()
    dearer = parsed(mixed_decode_factor=3.0, overhead_s=1e-3)
    alone = decodes(10, 1000)
    mixed = alone.with_prefill(10, 0)

    assert dearer.step_s(alone) - plain.step_s(alone) == pytest.approx(1e-3)
    extra_s = dearer.step_s(mixed) - plain.step_s(mixed)
    assert extra_s == pytest.approx(1e-3 + 2.0 * 1e-3)
    assert dearer.step_s(BatchShape()) == 0.0


def test_a_measured_mixed_kernel_takes_the_first_chunk_with_the_decodes_and_others_alone() -> None:
    costs = parsed(mixed_text=MIXED, mixed_source="mixed")
    shape = BatchShape(
        prefills=((10, 500), (20, 0)), decode_seqs=4, decode_tokens=4, decode_context=1000
    )

    step_ms = 1e3 * costs.step_s(shape)

    first_ms = 0.1 * 10 + 0.01 * 500 + 0.2 * 4 + 0.001 * 250
    assert step_ms == pytest.approx(20 + 1.0 + first_ms + 0.1 * 20)
    assert costs.step_s(decodes(4, 1000)) == parsed().step_s(decodes(4, 1000))


@pytest.mark.parametrize("mixed_text", [None, MIXED])
@given(shape=shapes, cached=st.integers(0, 3000), limit_s=st.floats(0.005, 0.2))
def test_pricing_chunks_ahead_agrees_with_pricing_each_step(
    mixed_text: str | None, shape: BatchShape, cached: int, limit_s: float
) -> None:
    costs = parsed(mixed_text=mixed_text, mixed_source="mixed")

    ahead_s = costs.chunk_steps_s(shape, cached, 400)
    found = largest_chunk(costs, shape, cached=cached, limit_s=limit_s, most=400)

    few = [1, 2, 33, 64, 65, 100, 101, 399, 400]
    one_by_one_s = [costs.step_s(shape.with_prefill(new, cached)) for new in few]
    assert [ahead_s[new - 1] for new in few] == pytest.approx(one_by_one_s)
    fitting = np.flatnonzero(ahead_s <= limit_s)
    assert found == (fitting[-1] + 1 if fitting.size else 0)


def test_a_larger_chunk_is_found_behind_a_smaller_one_that_does_not_fit() -> None:
    costs = parsed()
    limit_s = costs.step_s(BatchShape(prefills=((90, 0),))) * (1 + 1e-9)

    found = largest_chunk(costs, BatchShape(), cached=0, limit_s=limit_s, most=8192)

    assert found == 90
    assert costs.step_s(BatchShape(prefills=((60, 0),))) > limit_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table.csv line 1: the columns must be table,x,y,ms"),
        ("table,x,y\n", "table.csv line 1: the columns must be table,x,y,ms, got table,x,y"),
        (TABLE + "linear,8,0\n", "table.csv line 17: table,x,y,ms must be counts >= 0"),
        (TABLE + "linear,8,0,-1\n", "line 17"),
        (TABLE + "linear,8,0,nan\n", "line 17"),
        (TABLE + "linear,many,0,1\n", "line 17"),
        ("table,x,y,ms\nlinear,1,0,1\n", "table.csv lacks the table attn_prefill"),
        (TABLE.replace("attn_prefill,1,", "attn_prefill,100,"), "at least two x >= 1 and two y"),
        (TABLE.replace("attn_decode,1,100,0.1", "attn_decode,1,100,0"), "a cost > 0"),
    ],
)
def test_a_wrong_table_is_named_with_its_rule(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_costs(text, source="table.csv")

    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("mixed_text", "message"),
    [
        ("p,c,d,ctx\n", "mixed.csv line 1: the columns must be p,c,d,ctx,ms"),
        ("p,c,d,ctx,ms\n0,0,0,0,0\n", "must have 0 and at least one more count"),
        (re.sub("100,1000,.*\n", "", MIXED), "lacks a combination"),
    ],
)
def test_a_wrong_mixed_table_is_named_with_its_rule(mixed_text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(mixed_text=mixed_text, mixed_source="mixed.csv")


@pytest.mark.parametrize(("factor", "mixed_text"), [(0.5, None), (math.nan, None), (1.5, MIXED)])
def test_a_factor_that_means_nothing_is_refused(factor: float, mixed_text: str | None) -> None:
    with pytest.raises(ConfigError, match="mixed-decode factor"):
        parsed(mixed_decode_factor=factor, mixed_text=mixed_text, mixed_source="mixed.csv")


def _random_shape(rng: np.random.Generator) -> BatchShape:
    seqs = int(rng.integers(0, 300))
    context = int(np.exp(rng.uniform(0, 11)))
    prefills = tuple(
        (int(np.exp(rng.uniform(0, 9.5))), int(rng.choice([0, np.exp(rng.uniform(0, 11))])))
        for _ in range(int(rng.integers(0 if seqs else 1, 4)))
    )
    return BatchShape(
        prefills=prefills, decode_seqs=seqs, decode_tokens=seqs, decode_context=seqs * context
    )


@pytest.mark.skipif("GPU_COSTS" not in os.environ, reason="GPU_COSTS names no folder of tables")
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_costs_are_those_of_the_tables_own_loader(factor: float) -> None:
    folder = Path(os.environ["GPU_COSTS"])
    spec = importlib.util.spec_from_file_location("gpu_cost", folder / "gpu_cost.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng = np.random.default_rng(0)
    for name in module.NAMES:
        loader = module.GpuCost(name, overhead_ms=1.0, mixed_decode_factor=factor)
        mixed_path = folder / f"{name}-attn_mixed.csv.gz"
        has_mixed = mixed_path.exists()
        costs = parse_costs(
            (folder / f"{name}.csv").read_text(),
            source=name,
            mixed_text=gzip.decompress(mixed_path.read_bytes()).decode() if has_mixed else None,
            mixed_decode_factor=1.0 if has_mixed else factor,
            overhead_s=1e-3,
        )

        for _ in range(300):
            shape = _random_shape(rng)
            expected_ms = loader.step_ms(
                prefills=list(shape.prefills), decodes=(shape.decode_seqs, shape.decode_context)
            )
            assert 1e3 * costs.step_s(shape) == pytest.approx(expected_ms, rel=1e-6)
