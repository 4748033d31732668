"""Reading the configuration of envoyproxy/ratelimit: what it contains, and clear errors."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratekeeper.rules.document.reading import DocumentError
from ratekeeper.rules.document.tree import BYTES_MAX
from ratekeeper.service.envoy.ratelimit_config import (
    FILES_MAX,
    LEVELS_MAX,
    UNITS_S,
    ConfigDescriptor,
    RateLimitPolicy,
    read_config,
)
from ratekeeper.service.envoy.ratelimit_import import import_rules

LIMIT = "rate_limit: {unit: minute, requests_per_unit: 5}"
SELF_REPLACING = "{unlimited: true, name: a, replaces: [{name: a}]}"


def problems(text: str) -> list[str]:
    """Return the messages of a text with problems, each with its file and position."""
    with pytest.raises(DocumentError) as error:
        read_config(text, "rl.yaml")
    return [str(each) for each in error.value.problems]


def only(text: str) -> ConfigDescriptor:
    """Return the only descriptor of a configuration."""
    (domain,) = read_config(text, "rl.yaml").domains
    (found,) = domain.descriptors
    return found


def nested(levels: int) -> str:
    """Return a configuration with so many levels of descriptors."""
    found: dict[str, Any] = {"key": "k", "rate_limit": {"unit": "day", "requests_per_unit": 1}}
    for _ in range(levels - 1):
        found = {"key": "k", "descriptors": [found]}
    return yaml.safe_dump({"domain": "d", "descriptors": [found]})


def test_descriptors_are_read_with_their_lines() -> None:
    """Values are text as they are spelled; each descriptor knows its file and line."""
    text = """\
domain: 42
descriptors:
  - key: plan
    value: yes
    shadow_mode: on
    descriptors:
      - key: path
        value: /a/*
        share_threshold: true
        rate_limit:
          unit: HOUR
          requests_per_unit: 7
          name: x
          replaces: [{name: y}, {name: z}]
"""
    (domain,) = read_config(text, "rl.yaml").domains
    below = ConfigDescriptor(
        "path", "/a/*", "rl.yaml", 7, RateLimitPolicy(7, 3_600, 11, "x", ("y", "z")),
        share_threshold=True,
    )  # fmt: skip
    above = ConfigDescriptor("plan", "yes", "rl.yaml", 3, None, (below,), shadow_mode=True)
    assert (domain.name, domain.line, domain.descriptors) == ("42", 1, (above,))


@pytest.mark.parametrize("unit", UNITS_S)
def test_every_unit_is_read_in_any_case(unit: str) -> None:
    """A week, a month of 30 days and a year of 365 days are units, too."""
    for spelling in (unit, unit.upper()):
        found = only(
            f"{{domain: d, descriptors: [{{key: k, rate_limit: {{unit: {spelling},"
            f" requests_per_unit: 1}}}}]}}"
        )
        assert found.limit == RateLimitPolicy(1, UNITS_S[unit], found.line)


def test_a_json_file_and_an_alias_are_read() -> None:
    """JSON is YAML, and anchors are common in large configurations."""
    data = {"name": "x", "domain": "d", "descriptors": [{"key": "k"}]}
    assert only(json.dumps(data)).key == "k"
    text = f"domain: d\ndescriptors:\n- key: a\n  {LIMIT.replace(': {', ': &l {')}\n"
    text += "- {key: b, rate_limit: *l}\n"
    first, second = read_config(text).domains[0].descriptors
    assert first.limit == second.limit


def test_a_config_map_is_unwrapped_with_the_lines_of_its_file() -> None:
    """Each file below `data` is one configuration."""
    text = f"""\
apiVersion: v1
kind: ConfigMap
metadata: {{name: ratelimit}}
data:
  a.yaml: |
    domain: a
    descriptors:
      - key: k
        {LIMIT}
  b.yaml: "{{domain: b, descriptors: [{{key: k}}]}}"
"""
    first, second = read_config(text, "cm.yaml").domains
    assert (first.name, first.line, first.descriptors[0].line) == ("a", 6, 8)
    assert (second.name, second.line, second.descriptors[0].line) == ("b", 10, 10)


def test_a_mistake_in_a_config_map_has_the_line_of_the_file() -> None:
    """The user edits the ConfigMap, not the text in it."""
    text = (
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  a.yaml: |\n    domain: a\n    descripters: []\n"
    )
    (found,) = problems(text)
    assert found.startswith("rl.yaml:6:1: unknown field")
    assert 'did you mean "descriptors"?' in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "there is no configuration in it; expected domain: shop"),
        ("# nothing\n", "there is no configuration in it"),
        ("domain: [", "invalid YAML"),
        ("a\tb: \x00", "does not allow the character U+0000"),
        ("- domain: d\n", "a mapping with domain and descriptors; found a list"),
        ("just text", "found \"just text\""),
        ("domain: a\n---\ndomain: b\n", "rl.yaml:2:1: a second document starts here"),
        ("version: 1\nrules: []\n", "Ratekeeper rule document already; use: ratekeeper rules val"),
        ("static_resources: {}\nadmin: {}\n", "configuration of Envoy itself (it has admin)"),
        ("domain: d\nrate_limit_service: {}\n", "configuration of Envoy itself"),
        ("admin: {}\nlisteners:\n  - " + "{a: " * 20 + "1" + "}" * 20,
         "configuration of Envoy itself (it has admin)"),
        ("apiVersion: apps/v1\nkind: Deployment\n", "Kubernetes object of the kind \"Deployment\""),
        ("apiVersion: v1\nkind: ConfigMap\n", "the ConfigMap has no data"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {a: [1]}\n", "expected the text of a file"),
        ("apiVersion: v1\nkind: ConfigMap\ndata:\n  a: |\n    apiVersion: v1\n    kind: ConfigMap",
         "rl.yaml:5:1: this is a Kubernetes object of the kind \"ConfigMap\""),
        ("resources: []\nversion_info: x\n", "this is a discovery response"),
        ("descriptors: []\n", '"domain" is missing'),
        ("domain: ''\n", "the domain is empty"),
        ("domain: {a: b}\n", "expected text, found a mapping"),
        ("domain: d\ndescriptors: {}\n", "rl.yaml:2:14: descriptors: expected a list"),
        ("domain: d\ndescriptors: [x]\n", "is not a mapping"),
        ("domain: d\ndescriptors: [{}]\n", '"key" is missing'),
        ("domain: d\ndescriptors: [{key: ''}]\n", "the key is empty"),
        ("domain: d\ndescriptors: [{key: k, ratelimit: {}}]\n", 'did you mean "rate_limit"?'),
        ("domain: d\ndescriptors: [{key: k, rateLimit: {}}]\n", 'did you mean "rate_limit"?'),
        ("domain: d\ndescriptors: [{key: k, shadow_mode: 1}]\n", "1 is not a boolean"),
        ("domain: d\ndescriptors: [{key: k, value: a, share_threshold: true}]\n",
         "share_threshold needs a value with *"),
        ("domain: d\ndescriptors: [{key: k}, {key: k}]\n", 'the descriptor "k" occurs twice'),
        ("domain: d\ndescriptors: [{key: k, value: a}, {key: k, value: a}]\n", '"k_a" occurs'),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {}}]\n", '"" is not a unit; known: "sec'),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {unit: minutes}}]\n",
         'did you mean "minute"?'),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: -1}}]\n",
         "whole number from 0 to 4,294,967,295"),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1.5}}]\n",
         "1.5 is not a whole number"),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, unlimited: true}}]\n",
         "has no unit; remove one"),
        ("domain: d\ndescriptors: [{key: k, rate_limit: {unlimited: true, replaces: [{}]}}]\n",
         "the name of the replaced limit is missing"),
        (f"domain: d\ndescriptors: [{{key: k, rate_limit: {SELF_REPLACING}}}]\n",
         "the name of this limit itself"),
        ('{"domain": "\\ud800"}', "rl.yaml:1:"),
        (nested(LEVELS_MAX + 1), f"descriptors with more than {LEVELS_MAX} levels"),
        ("a: &a [x, x, x, x, x, x, x, x, x, x]\n"
         + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 10)}]\n"
                   for a, b in ["ab", "bc", "cd", "de", "ef", "fg", "gh"]),
         "with all aliases expanded"),
        ("x" * (BYTES_MAX + 1), "is this the configuration of envoyproxy/ratelimit?"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_configuration_is_rejected(text: str, expected: str) -> None:
    """The message says what the file is or where the mistake is, and what to do."""
    found = problems(text)
    assert any(expected in each for each in found), found
    assert all(each.startswith("rl.yaml:") for each in found)


def test_all_mistakes_are_reported_at_once() -> None:
    """In the order of the file."""
    found = problems("domain: ''\ndescriptors:\n  - key: ''\n  - {kay: k}\n")
    assert [each.split(":")[1] for each in found] == ["1", "3", "4", "4"]


def test_a_config_map_has_at_most_so_many_files() -> None:
    """Each of them is parsed by itself."""
    data = {f"f{number}": "" for number in range(FILES_MAX + 1)}
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "ConfigMap", "data": data})
    assert f"more than {FILES_MAX:,} files" in problems(text)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"domain: d\nunit: day\ndescriptors: [{{key: k, {LIMIT}}}]\n",
         "rl.yaml:2: note: unit has no effect here"),
        ("domain: d\ndescriptors:\n- key: k\n  requests_per_unit: 1\n",
         "rl.yaml:4: note: requests_per_unit has no effect here"),
        ("domain: d\ndescriptors:\n- key: k\n  rate_limit: {unit: day}\n",
         "rl.yaml:4: note: requests_per_unit is missing, which envoyproxy/ratelimit reads as 0"),
        ("domain: d\ndescriptors:\n- key: k\n  detailed_metric: true\n",
         "rl.yaml:4: not converted: detailed_metric adds values"),
        ("domain: d\ndescriptors:\n- key: k\n  value_to_metric: true\n",
         "rl.yaml:4: not converted: value_to_metric adds values"),
        ("domain: d\ndescriptors:\n- key: k\n  metadata: {a: {b: [c]}}\n",
         "rl.yaml:4: not converted: metadata is dynamic metadata"),
    ],
)  # fmt: skip
def test_a_field_without_a_counterpart_is_reported(text: str, expected: str) -> None:
    """With its line; the rest of the file is read."""
    (found,) = read_config(text, "rl.yaml").findings
    assert str(found).startswith(expected)


def test_flags_that_are_false_are_not_reported() -> None:
    """They are the default."""
    text = "{domain: d, descriptors: [{key: k, detailed_metric: false, value_to_metric: no}]}"
    assert read_config(text).findings == ()


@pytest.mark.parametrize("levels", [1, LEVELS_MAX])
def test_the_deepest_configuration_is_converted(levels: int) -> None:
    """The bound of the reader leaves room for as many levels as the message says."""
    assert len(import_rules([read_config(nested(levels))]).document.rules) == 1


# ── Any input ──────────────────────────────────────────────────────────────────────────────────

WORDS = st.sampled_from(
    ["domain", "descriptors", "key", "value", "rate_limit", "unit", "requests_per_unit", "name",
     "unlimited", "shadow_mode", "replaces", "share_threshold", "metadata", "minute", "day", "k",
     "path", "remote_address", "method", "a*b", "*", "10.*", "/a*", "?", "[", "\x07", "kind",
     "data", "ConfigMap", "apiVersion", "\u2028"]
)  # fmt: skip
SCALARS = WORDS | st.integers(-2, 2**33) | st.booleans() | st.none() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(WORDS, each, max_size=4),
    max_leaves=12,
)
LIMITS = st.fixed_dictionaries(
    {"unit": st.sampled_from(["minute", "day"]) | SCALARS, "requests_per_unit": st.integers(-1, 3)},
    optional={"unlimited": st.booleans(), "replaces": VALUES, "name": SCALARS},
)


def descriptors(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return lists of descriptors that are nearly right."""
    return st.lists(
        st.fixed_dictionaries(
            {"key": SCALARS},
            optional={"value": SCALARS, "rate_limit": LIMITS | SCALARS, "descriptors": below,
                      "shadow_mode": st.booleans(), "share_threshold": st.booleans()},
        ),
        max_size=3,
    )  # fmt: skip


FILES = st.fixed_dictionaries(
    {"domain": SCALARS, "descriptors": descriptors(descriptors(VALUES)) | VALUES}
)


def converted(text: str) -> None:
    """Convert a text. Any error other than a DocumentError fails the test."""
    with suppress(DocumentError):
        import_rules([read_config(text, "rl.yaml")])


@given(VALUES | FILES)
def test_any_data_is_converted_or_rejected(data: object) -> None:
    """No file causes another error; a converted document is valid, or this would raise."""
    converted(yaml.safe_dump(data))


@given(st.text(alphabet="domain:escript-[]{}&*<!|>\"' \n\t#%k1", max_size=80))
def test_any_text_is_converted_or_rejected(text: str) -> None:
    """Also text that is nearly YAML."""
    converted(text)
