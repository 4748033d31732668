"""Generated fields of requests, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ratekeeper.core.model import REQUEST_FIELDS

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
FIELDS = st.fixed_dictionaries(
    {},
    optional={**dict.fromkeys(REQUEST_FIELDS, TEXTS), "attributes": st.dictionaries(TEXTS, TEXTS)},
)
