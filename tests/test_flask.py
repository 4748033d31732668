"""Limits in Flask: applications, blueprints, views, and settling."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from flask import Blueprint, Flask, Response, g, jsonify, redirect, send_file, session
from flask import request as flask_request
from flask.testing import FlaskClient
from flask.views import MethodView
from werkzeug.test import EnvironBuilder, TestResponse

from ratekeeper import ConfigError, Limiter
from ratekeeper.flask import RateLimit, charge
from ratekeeper.testing import ManualClock
from tests.web.flask_app import NOW_S, app_with, statuses


def policies(response: TestResponse) -> str:
    return response.headers["RateLimit-Policy"]


# ------------------------------------------------------------------------------------- application


def test_the_application_is_limited() -> None:
    """All routes, and unknown paths, share one limit; then a 429 has Retry-After."""
    _, _, clock, client = app_with("3/minute")
    response = client.get("/hello")
    assert (response.status_code, response.data) == (200, b"hello")
    assert response.headers["RateLimit"] == '"default";r=2;t=20'
    assert statuses(client, "/missing", "/hello", "/hello") == [404, 200, 429]
    refused = client.get("/hello")
    assert refused.headers["Retry-After"] == "20"
    assert refused.content_type == "application/problem+json"
    assert json.loads(refused.data)["error"]["code"] == "RATE_LIMIT_EXCEEDED"
    clock.advance(20)
    assert statuses(client, "/hello") == [200]


def test_without_limits_nothing_is_limited() -> None:
    """RateLimit(app) alone serves the decorators."""
    _, _, _, client = app_with()
    response = client.get("/hello")
    assert "RateLimit" not in response.headers
    assert statuses(client, *["/hello"] * 50) == [200] * 50


def test_endpoints_are_known_by_their_rule() -> None:
    """/users/1 and /users/2 are one endpoint for `per_route` and for rules."""
    app, _, _, client = app_with("1/minute", per_route=True)

    @app.get("/users/<int:number>")
    def user(number: int) -> str:
        return str(number)

    assert statuses(client, "/users/1", "/users/2", "/hello") == [200, 429, 200]

    rule = {"match": {"endpoint": "/users/{id}"}, "by": ["ip"], "limits": ["1/minute"]}
    app, _, _, client = app_with(rules={"version": 1, "rules": [{"id": "users", **rule}]})
    app.add_url_rule("/users/<int:number>", view_func=user)
    assert statuses(client, "/users/1", "/users/2", "/hello") == [200, 429, 200]


def test_a_key_may_come_from_the_session() -> None:
    """The session is open when the limits are checked."""
    app, _, _, client = app_with("2/minute", key=["session:user_id", "address"])

    @app.get("/login/<int:user>")
    def login(user: int) -> str:
        session["user_id"] = user
        return "in"

    # One request by address, then two as user 7; the third of that user is denied.
    assert statuses(client, "/login/7", "/hello", "/hello", "/hello") == [200, 200, 200, 429]
    other = app.test_client()
    assert statuses(other, "/login/8", "/hello", "/hello", "/hello") == [200, 200, 200, 429]


def test_hooks_see_flasks_request() -> None:
    """`web_request.native` is Flask's request."""
    seen = []
    _, _, _, client = app_with(
        "5/minute", cost=lambda web_request: seen.append(web_request.native) or 1
    )
    client.get("/hello?a=1")
    assert seen[0].args["a"] == "1"


def test_on_limit_returns_the_response() -> None:
    """It may return anything that Flask accepts as a response; the headers are added."""
    _, _, _, client = app_with(
        "1/minute",
        on_limit=lambda web_request, result: ({"wait": result.decision.retry_after}, 420),
    )
    client.get("/hello")
    response = client.get("/hello")
    assert (response.status_code, response.json) == (420, {"wait": 60.0})
    assert response.headers["Retry-After"] == "60"


def test_a_view_may_fail_closed() -> None:
    """While the store is away, a login is refused with 503 and the other views are served."""
    app, limit, _, client = app_with(
        "9/minute",
        store="redis://127.0.0.1:1",
        on_limit=lambda web_request, denial: ("wait", 429),
        on_unavailable=lambda web_request, denial: (denial.message, denial.status),
    )

    @app.post("/login")
    @limit("5/minute", on_failure="closed")
    def login() -> str:
        return "in"

    response = client.post("/login")
    assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
    assert response.text.startswith("The limits of this request cannot be checked")
    assert client.get("/hello").status_code == 200
    limit.close(app)


def test_a_denial_is_an_ordinary_response() -> None:
    """`after_request` functions see it, for example to add CORS headers."""
    app, _, _, client = app_with("1/minute")

    @app.after_request
    def allow(response: Response) -> Response:
        response.headers["Access-Control-Allow-Origin"] = "*"
        return response

    client.get("/hello")
    response = client.get("/hello")
    assert (response.status_code, response.headers["Access-Control-Allow-Origin"]) == (429, "*")


def test_init_app_reads_the_configuration() -> None:
    """app.config takes precedence. Two applications have their own counts."""
    limit = RateLimit(limits="5/minute", clock=ManualClock(NOW_S))
    clients = []
    for _ in range(2):
        app = Flask("made_later")
        app.config["RATEKEEPER"] = {"limits": "1/minute"}
        limit.init_app(app)
        app.add_url_rule("/hello", view_func=lambda: "hello")
        clients.append(app.test_client())
    assert [statuses(each, "/hello", "/hello") for each in clients] == [[200, 429], [200, 429]]


def test_a_given_limiter_is_used() -> None:
    """It is not closed."""
    with Limiter("1/minute") as limiter:
        app = Flask(__name__)
        limit = RateLimit(app, limiter=limiter)
        app.add_url_rule("/hello", view_func=lambda: "hello")
        assert statuses(app.test_client(), "/hello", "/hello") == [200, 429]
        limit.close(app)
        assert limiter.check("still open")


# ------------------------------------------------------------------------------------- views


def test_a_view_has_limits_in_addition_to_the_applications() -> None:
    """Both are in one response, which reports the tightest."""
    app, limit, _, client = app_with("10/minute")

    @app.get("/search")
    @limit("2/second")
    def search() -> str:
        return "found"

    response = client.get("/search")
    assert policies(response) == '"default";q=10;w=60, "search";q=2;w=1'
    assert response.headers["RateLimit"] == '"search";r=1;t=1'
    assert statuses(client, "/search", "/search", "/hello") == [200, 429, 200]
    # The fifth request; the denied one cost nothing.
    assert client.get("/hello").headers["X-RateLimit-Remaining"] == "6"


def test_a_view_keeps_its_name() -> None:
    """Flask identifies views by their name."""
    _, limit, _, _ = app_with()

    @limit("1/minute")
    def view() -> None:
        """What it does."""

    assert (view.__name__, view.__doc__) == ("view", "What it does.")


def test_each_view_has_its_own_count() -> None:
    """Two URLs of one view share it."""
    app, limit, _, client = app_with()

    @app.get("/a/<name>")
    @app.get("/b/<name>")
    @limit("1/minute")
    def one(name: str) -> str:
        return name

    @app.get("/c")
    @limit("1/minute")
    def other() -> str:
        return "c"

    assert statuses(client, "/a/1", "/b/1", "/a/2", "/c") == [200, 429, 429, 200]


def test_views_that_share_a_name_share_a_count() -> None:
    """An example is all views that send mail."""
    app, limit, _, client = app_with()
    mail = limit("2/minute", name="mail")
    app.add_url_rule("/a", "a", mail(lambda: "a"))
    app.add_url_rule("/b", "b", mail(lambda: "b"))
    assert statuses(client, "/a", "/b", "/a", "/b") == [200, 200, 429, 429]


def test_two_decorators_on_one_view_have_two_counts() -> None:
    """This holds even with the same window and the same key."""
    app, limit, _, client = app_with()

    @app.get("/search")
    @limit("5/minute")
    @limit("2/minute")
    def search() -> str:
        return "found"

    response = client.get("/search")
    assert policies(response) == '"search";q=5;w=60, "search#2";q=2;w=60'
    assert statuses(client, "/search", "/search") == [200, 429]


def test_a_view_with_its_own_key_and_cost() -> None:
    """Other options are those of the application."""
    app, limit, _, client = app_with(key="header:X-API-Key")

    @app.get("/own")
    @limit(
        "10/minute", key="query:user", cost=lambda web_request: int(web_request.query("cost") or 1)
    )
    def own() -> str:
        return "own"

    @app.get("/inherited")
    @limit("1/minute")
    def inherited() -> str:
        return "inherited"

    assert statuses(client, "/own?user=1&cost=9", "/own?user=1&cost=2") == [200, 429]
    assert statuses(client, "/own?user=2", "/own?user=2&cost=11") == [200, 422]
    for key in ("a", "b"):
        assert statuses(client, *["/inherited"] * 2, headers={"X-API-Key": key}) == [200, 429]


def test_async_views_work() -> None:
    """This holds with and without a limit."""
    app, limit, _, client = app_with("10/minute")

    @app.get("/slow")
    @limit("1/minute")
    async def slow() -> str:
        charge.settle(0)
        return "slow"

    response = client.get("/slow")
    assert response.data == b"slow"
    assert policies(response) == '"default";q=10;w=60, "slow";q=1;w=60'
    assert statuses(client, "/slow") == [200]


def test_class_views_are_limited() -> None:
    """Flask's `decorators` apply the limit; all methods are one endpoint."""
    app, limit, _, client = app_with()

    class Item(MethodView):
        decorators: ClassVar = [limit("1/minute")]

        def get(self) -> str:
            return "item"

    app.add_url_rule("/item", view_func=Item.as_view("item"))
    assert statuses(client, "/item", "/item") == [200, 429]


def test_methods_of_a_class_have_their_own_counts() -> None:
    """A decorated dispatch covers all methods."""
    app, limit, _, client = app_with()

    class Item(MethodView):
        @limit("9/minute")
        def get(self) -> str:
            return "item"

        @limit("1/minute")
        async def post(self) -> str:
            return "changed"

    class Whole(MethodView):
        @limit("2/minute")
        def dispatch_request(self, **values: Any) -> Any:
            return super().dispatch_request(**values)

        def get(self) -> str:
            return "whole"

    app.add_url_rule("/item", view_func=Item.as_view("item"))
    app.add_url_rule("/whole", view_func=Whole.as_view("whole"))
    assert statuses(client, *["/item"] * 5) == [200] * 5
    posted = client.post("/item")
    assert (posted.status_code, policies(posted)) == (200, '"POST item";q=1;w=60')
    assert client.post("/item").status_code == 429
    assert policies(client.get("/whole")) == '"whole";q=2;w=60'


def test_a_given_name_is_not_shared_with_an_endpoint() -> None:
    """A view whose endpoint has the same name keeps its own count."""
    app, limit, _, client = app_with("50/minute", name="index")

    @app.get("/login")
    @limit("9/minute", name="login")
    @limit("2/minute")
    def login() -> str:
        return "hello"

    @app.get("/")
    @limit("3/minute")
    def index() -> str:
        return "index"

    response = client.get("/login")
    assert policies(response) == '"index";q=50;w=60, "login";q=9;w=60, "login()";q=2;w=60'
    assert statuses(client, "/login", "/login", *["/"] * 4) == [200, 429, 200, 200, 200, 429]


def test_a_limit_above_the_route_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It has no effect, because the route has the undecorated view."""
    app = Flask("shop")
    limit = RateLimit(app)

    @limit("1/minute")
    @app.get("/above")
    def above() -> str:
        return "above"

    @app.get("/below")
    @limit("1/minute")
    def below() -> str:
        return "below"

    client = app.test_client()
    statuses = [client.get(url).status_code for url in ("/above", "/above", "/below", "/below")]
    assert statuses == [200, 200, 200, 429]
    found = [each.getMessage() for each in caplog.records if each.name == "ratekeeper.web"]
    assert [message.split(";")[0] for message in found] == [
        "the limit of above has no effect because it is written above the route"
    ]


def test_async_hooks_are_rejected() -> None:
    """The application, its configuration and a view reject them: nothing would await them."""

    async def skip(call: Any) -> bool:
        return False

    with pytest.raises(ConfigError, match="is async"):
        RateLimit(limits="1/minute", skip=skip)
    _, limit, _, _ = app_with()
    with pytest.raises(ConfigError, match="is async"):
        limit("1/minute", skip=skip)
    app = Flask(__name__)
    app.config["RATEKEEPER"] = {"skip": skip}
    with pytest.raises(ConfigError, match="is async"):
        RateLimit(app, "1/minute")


def test_only_views_and_blueprints_can_be_decorated() -> None:
    """The limits are checked at once."""
    _, limit, _, _ = app_with()
    with pytest.raises(ConfigError, match="neither a view nor a Blueprint"):
        limit("1/minute")("view")  # type: ignore[type-var]  # this is the tested case
    with pytest.raises(ConfigError, match="expected a unit"):
        limit("1/fortnight")
    with pytest.raises(ConfigError, match="name"):
        limit("1/minute", name="\n")


# ------------------------------------------------------------------------------------- blueprints


def test_a_blueprint_has_limits_for_all_its_views_together() -> None:
    """They apply in addition to those of the application and of each view."""
    app, limit, _, client = app_with("10/minute")
    shop = Blueprint("shop", __name__, url_prefix="/shop")
    shop.add_url_rule("/a", "a", lambda: "a")
    shop.add_url_rule("/b", "b", limit("1/hour")(lambda: "b"))
    shop.add_url_rule("/free", "free", limit.exempt(lambda: "free"))
    assert limit("2/minute")(shop) is shop
    app.register_blueprint(shop)
    response = client.get("/shop/b")
    assert policies(response) == ('"default";q=10;w=60, "shop.*";q=2;w=60, "shop.b";q=1;w=3600')
    assert statuses(client, "/shop/b", "/shop/a", "/shop/a", "/hello") == [429, 200, 429, 200]
    assert statuses(client, *["/shop/free"] * 20) == [200] * 20


def test_exempt_views_and_blueprints_keep_only_their_own_limits() -> None:
    """The application's limits do not apply."""
    app, limit, _, client = app_with("1/day")

    @app.get("/healthz")
    @limit.exempt
    def healthz() -> str:
        return "ok"

    @limit.exempt
    @app.get("/metrics")
    @limit("2/day")
    def metrics() -> str:
        return "1"

    status = Blueprint("status", __name__, url_prefix="/status")
    status.add_url_rule("/", "all", lambda: "fine")
    inner = Blueprint("inner", __name__, url_prefix="/inner")
    inner.add_url_rule("/", "inner", lambda: "fine")
    status.register_blueprint(inner)
    limit.exempt(status)
    app.register_blueprint(status)
    assert statuses(client, "/hello", "/hello") == [200, 429]
    assert statuses(client, "/healthz", "/status/", "/status/inner/") == [200] * 3
    assert statuses(client, "/metrics", "/metrics", "/metrics") == [200, 200, 429]
    assert "RateLimit" not in client.get("/healthz").headers


def test_nested_blueprints_of_one_name_have_two_counts() -> None:
    """A blueprint that is registered twice has one count."""
    app, limit, _, client = app_with()
    twice = Blueprint("twice", __name__)
    twice.add_url_rule("/", "all", lambda: "fine")
    limit("1/minute")(twice)
    for parent in ("api", "admin"):
        version = Blueprint("v1", __name__, url_prefix="/v1")
        version.add_url_rule("/", "all", lambda: "fine")
        limit("1/minute")(version)
        outer = Blueprint(parent, __name__, url_prefix=f"/{parent}")
        outer.register_blueprint(version)
        app.register_blueprint(outer)
        app.register_blueprint(twice, name=f"twice-{parent}", url_prefix=f"/twice-{parent}")
    assert statuses(client, "/api/v1/", "/api/v1/", "/admin/v1/") == [200, 429, 200]
    assert policies(client.get("/admin/v1/")) == '"admin.v1.*";q=1;w=60'
    assert statuses(client, "/twice-api/", "/twice-admin/") == [200, 429]


def test_an_exempt_blueprint_ignores_outer_blueprints() -> None:
    """It keeps its own limits."""
    app, limit, _, client = app_with()
    outer = Blueprint("outer", __name__, url_prefix="/outer")
    outer.add_url_rule("/", "all", lambda: "fine")
    for name in ("free", "limited"):
        inner = Blueprint(name, __name__, url_prefix=f"/{name}")
        inner.add_url_rule("/", "all", lambda: "fine")
        limit.exempt(inner)
        if name == "limited":
            limit("2/minute")(inner)
        outer.register_blueprint(inner)
    limit("1/minute")(outer)
    app.register_blueprint(outer)
    assert statuses(client, *["/outer/free/"] * 3) == [200] * 3
    assert statuses(client, *["/outer/limited/"] * 3) == [200, 200, 429]
    assert statuses(client, "/outer/", "/outer/") == [200, 429]


# ------------------------------------------------------------------------------------- mistakes


def test_wrong_options_are_rejected() -> None:
    """Errors are raised at once, for arguments and for the configuration."""
    with pytest.raises(ConfigError, match="expected a unit"):
        RateLimit(limits="5/fortnight")
    app = Flask(__name__)
    app.config["RATEKEEPER"] = {"limit": "5/minute"}
    with pytest.raises(
        ConfigError,
        match=r"has no option limit \(did you mean limits\?\); the options are limits, key",
    ):
        RateLimit(app)
    app.config["RATEKEEPER"] = "5/minute"
    with pytest.raises(ConfigError, match="is not a dict of options"):
        RateLimit(app)


def test_init_app_twice_is_an_error() -> None:
    """One RateLimit is installed once in an application."""
    app, limit, _, _ = app_with("1/minute")
    with pytest.raises(ConfigError, match="call init_app once"):
        limit.init_app(app)


def test_a_limit_of_another_application_is_an_error() -> None:
    """A view whose RateLimit is not installed does not pass unlimited."""
    app = Flask(__name__)
    app.testing = True
    limit = RateLimit()
    app.add_url_rule("/a", view_func=limit("1/minute")(lambda: "a"), endpoint="a")
    with pytest.raises(ConfigError, match="not installed"):
        app.test_client().get("/a")
    with pytest.raises(ConfigError, match="not installed"):
        limit.close()


def test_a_request_without_the_wsgi_app_is_an_error() -> None:
    """Its charges would never be settled."""
    app, _, _, _ = app_with("1/minute")
    with app.test_request_context("/hello"), pytest.raises(ConfigError, match="test_client"):
        app.preprocess_request()


def left(client: FlaskClient) -> int:
    """Return the remaining units of the application's limit, after this request."""
    return int(client.get("/hello").headers["X-RateLimit-Remaining"])


def test_costs_are_settled() -> None:
    """`charge` is the last charge: the view's own, otherwise the application's."""
    app, limit, _, client = app_with("100/minute", cost=10)

    @app.get("/cheap")
    def cheap() -> str:
        charge.settle(3)
        return str(charge.decision.remaining)

    @app.get("/own")
    @limit("50/minute", cost=20)
    def own() -> str:
        charge.refund()
        return str(charge.decision.remaining)

    assert client.get("/cheap").data == b"90"
    assert left(client) == 87
    assert [client.get("/own").data for _ in range(3)] == [b"30"] * 3


def test_a_stream_is_untouched_and_settled_at_its_end() -> None:
    """Each part is produced on demand, and the cost that it reports counts."""
    app, _, _, client = app_with("100/minute")
    made = []

    @app.get("/stream")
    def stream() -> Response:
        mine = flask_request.environ["ratekeeper.charge"]

        def pieces() -> Iterator[str]:
            for number in range(3):
                made.append(number)
                mine.settle(10 * number)
                yield str(number)

        return Response(pieces())

    response = client.get("/stream", buffered=False)
    assert response.headers["X-RateLimit-Remaining"] == "99"
    pieces = response.iter_encoded()
    assert next(iter(pieces)) == b"0"
    assert made == [0]
    assert b"".join(pieces) == b"12"
    response.close()
    assert left(client) == 79


def test_a_file_is_sent_with_the_headers() -> None:
    """This holds for any way in which the server sends files."""
    app, _, _, client = app_with("5/minute")
    app.add_url_rule("/file", "file", lambda: send_file(io.BytesIO(b"file"), "text/plain"))
    response = client.get("/file")
    assert (response.data, response.headers["X-RateLimit-Remaining"]) == (b"file", "4")


@pytest.mark.parametrize("testing", [True, False], ids=["raised", "answered"])
def test_a_view_that_raises_counts_as_a_500(testing: bool) -> None:
    """This holds whether Flask answers the error or raises it."""
    seen: list[int] = []
    app, _, _, client = app_with("5/minute", count=lambda status: bool(seen.append(status)))
    app.testing = testing

    @app.get("/raise")
    def failing() -> str:
        return str(1 / 0)

    if testing:
        with pytest.raises(ZeroDivisionError):
            client.get("/raise")
    else:
        response = client.get("/raise")
        assert (response.status_code, response.headers["X-RateLimit-Limit"]) == (500, "5")
    assert set(seen) == {500}


def test_only_failed_logins_count() -> None:
    """Successful logins are never denied, unless the client has failed too often before."""
    app, limit, _, client = app_with()

    @app.get("/login/<word>")
    @limit("2/minute", count=lambda status: status == 401)
    def login(word: str) -> Any:
        return redirect("/hello") if word == "right" else (jsonify(error="wrong"), 401)

    tries = ["right", "right", "right", "wrong", "right", "wrong", "right"]
    found = statuses(client, *[f"/login/{word}" for word in tries])
    assert found == [302, 302, 302, 401, 302, 401, 429]


def test_the_status_that_was_sent_is_the_outcome() -> None:
    """A guess counts even if its response breaks off."""
    app, limit, _, client = app_with()

    def pieces() -> Iterator[str]:
        yield "wrong"
        raise OSError("the rest is gone")

    @app.get("/login")
    @limit("2/minute", count=lambda status: status == 401)
    def login() -> Response:
        return Response(pieces(), 401)

    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            client.get("/login", buffered=True)
    assert statuses(client, "/login") == [429]


def test_a_reused_environ_is_another_request() -> None:
    """Each application that is tried with it has its own headers and denials."""
    one, two = app_with("2/minute")[0], app_with("1/minute")[0]
    environ = EnvironBuilder(path="/hello").get_environ()
    seen: list[tuple[str, str]] = []

    def start_response(status: str, headers: Any, exc_info: Any = None) -> Any:
        seen.append((status[:3], dict(headers)["X-RateLimit-Limit"]))

    for app in (one, two, two, one):
        app.wsgi_app(environ, start_response).close()  # type: ignore[attr-defined]  # Flask's has
    assert seen == [("200", "2"), ("200", "1"), ("429", "1"), ("200", "2")]


def test_the_charge_of_an_unlimited_request() -> None:
    """Settling it has no effect."""
    app, _, _, client = app_with()

    @app.get("/any")
    def anything() -> str:
        charge.settle(5)
        g.seen = charge.decision.allowed
        return str(g.seen)

    assert client.get("/any").data == b"True"
