"""What fits the memory that is free, found by counting a few numbers of examples."""

import pytest

from revzoo.errors import BudgetError
from revzoo.planning import budget
from revzoo.planning.fit import find_largest, require_fit

COUNTS = [lambda n: 100 + 7 * n, lambda n: max(500 + n, 10 * n, 40 * n - 3000), lambda n: max(300, 4 * n)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("limit", [100, 299, 300, 501, 777, 2500, 9999, 10**6])
def test_the_largest_that_fits(count, limit):
    counted = []
    found = find_largest(lambda n: counted.append(n) or count(n), 1000, limit)
    assert len(counted) <= 8
    largest = max((n for n in range(1, 1001) if count(n) <= limit), default=0)
    assert found <= largest
    assert found == largest or (found and count(found) >= 0.9 * limit)


def test_a_step_that_takes_too_much_is_refused_with_what_fits(monkeypatch):
    count = COUNTS[0]
    require_fit(count, 10**20, "mps", "--batch ")  # whose memory is not known
    monkeypatch.setattr(budget, "_read_memory", lambda device: (1000, 4000))
    require_fit(count, 128, "cpu", "--batch ")
    require_fit(count, 178, "cpu", "--batch ", present_bytes=346)
    with pytest.raises(
        BudgetError, match=r"^A step of 300 examples takes 2.1 KiB, and 1000 B are free. What fits: --batch 114\.$"
    ):
        require_fit(count, 300, "cpu", "--batch ")
    with pytest.raises(BudgetError, match="What fits: memory.budget=auto, or --batch 50"):
        require_fit(count, 300, "cpu", "--batch ", sharing=2, others=lambda limit: ["memory.budget=auto"] * (limit == 450))
    with pytest.raises(BudgetError, match="Not even one example fits: take a smaller network or input"):
        require_fit(count, 300, "cpu", "--batch ", sharing=10)
