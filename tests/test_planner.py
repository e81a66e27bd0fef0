"""decide(): the same line on every rank, from all ranks' numbers."""

import pytest

from isgq.planner import REFUSED, UNSEEN, Line, Plan, decide

CANDIDATE = Line("weight", "dense", "", 0, 1000)


@pytest.mark.parametrize(
    ("sizes", "policy", "route", "reason"),
    [
        ([10, 999], "auto", "factors", "1.0 x fewer"),
        ([10, 1000], "auto", "dense", "factors cost 1,000 bytes"),
        ([10, 5000], "factors", "factors", "asked for"),
        ([UNSEEN, 100], "auto", "factors", "10.0 x fewer"),
        ([UNSEEN, UNSEEN], "factors", "dense", "no gradient yet"),
        ([10, REFUSED], "factors", "dense", "rank 1"),
        ([REFUSED, REFUSED], "auto", "dense", "rank 0"),
    ],
)
def test_routes(sizes: list[int], policy: str, route: str, reason: str) -> None:
    line = decide(CANDIDATE, sizes, policy)  # type: ignore[arg-type]
    assert line.route == route
    assert reason in line.reason
    assert line.name == CANDIDATE.name
    assert line.factor_bytes >= 0


def test_a_plan_prints_every_parameter_and_knows_no_other() -> None:
    plan = Plan((decide(CANDIDATE, [10], "auto"),))
    assert "weight" in str(plan)
    assert plan.route("weight") == "factors"
    assert plan.route("other") == "dense"
