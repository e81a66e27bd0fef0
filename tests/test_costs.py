"""What ways cost, and which are best together: against all combinations, and against formulas by hand."""

import itertools
import random

import pytest

from isgq.auto import Auto, Sizes
from isgq.bandwidth import Link
from isgq.choice import choose as choose_codecs
from isgq.core.errors import OptionError
from isgq.costs import DENSE, Estimate, choose, ddp_seconds, dense, explain, step_seconds

LINK = Link(1e6, 0.002)


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("100Mbit/s", 12.5e6, 0.0),
        ("1Gbit/s+0.2ms", 125e6, 2e-4),
        ("12.5MB/s, 50us", 12.5e6, 5e-5),
        ("9600bit/s + 1 s", 1200, 1.0),
    ],
)
def test_links_are_read(text: str, bandwidth: float, latency: float) -> None:
    link = Link.parse(text)
    assert (link.bytes_per_second, link.latency) == (pytest.approx(bandwidth), pytest.approx(latency))
    assert Link.parse(str(link)) == link


@pytest.mark.parametrize("text", ["", "100", "100Mbit", "fast", "-1Mbit/s", "0bit/s", "1.2.3Mbit/s", "1Mbit/s+1h"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="link"):
        Link.parse(text)


def test_how_long_gathering_and_reducing_take() -> None:
    assert LINK.gather_seconds(1000, 4) == pytest.approx(3 * 0.001 + 0.002)
    assert LINK.reduce_seconds(1000, 4) == pytest.approx(6 * (0.00025 + 0.002))
    assert LINK.gather_seconds(1000, 1) == LINK.reduce_seconds(1000, 1) == 0


def test_a_step_by_hand() -> None:
    coded = Estimate("a", 1000, 40, 8.0, 0.01, 0.002, True)
    assert coded.seconds(4, LINK) == pytest.approx(0.01 + 4 * 0.002 + 3 * 0.001 + 6 * 0.00001)
    assert coded.error_of_mean(4) == 2.0
    codec, link = step_seconds([coded, dense(4000)], 30, 4, LINK)
    assert codec == pytest.approx(0.018)
    assert link == pytest.approx(3 * 0.00003 + 0.002 + 3 * 0.001 + 6 * 0.00101 + 6 * 0.002)
    assert step_seconds([dense(4000)], 30, 4, LINK)[0] == 0
    assert ddp_seconds(4000, 0.1, 0.2, 4, LINK) == pytest.approx(0.3)  # hidden behind backward
    assert ddp_seconds(4e6, 0.1, 0.2, 4, LINK) == pytest.approx(0.1 + 6.0 + 6 * 0.002)


def tables(seed: int) -> list[list[Estimate]]:
    draw = random.Random(seed)
    ways = [("a", True), ("b", True), ("c", False)]

    def estimate(name: str, unbiased: bool) -> Estimate:
        return Estimate(name, draw.uniform(1, 4000), 0, draw.uniform(0, 4), draw.uniform(0, 2e-3), 1e-4, unbiased)

    return [[dense(4000), *(estimate(*way) for way in ways)] for _ in range(4)]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("limit", [0.0, 0.5, 2.0, 100.0])
def test_the_choice_keeps_the_limit_and_is_near_the_best_of_all_combinations(seed: int, limit: float) -> None:
    table, workers = tables(seed), 4

    def total(ways: tuple[Estimate, ...]) -> tuple[float, float]:
        return sum(w.seconds(workers, LINK) for w in ways), sum(w.error_of_mean(workers) for w in ways)

    chosen = choose(table, workers, LINK, limit)
    seconds, error = total(tuple(chosen))
    assert error <= limit
    possible = [total(ways) for ways in itertools.product(*table)]
    best = min(s for s, e in possible if e <= limit)
    gap = max(
        max(w.seconds(workers, LINK) for w in ways) - min(w.seconds(workers, LINK) for w in ways) for ways in table
    )
    assert best <= seconds <= best + gap  # one price for all is at most one gradient's choice from the best
    for i, ways in enumerate(table):  # and no single faster way is left that would keep the limit
        for way in ways:
            other = total((*chosen[:i], way, *chosen[i + 1 :]))
            assert other[0] >= seconds or other[1] > limit
    if limit == 0:
        assert {each.way for each in chosen} == {DENSE}
    if limit == 100:
        assert seconds == pytest.approx(best)


def test_the_reason_names_the_times() -> None:
    ways = [dense(1e6), Estimate("a", 1e3, 0, 9.0, 0.0, 0.0, True)]
    assert explain(ways, ways[1], 2, LINK) == "1.00 ms instead of 1000.00 ms densely"
    assert explain(ways, ways[0], 2, LINK) == "1000.00 ms; a 1.00 ms, but with too large an error"
    assert explain(ways[:1], ways[0], 2, LINK) == "nothing measured"


def test_the_codec_auto_is_read_and_says_all_its_options() -> None:
    auto = Auto.parse("auto(isgq; rotated:nmse=0.5;qsgd):link=1Gbit/s+1ms,error=0.5,timed=false")
    assert list(auto.ways) == ["isgq", "rotated:nmse=0.5", "qsgd"]
    assert Auto.parse(auto.spec) == auto
    assert (
        choose_codecs("auto:link=1Gbit/s", None, "tensor", "gather", None, "both")
        .settings["codec"]
        .startswith("auto(isgq;balanced;balanced:samples=0.25;rotated:share=layer,nmse=2;")
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("auto", "needs to know the link"),
        ("auto:link=fast", "must be a bandwidth"),
        ("auto:link=1Mbit/s,error=0", "must be positive"),
        ("auto:link=1Mbit/s,error=small", "must be a number"),
        ("auto:link=1Mbit/s,timed=maybe", "true or false"),
        ("auto:link=1Mbit/s,ratio=3", "no option 'ratio'"),
        ("auto(nonsense):link=1Mbit/s", "unknown codec"),
        ("auto(error_feedback(sign)):link=1Mbit/s", "memory"),
        ("auto(rotated:bases=learned):link=1Mbit/s", "memory"),
    ],
)
def test_what_auto_cannot_take(spec: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Auto.parse(spec)


@pytest.mark.parametrize("options", [{"dense": "fp16"}, {"aggregate": "two_pass"}, {"scope": "model"}])
def test_auto_is_all_there_is(options: dict[str, str]) -> None:
    given = {"dense": None, "scope": "tensor", "aggregate": "gather", "down": None, "memory": "both", **options}
    with pytest.raises(OptionError, match="auto chooses"):
        choose_codecs("auto:link=1Mbit/s", **given)  # type: ignore[arg-type]


def test_a_new_plan_is_due_after_some_steps_of_another_size_and_ever_later() -> None:
    sizes = Sizes()
    sizes.plan(100)
    assert [sizes.asks(size) for size in (100, 149, 40, 100, 40, 0, 160)] == [False] * 6 + [True]
    sizes.plan(160)
    assert [sizes.asks(40) for _ in range(4)] == [False, False, False, True]
    fresh = Sizes()  # resumed: the plan came from a checkpoint
    assert not any(fresh.asks(100) for _ in range(5))
