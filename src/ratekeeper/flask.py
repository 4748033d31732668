"""Rate limits for Flask: for the whole application, for blueprints, and for single views.

    app = Flask(__name__)
    limit = RateLimit(app, "100/minute", store="shared:///run/api.limits")

    @app.get("/search")
    @limit("5/second")
    def search(): ...

    limit("20/minute")(blueprint)        # all views of a blueprint together
    limit.exempt(view_or_blueprint)      # not limited by the application's limits

A WSGI layer (`wsgi.py`) wraps the application, adds the headers and settles. Charging happens
inside Flask, after it has matched the URL and opened the session. So an endpoint is known by its
rule (`/users/<int:id>`, for every number), a key may come from the session, and a denial is an
ordinary HTTP error: `errorhandler(429)` may answer it, and `after_request` functions see it.

Each view has its own count, named after its endpoint, for all its URLs. Each decorated method of a
class has its own count too: "POST item". Limits with the same `name` share one count. All counts
are in one store.

Async views work: Flask runs each in its own event loop in the worker's thread, and the limits are
checked before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import takewhile
from typing import Any, Final, ParamSpec, TypeVar, Unpack, cast

from ratekeeper.core.errors import ConfigError, RatekeeperError, show
from ratekeeper.core.model import check_name
from ratekeeper.core.steps import run
from ratekeeper.limiter import Limiter
from ratekeeper.limiter.arguments import check_names, explains
from ratekeeper.web.answers import Denial, HttpAnswer
from ratekeeper.web.charges import CHARGE, CHARGES, RequestCharges
from ratekeeper.web.enforcer import LOG, Charge, Enforcer
from ratekeeper.web.options import (
    OPTION_NAMES,
    EnforcerOptions,
    LimitsSource,
    OptionArguments,
    RouteArguments,
    options_of,
    route_options_of,
)
from ratekeeper.web.requests import WebRequest, WsgiRequest
from ratekeeper.wsgi import serve_charged

try:
    from flask import Blueprint, Flask, Response, current_app, has_app_context, request, session
    from flask.views import View as ClassView
    from werkzeug.exceptions import ServiceUnavailable, TooManyRequests
    from werkzeug.local import LocalProxy
except ImportError as error:
    raise ConfigError(
        f"ratekeeper.flask needs Flask ({error}); install it with: pip install 'ratekeeper[flask]'"
    ) from error

__all__ = [
    "Charge",
    "Denial",
    "LimiterUnavailable",
    "RateLimit",
    "RateLimitExceeded",
    "WebRequest",
    "charge",
]

P = ParamSpec("P")
R = TypeVar("R")
View = TypeVar("View", bound="Callable[..., Any] | Blueprint")

EXTENSION: Final = "ratekeeper"
_EXEMPT: Final = "__ratekeeper_exempt__"

charge: Charge = cast("Charge", LocalProxy(lambda: request.environ.get(CHARGE) or Charge()))
"""The charge of the current request: the last one, so in a decorated view its own."""


class _FlaskDenial(RatekeeperError):
    def __init__(self, denial: Denial) -> None:
        # The next class is Werkzeug's.
        response: Any = _response_of(denial.answer)
        super().__init__(denial.message, response, denial.retry_after)
        self.denial = denial
        """The denied request, as `on_limit` and `on_unavailable` get it."""


class RateLimitExceeded(_FlaskDenial, TooManyRequests):
    """A request was denied by a limit. Without an `errorhandler`, Flask sends the default 429."""


class LimiterUnavailable(_FlaskDenial, ServiceUnavailable):
    """A request failed closed. Without an `errorhandler`, Flask sends the default 503."""


_EXCEPTIONS: Final[dict[int, type[RateLimitExceeded | LimiterUnavailable]]] = {
    429: RateLimitExceeded,
    503: LimiterUnavailable,
}


class RateLimit:
    """The limits of a Flask application.

    Takes `app`, the limits of all its routes (or `rules`, or none), and the options of
    `EnforcerOptions` by name. Without an `app`, call `init_app` later. `app.config["RATEKEEPER"]`,
    a dict of the same names, takes precedence.
    """

    @explains("RateLimit(…)", 'RateLimit(app, "100/minute", store="redis://localhost")')
    def __init__(
        self,
        app: Flask | None = None,
        limits: LimitsSource | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        self._options: dict[str, Any] = {"limits": limits, **options}
        # Reports wrong options now, not in `init_app`.
        options_of("RateLimit(…)", self._options).require_plain_hooks()
        self._exempt: list[Blueprint] = []
        # Names given with `name=`. A view whose endpoint has such a name gets another one.
        self._given_names: set[str] = set()
        # Views before decoration, by id since some are not hashable.
        self._undecorated: dict[int, Callable[..., Any]] = {}
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Limit an application."""
        if not isinstance(app, Flask):
            raise ConfigError(f"{show(app)} is not a Flask application; write RateLimit(app, …)")
        enforcer = Enforcer(EnforcerOptions(**{**self._options, **_configured(app)}), Limiter)
        enforcers = app.extensions.setdefault(EXTENSION, {})
        if self in enforcers:
            enforcer.close()
            raise ConfigError(f"{app.name} already has this RateLimit; call init_app once")
        enforcers[self] = enforcer
        serve = app.wsgi_app

        def serve_limited(environ: Any, start_response: Any) -> Iterable[bytes]:
            return serve_charged(environ, start_response, enforcer, serve)

        app.wsgi_app = serve_limited  # type: ignore[method-assign]  # Flask documents this
        app.before_request(self._before_request)

    @explains("limit(…)", 'limit("5 in any minute", key="address")')
    def __call__(
        self, limits: LimitsSource, *, name: str = "", **options: Unpack[RouteArguments]
    ) -> Callable[[View], View]:
        """Return a decorator that limits a view further, or all views of a Blueprint.

        `key`, `on_limit`, `on_unavailable` and `on_failure` default to those of the
        application.
        """
        check_name("name", name)
        route_options = route_options_of("limit(…)", "RateLimit(app, {}=…)", limits, options)
        route_options.require_plain_hooks()
        self._given_names.add(name)

        def decorate(limited: View) -> View:
            if isinstance(limited, Blueprint):
                limited.before_request(lambda: self._before_blueprint(limited, route_options, name))
                return limited
            return cast("View", self._view(limited, route_options, name))

        return decorate

    def exempt(self, view: View) -> View:
        """Exempt a view, or all views of a Blueprint, from all limits of this but its own."""
        if isinstance(view, Blueprint):
            self._exempt.append(view)
        else:
            setattr(view, _EXEMPT, (*getattr(view, _EXEMPT, ()), self))
        return view

    def enforcer_of(self, app: Flask | None = None) -> Enforcer:
        """Return the enforcer of an application, by default of the current one."""
        found = app or (current_app if has_app_context() else None)
        enforcer = None if found is None else found.extensions.get(EXTENSION, {}).get(self)
        if enforcer is None:
            raise ConfigError(
                "this RateLimit is not installed in the application that uses it; "
                "make it with RateLimit(app), or call init_app(app)"
            )
        return cast("Enforcer", enforcer)

    def close(self, app: Flask | None = None) -> None:
        """Close the store and the limiter of an application."""
        self.enforcer_of(app).close()

    # ── Charging ───────────────────────────────────────────────────────────────────────────────

    def _before_request(self) -> Any:
        view = current_app.view_functions.get(request.endpoint or "")
        if self._undecorated.pop(id(view), None) is not None:
            LOG.warning(
                "the limit of %s has no effect because it is written above the route; write it "
                "below: @app.get(…) first, then @limit(…)",
                request.endpoint,
            )
        if self._is_exempt():
            return None
        return self._denial(self.enforcer_of())

    def _view(
        self, view: Callable[P, R], options: EnforcerOptions, name: str
    ) -> Callable[P, R | Response]:
        if not callable(view):
            raise ConfigError(f"{show(view)} is neither a view nor a Blueprint; it has no requests")

        self._undecorated[id(view)] = view

        @wraps(view)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R | Response:
            denial = self._route_denial(options, name, _name_of(view, args))
            if denial is not None:
                return cast("Response", denial)
            return cast("R", current_app.ensure_sync(view)(*args, **kwargs))

        return limited

    def _before_blueprint(self, blueprint: Blueprint, options: EnforcerOptions, name: str) -> Any:
        known = current_app.blueprints
        around = [known[each] for each in request.blueprints]  # the innermost first
        inner = takewhile(lambda each: each is not blueprint, around)
        if self._view_is_exempt() or any(each in self._exempt for each in inner):
            return None
        # The first name it is registered under, which is unique: two blueprints inside others may
        # both be called v1.
        registered_as = next(each for each in known if known[each] is blueprint)
        return self._route_denial(options, name, f"{registered_as}.*")

    def _route_denial(self, options: EnforcerOptions, name: str, found: str) -> Any:
        """Check a route's limits under the given `name`, or under the one that was found."""
        enforcer = self.enforcer_of()
        if not name:
            # Another limit may have been given this name. The two must not share a count.
            is_given = found in self._given_names or found == enforcer.options.name
            name = _charges().name_for(f"{found}()" if is_given else found)
        rule = None if request.url_rule is None else request.url_rule.rule
        return self._denial(enforcer.route_enforcer(options, name, rule))

    def _denial(self, enforcer: Enforcer) -> Any:
        """Return the response to a denied request; None if it is allowed.

        Raises RateLimitExceeded or LimiterUnavailable, unless a hook answers.
        """
        rule = None if request.url_rule is None else request.url_rule.rule
        native = cast("Any", request)._get_current_object()  # noqa: SLF001 - werkzeug documents it
        charges = _charges()
        web_request = WsgiRequest(request.environ, native, session, route=rule)
        denial = run(charges.charging(enforcer, web_request))
        request.environ[CHARGE] = charges.last
        if isinstance(denial, Denial):
            if denial.status in _EXCEPTIONS:
                raise _EXCEPTIONS[denial.status](denial)
            denial = denial.answer
        return _response_of(denial) if isinstance(denial, HttpAnswer) else denial

    def _view_is_exempt(self) -> bool:
        view = current_app.view_functions.get(request.endpoint or "")
        return self in getattr(view, _EXEMPT, ())

    def _is_exempt(self) -> bool:
        if self._view_is_exempt():
            return True
        registered = (current_app.blueprints[name] for name in request.blueprints)
        return any(each in self._exempt for each in registered)


def _response_of(answer: HttpAnswer) -> Response:
    return Response(answer.body, answer.status, answer.headers)


def _name_of(view: Callable[..., Any], args: tuple[object, ...]) -> str:
    """Return the name of a view's count: its endpoint, and the method of a class."""
    endpoint = str(request.endpoint)
    method = getattr(view, "__name__", "")
    if not args or not isinstance(args[0], ClassView) or method == "dispatch_request":
        return endpoint
    return f"{method.upper()} {endpoint}"


def _charges() -> RequestCharges:
    charges = request.environ.get(CHARGES)
    if isinstance(charges, RequestCharges):
        return charges
    raise ConfigError(
        "this request did not pass through the application's wsgi_app, which settles its limits; "
        "serve the application itself, or use app.test_client() in a test"
    )


def _configured(app: Flask) -> dict[str, Any]:
    found = app.config.get("RATEKEEPER", {})
    if not isinstance(found, dict):
        raise ConfigError(
            f'app.config["RATEKEEPER"]={show(found)} is not a dict of options; for example '
            f'{{"limits": "100/minute"}}'
        )
    check_names('app.config["RATEKEEPER"]', found, OPTION_NAMES)
    return found
