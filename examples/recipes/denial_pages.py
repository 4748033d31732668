"""Answer a denied request with a page for people, or with JSON in the form of my API.

`on_limit` makes the response. It gets the limit's headers and Retry-After, whatever it returns, so
well-behaved clients still know when to come back. None stands for the default, problem JSON.

Two traps. A status other than 429 (a redirect to a "please wait" page, or 200) is counted as a
success by clients, caches and monitors. And a page without `no-store` may be kept by a cache, and
shown to clients that are within their limits.
"""

from __future__ import annotations

from flask import Flask, Response, jsonify, render_template_string

from ratekeeper.flask import Denial, RateLimit, WebRequest
from ratekeeper.testing import ManualClock

# Flask escapes the values, for example the path, which the client chooses.
PAGE = """<!doctype html>
<title>Too many requests</title>
<meta http-equiv="refresh" content="{{ denial.retry_after }}">
<p>Please wait {{ denial.retry_after }} seconds. {{ path }} then loads by itself.</p>
"""


def too_many(request: WebRequest, denial: Denial) -> Response | None:
    if request.path.startswith("/api/"):
        error = {
            "code": "too_many_requests",
            "message": denial.message,
            "limit": denial.rule,
            "retry_after_seconds": denial.retry_after,
        }
        answer = jsonify(error=error)
    elif "text/html" in (request.header("Accept") or ""):
        answer = Response(render_template_string(PAGE, denial=denial, path=request.native.path))
    else:
        return None
    answer.status_code = denial.status
    answer.headers["Cache-Control"] = "no-store"
    return answer


app = Flask("shop")
limit = RateLimit(app, "2/minute", on_limit=too_many, clock=ManualClock())
app.add_url_rule("/<path:name>", view_func=lambda name: name)


def main() -> None:
    client = app.test_client()
    client.get("/a")
    client.get("/a")

    page = client.get("/<b>", headers={"Accept": "text/html,*/*"})
    print(page.text.splitlines()[-1])
    assert (page.status_code, page.mimetype) == (429, "text/html")
    assert "&lt;b&gt;" in page.text

    error = client.get("/api/orders")
    print(error.get_json())
    assert error.get_json()["error"]["retry_after_seconds"] == 30

    default = client.get("/a")
    assert default.mimetype == "application/problem+json"
    for answer in (page, error, default):
        assert answer.headers["Retry-After"] == "30"
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-RateLimit-Remaining"] == "0"


if __name__ == "__main__":
    main()
