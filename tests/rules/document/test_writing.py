"""The canonical form: it reads as the same document, and is readable."""

from __future__ import annotations

import builtins
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ratekeeper.core.errors import ConfigError
from ratekeeper.core.model import BUCKETS, UNIT_ALGORITHMS, Limit
from ratekeeper.rules.document.grammar import limit_data, to_data
from ratekeeper.rules.document.model import (
    Document,
    LimitsOfOne,
    Match,
    Override,
    PenaltySettings,
    Rule,
    Scale,
)
from ratekeeper.rules.document.reading import from_data, read, read_file
from ratekeeper.rules.document.writing import to_yaml
from tests.rules.documents import Data, documents

EXAMPLE = Path(__file__).parents[3] / "examples/limits.yaml"


@given(documents())
def test_written_documents_read_back_equal(data: Data) -> None:
    """As data, YAML and JSON, in the same order; writing it again gives the same."""
    document = from_data(data)
    written, text = to_data(document), to_yaml(document)
    for again in (from_data(written), read(text), read(json.dumps(written))):
        assert again == document
        assert to_yaml(again) == text


@given(
    st.integers(1, 1_000_000),
    st.integers(1_000, 366 * 86_400_000_000) | st.sampled_from([60_000_000, 7_200_000_000]),
    st.sampled_from(UNIT_ALGORITHMS),
    st.integers(0, 2_000_000),
    st.text(max_size=8).filter(str.isprintable),
)
@example(100, 1_000, "token_bucket", 0, "")
@example(100, 1_001, "token_bucket", 0, "")
@example(100, 999_999, "token_bucket", 50, "")
def test_any_limit_reads_back_equal(
    limit: int, window_us: int, algorithm: str, capacity: int, name: str
) -> None:
    """Every window to the microsecond, every capacity, every name."""
    try:
        given_limit = Limit(
            limit,
            per=window_us / 1_000_000,
            algorithm=algorithm,  # type: ignore[arg-type]  # one of the names
            capacity=capacity if algorithm in BUCKETS else 0,
            name=name,
        )
    except ValueError:
        return  # a century to refill
    document = from_data({"version": 1, "tiers": {"t": [limit_data(given_limit)]}})
    assert document.tiers["t"].limits == (given_limit,)


@pytest.mark.parametrize(
    ("limit", "written"),
    [
        (Limit(10, per=1), "10/second"),
        (Limit(100, per=60), "100/minute"),
        (Limit(100, per=3_600), "100/hour"),
        (Limit(100, per=86_400), "100/day"),
        (Limit(100, per=7 * 86_400), "100/7d"),
        (Limit(5, per=90), "5/90s"),
        (Limit(5, per=120), "5/2m"),
        (Limit(5, per=0.5), "5/500ms"),
        (Limit(5, per=0.0015), "5/1.5ms"),
        (Limit(10, per=1, burst=5), "10/second burst 5"),
        (Limit(10, per=1, capacity=5), "10/second capacity 5"),
        (
            Limit(10, per=1, name="x"),
            {"limit": 10, "per": "1s", "algorithm": "token_bucket", "name": "x"},
        ),
        (
            Limit(5, per=60, algorithm="leaky_bucket", capacity=3),
            "5/minute capacity 3 leaky_bucket",
        ),
        (Limit(5, per=600, algorithm="sliding_window_log"), "5 in any 10m"),
        (
            Limit(5, per=60, algorithm="leaky_bucket", capacity=3, name="x"),
            {"limit": 5, "per": "1m", "algorithm": "leaky_bucket", "capacity": 3, "name": "x"},
        ),
    ],
)
def test_limits_are_rates_where_possible(limit: Limit, written: object) -> None:
    """The shortest form without loss, in the largest unit that divides the window."""
    assert limit_data(limit) == written


def test_defaults_are_omitted() -> None:
    """A rule with only required fields is written with only these."""
    document = Document(rules=(Rule(id="all", by=(), limits=(Limit(5, per=1),)),))
    assert to_data(document) == {
        "version": 1,
        "rules": [{"id": "all", "by": [], "limits": ["5/second"]}],
    }


def test_every_other_value_is_written() -> None:
    """Every field is written; a field that is added later fails here."""
    limits = (Limit(5, per=1),)
    rule = Rule(
        id="r",
        by=("user",),
        limits=limits,
        match=Match(
            ("/a", "/b"), ("GET",), ("u",), ("k",), ("::1",), ("t",), ("x",), {"a": ("b",)}
        ),
        tiers={"pro": LimitsOfOne(limits, "strict")},
        keys={"k*": LimitsOfOne(limits, "strict")},
        unit="tokens",
        cost=2,
        costs={"/a": 3},
        consistency="strict",
        scope="global",
        across_regions="exact",
        on_failure="closed",
        mode="shadow",
        rollout=5,
        scale=(Scale("memory", 0.1, 0.2, 0.3, 4.5, 1.25, 0.05, 60.5), Scale("q", 1, 2)),
        split=4,
        penalty=PenaltySettings(1, 2.0, 3.5, 4.0, 5, 6.0, 7.0),
        replaces="s",
    )
    assigned = Rule("q", ("tenant",), limits, consistency="leased", envoy_quota="grants")
    until = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    document = Document(
        rules=(rule, Rule(id="s", by=("user",), limits=limits, unit="tokens"), assigned),
        tiers={"pro": LimitsOfOne(limits, "strict")},
        assign={"user:1": "pro"},
        allow=("user:a",),
        deny=("user:b",),
        overrides=(Override("user", "1", "r", (), 2.0, until, "why", "who", "a-1"),),
        prices={"large": {"input": 2, "output": 3}},
    )
    for value in (document, rule, rule.match, rule.scale[0], rule.penalty, document.overrides[0]):
        fields = set(type(value).__slots__)
        usual = {
            name
            for name in fields
            if getattr(value, name) in ((), {}, None, "")
            and name not in {"limits", "envoy_quota"}  # which `assigned` has
        }
        assert not usual, f"{usual} of {type(value).__name__} are not tried here"
    assert from_data(to_data(document)) == document
    assert read(to_yaml(document)) == document


def test_an_error_says_which_library_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML is an extra; plain data needs no library."""
    real = builtins.__import__

    def without_yaml(name: str, *rest: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_yaml)
    with pytest.raises(ConfigError, match=r"pip install 'ratekeeper\[rules\]'"):
        to_yaml(Document())
    assert to_data(Document()) == {"version": 1}


def test_order_is_kept() -> None:
    """The first that matches applies, so the order of keys and costs matters."""
    data = {
        "version": 1,
        "rules": [
            {
                "id": "z",
                "by": "user",
                "limits": "5/s",
                "keys": {"b*": "1/s", "a*": "2/s", "*": "3/s"},
            },
            {"id": "a", "by": "user", "limits": "5/s", "cost": {"/b/*": 3, "/*": 2, "*": 9}},
        ],
    }
    again = read(to_yaml(from_data(data)))
    assert [rule.id for rule in again.rules] == ["z", "a"]
    assert list(again.rules[0].keys) == ["b*", "a*", "*"]
    assert list(again.rules[1].costs) == ["/b/*", "/*"]
    assert again.rules[1].cost == 9


def test_lists_have_one_entry_per_line() -> None:
    """A change of one entry is a change of one line."""
    text = to_yaml(Document(deny=("user:1", "user:2")))
    assert text == "version: 1\ndeny:\n- user:1\n- user:2\n"


def test_text_that_looks_like_something_else_is_quoted() -> None:
    """Text like a number, a boolean or a time is read back as text."""
    words = ["42", "off", "2026-01-01", "1.5", "0E0", "1e5", "0x1F", "12:30:45", "~", "=", "<<"]
    tiers = dict.fromkeys(words, LimitsOfOne((Limit(5, per=1),)))
    assert list(read(to_yaml(Document(tiers=tiers))).tiers) == words


def test_the_example_in_its_canonical_form() -> None:
    """It is short, and reads back equal."""
    document = read_file(EXAMPLE)
    text = to_yaml(document)
    assert read(text) == document
    assert "  limits: [10/second, 100/minute burst 50]\n" in text
    assert "  cost: {/v1/search: 5, '/v1/export/{name}': 20}\n" in text
