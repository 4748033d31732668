"""The note in which the leader of a region writes its status for operators."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final, get_args

from ratekeeper.core.clock import NS_PER_SECOND
from ratekeeper.core.errors import ConfigError, show
from ratekeeper.decide.region_monitor import LinkState, LinkStatus, RegionStatus
from ratekeeper.regions.table import NOTE_ERRORS, note_fields, parse_share

STATUS_NOTE: Final = "status"
# If the status is older than this, the leader is gone, and no other process leads.
SILENT_S: Final = 5.0


_NUMBERS: Final = ("epoch", "backlog", "unaccepted_units", "excess_units")


def status_text(status: RegionStatus, now_ns: int) -> str:
    """Return the note. `now_ns` is the time of the region's store."""
    return json.dumps({**asdict(status), "noted_ns": now_ns}, default=str)


def parse_status(region: str, text: str | None, now_ns: int, *, is_self: bool) -> RegionStatus:
    """Return the status in a note, as of `now_ns`. Raises ConfigError if the text is invalid."""
    if text is None:
        return RegionStatus(region, is_self=is_self, problem="no leader has worked here so far")
    fields = note_fields(text)
    try:
        age_s = max(now_ns - int(fields.pop("noted_ns")), 0) / NS_PER_SECOND
        links = tuple(map(_link_of, fields.pop("links")))
        fields |= {name: int(fields[name]) for name in _NUMBERS}
        fields |= {name: str(fields[name]) for name in ("leader", "problem")}
        share, target = parse_share(fields.pop("share")), fields.pop("target")
        if fields["region"] != region:
            wrong = f"the store that is set up for {region} is that of {show(fields['region'])}"
            return RegionStatus(region, is_self=is_self, problem=wrong)
        fields |= {"region": region, "is_self": is_self, "age_s": age_s, "links": links}
        fields |= {"share": share, "target": None if target is None else parse_share(target)}
        if age_s > SILENT_S:
            silent = f"no process has led the region for {age_s:.0f} s"
            fields |= {"leader": "", "problem": silent}
        return RegionStatus(**fields)
    except NOTE_ERRORS as error:
        raise ConfigError(f"the status of {region} cannot be read: {error}") from None


def _link_of(fields: dict[str, Any]) -> LinkStatus:
    """Return a link of a note. Raises KeyError, TypeError or ValueError for invalid fields."""
    if fields["state"] not in get_args(LinkState):
        raise ValueError(f"the state of a link is {show(fields['state'])}")
    heard_s, offset_s = fields["heard_s"], fields["clock_offset_s"]
    return LinkStatus(
        str(fields["peer"]),
        fields["state"],
        str(fields["problem"]),
        float(fields["lag_s"]),
        None if heard_s is None else float(heard_s),
        None if offset_s is None else float(offset_s),
    )
