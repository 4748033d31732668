"""The log of denials: a line for each rule and subject that is denied, at most one a minute.

Middleware, decorators, `reserve` and `wait` answer a denial themselves, so an application does not
see it. They log it (`LimiterVerbs.log_denial`) on the logger `ratekeeper.denied`:

    denied rule="login" limit="5 in any minute" subject="user:42" reason=limit denials=7 since=60s

(`extra` has the same fields). A caller of `check` has the decision in hand, so `check`
logs nothing, and a check in the kernel stays without Python code.

**Bound.** The first denial of a subject is logged at once. The next ones are counted, and the line
with their number follows with the first denial after INTERVAL_NS, of that subject or of any other.
A process tracks SUBJECTS_MAX subjects at a time, and so logs SUBJECTS_MAX + 1 lines in an interval
at most: the denials of all further subjects have one line. Nothing runs in the background, so the
counts of the last denials are logged with the next one, or when the process exits. A forked child
begins without counts: those before the fork are the parent's.

**Level.** `logging` prints warnings on standard error if the application configures nothing, so a
denial is a warning: the bound keeps it from filling a terminal.

**Secrets.** A subject may hold an API key, and a log is not the place for it: `shown_subject` hides
it. Texts are quoted as JSON: a line stays one line.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from typing import Any, Final

from ratekeeper.core import switches
from ratekeeper.core.clock import NS_PER_SECOND, Clock, SystemClock
from ratekeeper.core.forks import after_fork, fork_safe
from ratekeeper.core.model import UNLIMITED, CheckResult, Request
from ratekeeper.core.subjects import KEY_LENGTH_MAX, SEPARATOR, Key, shown_subject

LOG: Final = logging.getLogger("ratekeeper.denied")

INTERVAL_NS: Final = 60 * NS_PER_SECOND
SUBJECTS_MAX: Final = 60

# The fields that name the client of a request on a deny list, which no rule counts.
_CALLER_FIELDS: Final = ("tenant", "user", "api_key", "ip")
_DENY_LIST: Final = "(deny)"
_OTHERS: Final = "(others)"


class _Denied:
    """The denials of one subject by one rule since its last line."""

    __slots__ = ("denials", "logged_ns", "result", "rule", "subject")

    def __init__(self, rule: str, subject: str, now_ns: int = 0) -> None:
        self.rule = rule
        self.subject = subject
        self.result: CheckResult | None = None
        """That of the last denial."""
        self.denials = 0
        self.logged_ns = now_ns


class DenialLog:
    """Logs the denials of this process. Safe for any number of threads."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.now_ns
        self._lock = fork_safe(threading.Lock())
        self._clear()
        switches.forgetting(self)

    def _clear(self) -> None:
        # In the order of their last line.
        self._tracked: dict[tuple[str, str], _Denied] = {}
        self._others = _Denied("", "")

    def forget_all(self) -> None:
        """Begin again without counts."""
        with self._lock:
            self._clear()

    def flush(self) -> None:
        """Log the counts that no line has yet, and begin again."""
        now_ns = self._now_ns()
        with self._lock:
            waiting = [each for each in self._tracked.values() if each.denials]
            lines = [_fields_of(each, now_ns, shown_subject(each.subject)) for each in waiting]
            if self._others.denials:
                lines.append(_fields_of(self._others, now_ns, _OTHERS))
            self._clear()
        for fields in lines:
            _write(fields)

    def note(self, result: CheckResult, key: Key | Request) -> None:
        """Count the denial of a request, and log the lines that are due.

        `key` is that of the request: the result names the subject only if rules decided.
        """
        if not LOG.isEnabledFor(logging.WARNING):
            return
        rule = _DENY_LIST if result.kind == "blocked" else result.decision.rule
        # Limits count by a text, rules by a request.
        subject = key if type(key) is str else _subject_of(result, key)
        named, now_ns = (rule, subject), self._now_ns()
        with self._lock:
            denied = self._tracked.get(named) or _Denied(*named, now_ns)
            denied.denials += 1
            denied.result = result
            is_new = named not in self._tracked
            lines = self._due(now_ns)
            if is_new and len(self._tracked) < SUBJECTS_MAX:
                lines.append(self._logged(denied, now_ns))
            elif is_new:
                self._others.logged_ns = self._others.logged_ns or now_ns
                self._others.denials += 1
        for fields in lines:
            _write(fields)

    def _due(self, now_ns: int) -> list[dict[str, Any]]:
        """Return the lines of the subjects whose interval is over; forget the ones that waited."""
        lines = []
        while self._tracked:
            denied = next(iter(self._tracked.values()))
            if 0 <= now_ns - denied.logged_ns < INTERVAL_NS:
                break
            del self._tracked[denied.rule, denied.subject]
            if denied.denials:
                lines.append(self._logged(denied, now_ns))
        others = self._others
        if others.denials and not 0 <= now_ns - others.logged_ns < INTERVAL_NS:
            lines.append(_fields_of(others, now_ns, _OTHERS))
            self._others = _Denied("", "")
        return lines

    def _logged(self, denied: _Denied, now_ns: int) -> dict[str, Any]:
        """Return the line of a subject, and track the subject until its next one."""
        fields = _fields_of(denied, now_ns, shown_subject(denied.subject))
        denied.denials, denied.logged_ns = 0, now_ns
        self._tracked[denied.rule, denied.subject] = denied
        return fields


def _fields_of(denied: _Denied, now_ns: int, subject: str) -> dict[str, Any]:
    return {
        "rule": denied.rule,
        "limit": "" if denied.result is None else _limit_of(denied.result),
        "subject": subject,
        "reason": "several" if denied.result is None else _reason_of(denied.result),
        "denials": denied.denials,
        "since": max(now_ns - denied.logged_ns, 0) // NS_PER_SECOND,
    }


def _write(fields: dict[str, Any]) -> None:
    named = [f"{name}={json.dumps(fields[name])}" for name in ("rule", "limit", "subject")]
    counted = f"denials={fields['denials']} since={fields['since']}s"
    LOG.warning("denied %s reason=%s %s", " ".join(named), fields["reason"], counted, extra=fields)


def _limit_of(result: CheckResult) -> str:
    limit = result.decision.policy
    return "" if limit is UNLIMITED else str(limit)


def _reason_of(result: CheckResult) -> str:
    """Return why a request was denied, in a word."""
    if result.kind == "blocked":
        return "deny_list"
    if result.kind == "unavailable":
        return "store_unavailable"
    return result.decision.penalty or "limit"


def _subject_of(result: CheckResult, key: Key | Request) -> str:
    """Return the subject of the rule that denied a request, or the client without such a rule."""
    for applied, (subject, _) in zip(result.applied, result.counted, strict=False):
        if applied.rule == result.decision.rule:
            return subject
    if isinstance(key, Request):
        values = [(name, getattr(key, name)) for name in _CALLER_FIELDS]
        key = tuple([f"{name}:{value}" for name, value in values if value is not None])
    text = key if isinstance(key, str) else SEPARATOR.join(key)
    return text[:KEY_LENGTH_MAX]


denials: Final = DenialLog(SystemClock())
"""The log of this process."""
atexit.register(denials.flush)
after_fork(denials.forget_all)
