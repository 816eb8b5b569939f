"""Reading loss curves and comparing them."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.errors import DataError
from tests.messages import refused
from trainer.compare.curves import QUANTITIES, Comparison, Curve, Tolerance, common_dtype, compare, report
from trainer.compare.logs import TextLog
from trainer.compare.logs import parse_log as parse_text_log
from trainer.compare.read import curve_of, read_curve
from trainer.metrics.json_lines import ABSENT, DECIMAL, EXACT
from trainer.metrics.log_file import read_lines

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def record(iteration: int, loss: float, **more: object) -> str:
    finite = loss if math.isfinite(loss) else None
    return json.dumps({"iteration": iteration, "loss": finite, "loss_hex": loss.hex(), **more}, allow_nan=False)


def parse_metrics(text: str, *, source: str) -> Curve:
    return curve_of(read_lines(io.BytesIO(text.encode()), source, QUANTITIES))


def metrics(losses: dict[int, float]) -> Curve:
    return parse_metrics("".join(record(i, loss) + "\n" for i, loss in losses.items()), source="made.jsonl")


def parse_log(text: str) -> Curve:
    return parse_text_log(TextLog(text, "log"))


def losses_of(curve: Curve) -> dict[int, float]:
    return dict(zip(curve.points.iterations.tolist(), curve.points.values[0].tolist(), strict=True))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step     7/100 | train loss 4.250000 | grad norm 1.50 | lr 3.0e-04 | 12 ms", (7, 4.25, 1.5, 3e-4)),
        ("E20250101 10:00:00.1 1 main.cc:9] step    7/10 | train loss 4.25 | lr 3e-04 | (1 ms)", (7, 4.25, None, 3e-4)),
        ("\x1b[32m[rank0]: step 7/10 | train loss 4.25\x1b[0m", (7, 4.25, None, None)),
        (
            " [2024-01-01 00:00:00] iteration        7/     100 | consumed samples:           56 | elapsed time per "
            "iteration (ms): 9.1 | learning rate: 3.0E-04 | global batch size:     8 | lm loss: 4.25E+00 | "
            "loss scale: 1.0 | grad norm: 1.5 | params norm: 9.0 |",
            (7, 4.25, 1.5, 3e-4),
        ),
        (
            "step    7/20 | loss 4.250000 (+nanz)| norm 1.5000 (+nanz)| lr 3.00e-04 | 100.00 ms | -100.0% bf16 MFU | "
            "9 tok/s",
            (7, 4.25, 1.5, 3e-4),
        ),
        ("s:6 trl:4.2500 lr:0.000300 norm:1.50", (7, 4.25, 1.5, 3e-4)),
    ],
)
def test_log_lines_of_every_known_format_are_read(
    line: str, expected: tuple[int, float, float | None, float | None]
) -> None:
    points = parse_log(line + "\n").points
    kinds = [ABSENT if value is None else DECIMAL for value in expected[1:]]
    values = [nan if value is None else value for value in expected[1:]]
    assert (points.iterations.tolist(), points.kinds[:, 0].tolist()) == ([expected[0]], kinds)
    assert repr(points.values[:, 0].tolist()) == repr(values)


@pytest.mark.parametrize(
    "line",
    [
        "step 250: train loss 1.2000, val loss 1.3000",
        "validation loss at iteration 10 | lm loss value: 1.0E+01 | lm loss PPL: 2.2E+04 |",
        " iteration  2/ 10 | consumed samples: 16 | loss scale: 65536.0 | number of skipped iterations:   1 |",
        "val loss 4.2",
        "s:0 tel:11.0340",
        "s:250 eval:0.2931",
        "step 20/100 | val loss 4.2",
        "step 20/100 | saved iter_0000020",
    ],
)
def test_lines_that_are_not_training_losses_are_passed_over(line: str) -> None:
    curve = parse_log(f"{line}\nstep 1/10 | train loss 3.0\n{line}\n")
    assert losses_of(curve) == {1: 3.0}


@pytest.mark.parametrize(
    "written", ["nan", "NaN", "-nan", "inf", "INF", "-inf", "Infinity", "-1.5", "+1.5e-3", "2E+01", "0"]
)
def test_every_way_to_write_a_number_is_read(written: str) -> None:
    for line in (
        f"step 1/2 | train loss {written} | x",
        f"iter 0: loss {written}, time",
        f"iteration 1/ 2 | lm loss: {written} |",
    ):
        assert repr(losses_of(parse_log(line + "\n"))[1]) == repr(float(written))


def test_a_torn_last_log_line_keeps_its_closed_fields_alone() -> None:
    curve = parse_log("step 1/9 | train loss 4.25 |\nstep 2/9 | train loss 4.2")
    assert losses_of(curve) == {1: 4.25}
    assert "line 2 is torn" in curve.notes[0]
    points = parse_log("step 2/9 | train loss 4.25 | norm 1.2").points
    assert points.kinds.tolist() == [[DECIMAL], [ABSENT], [ABSENT]]


MAIN_LOG = """\
s:0 tel:11.0340
s:0 trl:10.9958 lr:0.000001 norm:15.22
s:1 trl:10.8772 lr:0.000002 norm:14.01
s:2 tel:10.5111
"""


def test_a_log_of_llm_c_may_be_torn_anywhere_in_its_last_line() -> None:
    """A number that the tear has cut is never read, and a cut training line leaves no other loss."""
    text = MAIN_LOG.partition("s:2")[0]
    losses = losses_of(parse_log(text))
    last = text.rstrip("\n").rindex("\n") + 1
    for length in range(last + 1, len(text)):
        left = losses_of(parse_log(text[:length]))
        assert left in (losses, {1: losses[1]})
    assert left == losses  # only the newline is missing


@pytest.mark.parametrize(
    "broken",
    [
        "{oops", "[1]", '{"loss": 1.0}', '{"iteration": true, "loss": 1.0}', '{"iteration": -1, "loss": 1.0}',
        '{"iteration": 3, "loss": null}', '{"iteration": 3, "loss": 1.0, "grad_norm_hex": "0x1p99999"}', "[" * 100_000,
        record(1, 2.0),
    ],
    ids=range(9),
)  # fmt: skip
def test_a_broken_metrics_record_is_refused_with_its_line(broken: str) -> None:
    with refused(DataError, "m.jsonl", "line 2"):
        parse_metrics(f"{record(1, 2.0)}\n{broken}\n{record(4, 2.0)}\n", source="m.jsonl")


@given(st.integers(1, len(record(2, 2.5))))
def test_a_last_record_torn_anywhere_is_left_out_with_a_note(length: int) -> None:
    curve = parse_metrics(f"{record(1, 2.0)}\n{record(2, 2.5)[:length]}", source="m")
    if length == len(record(2, 2.5)):  # only the newline is missing
        assert (losses_of(curve), curve.notes) == ({1: 2.0, 2: 2.5}, ())
        return
    assert losses_of(curve) == {1: 2.0}
    assert "line 2 is torn" in curve.notes[0]


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", '{"iteration": 1, "event": "save"}\n'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_a_file_without_a_loss_is_refused_by_name_and_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with refused(DataError, name):
        read_curve(tmp_path / name)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ("train:\n  dtype: float32\n", "float32"),
        ("train:\n    seed: 1\n\n    dtype: 'bf16'  # short\n", "bfloat16"),
        ("train:\n  # why\n  dtype: BFLOAT16", "bfloat16"),
        ("train:\n  inner:\n    dtype: bfloat16\n", None),
        ("train:\n  seed: 1\nmodel:\n  dtype: bfloat16\n", None),
        ("train:\n  dtype: int8\n", None),
        ("train: {}\n", None),
        ("train:\n  dtype: bfloat16\ndate: 2024-13-45\n", "bfloat16"),
        (f"train:\n  dtype: bfloat16\nnested: {'[' * 5000}\n", None),
    ],
)
def test_only_the_dtype_directly_under_train_counts(tmp_path: Path, config: str, dtype: str | None) -> None:
    (tmp_path / "metrics.jsonl").write_text(record(3, 2.0))
    (tmp_path / "config.yaml").write_text(config)
    assert {read_curve(path).dtype for path in (tmp_path, tmp_path / "metrics.jsonl")} == {dtype}
    (tmp_path / "copy.txt").write_text(record(3, 2.0))
    assert read_curve(tmp_path / "copy.txt").points.kinds[0, 0] == EXACT


@given(st.dictionaries(st.integers(0, 9), FLOATS, min_size=1), st.dictionaries(st.integers(0, 9), FLOATS, min_size=1))
def test_equal_bits_imply_equal_within_any_tolerance(one: dict[int, float], other: dict[int, float]) -> None:
    base, test = metrics(one), metrics(other)
    loose = compare(base, test, tolerance=Tolerance(1e-3, 1e-3))
    assert {*loose.different} <= {*compare(base, test, tolerance=None).different}
    assert loose.compared + len(loose.missing_in_base) + len(loose.missing_in_test) == len(one.keys() | other.keys())
    assert report(loose).splitlines()[-1] == loose.verdict


NUMBERS = (1.0, 1.0 + 2**-20, 1.001, 0.0, -0.0, nan, inf, -inf)


@pytest.mark.parametrize(("base", "test"), [*itertools.product(NUMBERS, NUMBERS)])
def test_a_value_that_is_not_finite_equals_only_itself(base: float, test: float) -> None:
    admitted = repr(base) == repr(test) or abs(base - test) <= 1e-5
    for tolerance in (Tolerance(1e-5), Tolerance(1e-5, 1e-6)):
        assert compare(metrics({1: base}), metrics({1: test}), tolerance=tolerance).equal is admitted


@pytest.mark.parametrize(("loss", "equal"), [(11.5, True), (11.625, False), (8.5, True), (8.375, False)])
def test_a_relative_tolerance_is_of_the_base(loss: float, equal: bool) -> None:
    assert compare(metrics({1: 10.0}), metrics({1: loss}), tolerance=Tolerance(0.5, 0.1)).equal is equal


def test_one_bit_of_the_loss_is_seen_or_within_a_tolerance() -> None:
    base, test = metrics({1: 2.0, 2: 3.0}), metrics({1: 2.0, 2: math.nextafter(3.0, 4.0)})
    assert compare(base, test, tolerance=None).verdict == "DIFFERENT: 1 of 2 iterations, first at 2"
    assert compare(metrics({1: 0.0}), metrics({1: -0.0}), tolerance=None).different.tolist() == [1]
    within = compare(base, test, tolerance=Tolerance(1e-5))
    assert (within.verdict, within.bit_equal) == ("equal within 1e-05: 2/2 iterations", 1)
    assert within.largest is not None
    assert within.largest.iteration == 2


@pytest.mark.parametrize("quantity", ["grad_norm", "lr"])
def test_bitwise_looks_at_grad_norm_and_lr_where_both_have_them(quantity: str) -> None:
    def curve(**more: object) -> Curve:
        return parse_metrics(record(1, 2.0, **more), source="m")

    exact, other, decimal = f"{quantity}_hex", (1.25).hex(), curve(**{quantity: 1.25})
    hexed = curve(**{exact: (1.5).hex()})
    assert compare(hexed, curve(**{exact: other}), tolerance=None).differences(1)[0].quantity == quantity
    assert not compare(curve(**{quantity: 1.5}), decimal, tolerance=None).equal
    assert compare(hexed, curve(), tolerance=None).bit_identical
    assert compare(hexed, decimal, tolerance=None).bit_identical, "a decimal proves nothing"
    assert not compare(curve(**{exact: "inf"}), decimal, tolerance=None).equal
    assert compare(hexed, curve(**{exact: other}), tolerance=Tolerance(1e-5)).equal


def test_decimals_prove_no_equal_bits() -> None:
    log = parse_text_log(TextLog("step 1/1 | train loss 2.0 |\n", "train.log"))
    exact = metrics({1: 2.0})
    for base, test in ((log, exact), (exact, log), (log, log)):
        assert compare(base, test, tolerance=Tolerance(1e-5)).verdict == "equal within 1e-05: 1/1 iterations"
    for base, test in ((log, exact), (exact, log)):
        with refused(DataError, "train.log, iteration 1"):
            compare(base, test, tolerance=None)


def test_an_allowed_prefix_covers_only_the_start_of_test() -> None:
    def constant(*iterations: int) -> Curve:
        return metrics(dict.fromkeys(iterations, 2.0))

    def compared(base: Curve, test: Curve) -> Comparison:
        return compare(base, test, tolerance=None, allow_missing_prefix=True)

    base, resumed, late = constant(*range(1, 101)), constant(*range(41, 101)), constant(101)
    allowed = compared(base, resumed)
    assert (allowed.equal, allowed.allowed_prefix.tolist()) == (True, [*range(1, 41)])
    assert not compare(base, resumed, tolerance=None).equal
    for pair in ((resumed, base), (late, base), (base, late)):
        assert not compared(*pair).equal
    holed = constant(*range(41, 50), *range(51, 100))
    assert compared(base, holed).missing_in_test.tolist() == [50, 100]


def test_the_coarser_dtype_is_the_common_one() -> None:
    dtypes = (None, "float32", "bfloat16")
    for (first, base), (second, test) in itertools.product(enumerate(dtypes), enumerate(dtypes)):
        curves = (replace(metrics({1: 1.0}), dtype=name) for name in (base, test))
        assert common_dtype(*curves) == dtypes[max(first, second)]


def test_the_report_lists_missing_iterations_as_ranges() -> None:
    base = metrics(dict.fromkeys([*range(1, 41), 43, 50], 1.0))
    text = report(compare(base, metrics({50: 1.0}), tolerance=Tolerance(1e-5)))
    assert "in test: 1-40, 43 (41 in all) (--allow-missing-prefix" in text
    text = report(compare(metrics({50: 1.0}), base, tolerance=Tolerance(1e-5)), max_rows=1)
    assert "in base: 1-40, and 1 more ranges (41 in all)" in text


def evaluated(losses: dict[int, float]) -> Curve:
    rows = [record(iteration, 1.0) for iteration in (1, 2, 3)]
    rows += [
        json.dumps({"iteration": iteration, "event": "evaluation", "valid_loss": loss, "valid_loss_hex": loss.hex()})
        for iteration, loss in losses.items()
    ]
    return parse_metrics("".join(f"{row}\n" for row in rows), source="metrics.jsonl")


def test_validation_losses_are_compared_where_both_have_them() -> None:
    base, tolerance = evaluated({2: 1.5, 3: 1.25}), Tolerance(0.1)
    near, far, fewer = evaluated({2: 1.5 + 1e-9, 3: 1.25}), evaluated({2: 1.5, 3: 2.25}), evaluated({3: 1.25})
    assert compare(base, near, tolerance=tolerance).verdict == "equal within 0.1: 3/3 iterations"
    assert compare(base, near, tolerance=None).verdict == "DIFFERENT: 1 of 3 iterations, first at 2"
    assert compare(base, far, tolerance=tolerance).verdict == "DIFFERENT: 1 of 3 iterations, first at 3"
    assert compare(base, fewer, tolerance=None).verdict == "bit-identical: 3/3 iterations"
    assert "evaluated  at 2 iterations in both: 1 validation losses differ" in report(
        compare(base, far, tolerance=None)
    )


def test_differences_of_all_quantities_are_in_order_of_iteration() -> None:
    rows = [record(3, 1.0), record(1, 1.0, grad_norm_hex="0x1p0"), record(2, 1.0)]
    rows.append('{"iteration": 2, "event": "evaluation", "valid_loss_hex": "0x1p0"}')
    base, test = ("\n".join([*rows, ""]).replace(*words) for words in (("", ""), ("0x1p0", "0x1p1")))
    test = test.replace(record(3, 1.0), record(3, 1.5))
    differences = compare(*(parse_metrics(text, source="m") for text in (base, test)), tolerance=None).differences(9)
    assert [(d.iteration, d.quantity) for d in differences] == [(1, "grad_norm"), (2, "valid_loss"), (3, "loss")]
    assert [d.size for d in differences] == [1.0, 1.0, 0.5]
