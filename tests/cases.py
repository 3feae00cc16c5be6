"""Which cases of a large matrix run by default."""

import pytest

# One recipe for each code path: integers in all three matmuls, float8, blocks with two levels of scales, weight-only.
REPRESENTATIVE = ("int8", "fp8_full", "nvfp4", "int4w")


def slow_except(keep, cases):
    """`cases` for `parametrize`: those in `keep` run by default, the others are slow.

    A case in `keep` that is not among `cases` is an error, so that the list cannot fall behind.
    """
    cases = list(cases)
    unknown = [case for case in keep if case not in cases]
    if unknown:
        raise ValueError(f"{unknown} are not among the cases {cases}")
    slow = lambda case: pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)  # noqa: E731
    return [case if case in keep else slow(case) for case in cases]
