"""Rate limits for Flask: for all routes, for a blueprint, and for each view.

    app = Flask(__name__)
    limit = RateLimit(app, "100/minute", store="shared:///run/api.limits")

    @app.get("/search")
    @limit("5/second")
    def search(): ...

    limit("20/minute")(blueprint)        # all views of a blueprint together
    limit.exempt(view_or_blueprint)      # not even the limits of the application

The application is wrapped in a WSGI layer (`wsgi.py`), which adds the headers and settles. Charging
happens inside Flask, once it has matched the URL and opened the session: so an endpoint is known by
its rule (`/users/<int:id>`, whatever the number), a key may come from the session, and a refusal is
a response like any other, which the application's `after_request` functions see.

Each view counts by itself, under its endpoint's name, whichever of its URLs was asked for; so does
each method of a class that is decorated, as "POST item". With a `name`, all that have the same
share one count. All are kept in one store.

Views that are `async` work: Flask runs each in an event loop of its own, in the worker's thread,
and the limits are asked before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import wraps
from itertools import takewhile
from typing import Any, Final, ParamSpec, TypeVar, Unpack, cast

from tollkeeper.core.errors import ConfigError, show
from tollkeeper.core.model import check_name
from tollkeeper.core.rates import LimitsArgument
from tollkeeper.web.answers import Answer
from tollkeeper.web.bill import Bill
from tollkeeper.web.calls import WsgiCall
from tollkeeper.web.charges import PASSED, Charge
from tollkeeper.web.guard import LOG, Guard, Options, Terms
from tollkeeper.web.terms import RouteOptions, plain
from tollkeeper.wsgi import BILL, CHARGE, billed

try:
    from flask import Blueprint, Flask, Response, current_app, has_app_context, request, session
    from flask.views import View as ClassView
    from werkzeug.local import LocalProxy
except ImportError as error:
    raise ConfigError(
        f"tollkeeper.flask needs Flask ({error}); install it with: pip install 'tollkeeper[flask]'"
    ) from error

__all__ = ["Charge", "RateLimit", "charge"]

P = ParamSpec("P")
R = TypeVar("R")
View = TypeVar("View", bound="Callable[..., Any] | Blueprint")

EXTENSION: Final = "tollkeeper"
_EXEMPT: Final = "__tollkeeper_exempt__"

charge: Charge = cast("Charge", LocalProxy(lambda: request.environ.get(CHARGE) or Charge(PASSED)))
"""The charge of the request that is being served: the last that was made, and so a view's own."""


class RateLimit:
    """The limits of a Flask application.

    `app`, the limits of all its routes (or `rules`, or none), and what `Terms` says, by name.
    Without an `app`, call `init_app` with it later. What `app.config["TOLLKEEPER"]` has, a dict of
    the same names, goes before.
    """

    def __init__(
        self,
        app: Flask | None = None,
        limits: LimitsArgument | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._options: dict[str, Any] = {"limits": limits, **options}
        self._exempt: list[Blueprint] = []
        # The names that were given: a view whose endpoint is called so has another.
        self._given: set[str] = set()
        # Views as they were before they were decorated; by number, since some are no keys.
        self._undecorated: dict[int, Callable[..., Any]] = {}
        # What is wrong is refused now, and not when there is an application.
        plain(Terms(limits=limits, **options))
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Limit an application."""
        if not isinstance(app, Flask):
            raise ConfigError(f"{show(app)} is not a Flask application; write RateLimit(app, …)")
        guard = Guard(plain(Terms(**{**self._options, **_configured(app)})))
        guards = app.extensions.setdefault(EXTENSION, {})
        if self in guards:
            guard.close()
            raise ConfigError(f"{app.name} has this RateLimit already; call init_app once")
        guards[self] = guard
        serve = app.wsgi_app

        def serve_billed(environ: Any, start_response: Any) -> Iterable[bytes]:
            return billed(environ, start_response, guard, serve)

        app.wsgi_app = serve_billed  # type: ignore[method-assign]  # Flask's own way to wrap it
        app.before_request(self._before_request)

    def __call__(
        self, limits: LimitsArgument, *, name: str = "", **options: Unpack[RouteOptions]
    ) -> Callable[[View], View]:
        """Decorate a view, or call with a Blueprint: its requests pass further limits.

        `key`, `skip` and `on_limit` are those of the application unless said here.
        """
        check_name("name", name)
        terms = plain(Terms(limits=limits, **options))
        self._given.add(name)

        def decorate(limited: View) -> View:
            if isinstance(limited, Blueprint):
                limited.before_request(lambda: self._before_blueprint(limited, terms, name))
                return limited
            return cast("View", self._view(limited, terms, name))

        return decorate

    def exempt(self, view: View) -> View:
        """Have a view, or all of a Blueprint, pass without any limit but those of its own."""
        if isinstance(view, Blueprint):
            self._exempt.append(view)
        else:
            setattr(view, _EXEMPT, True)
        return view

    def guard_of(self, app: Flask | None = None) -> Guard:
        """The guard of an application, by default the one that is being served."""
        found = app or (current_app if has_app_context() else None)
        guard = None if found is None else found.extensions.get(EXTENSION, {}).get(self)
        if guard is None:
            raise ConfigError(
                "a limit was asked for by an application that its RateLimit is not installed in; "
                "make it with RateLimit(app), or call init_app(app)"
            )
        return cast("Guard", guard)

    def close(self, app: Flask | None = None) -> None:
        """Close what was opened for an application."""
        self.guard_of(app).close()

    # ── Charging ───────────────────────────────────────────────────────────────────────────────

    def _before_request(self) -> Any:
        view = current_app.view_functions.get(request.endpoint or "")
        if self._undecorated.pop(id(view), None) is not None:
            LOG.warning(
                "%s is served without the limit that it is decorated with; write the limit below "
                "the route: @app.get(…) first, then @limit(…)",
                request.endpoint,
            )
        return None if self._is_exempt() else self._refusal(self.guard_of())

    def _view(self, view: Callable[P, R], terms: Terms, name: str) -> Callable[P, R | Response]:
        if not callable(view):
            raise ConfigError(f"{show(view)} is neither a view nor a Blueprint, so has no requests")

        self._undecorated[id(view)] = view

        @wraps(view)
        def limited(*args: P.args, **kwargs: P.kwargs) -> R | Response:
            refusal = self._refusal_beside(terms, name, _name_of(view, args))
            if refusal is not None:
                return cast("Response", refusal)
            return cast("R", current_app.ensure_sync(view)(*args, **kwargs))

        return limited

    def _before_blueprint(self, blueprint: Blueprint, terms: Terms, name: str) -> Any:
        known = current_app.blueprints
        around = [known[each] for each in request.blueprints]  # the innermost first
        inner = takewhile(lambda each: each is not blueprint, around)
        if _view_is_exempt() or any(each in self._exempt for each in inner):
            return None
        # Under the first of the names that it is registered by: two may be called v1 in two others.
        known_as = next(each for each in known if known[each] is blueprint)
        return self._refusal_beside(terms, name, f"{known_as}.*")

    def _refusal_beside(self, terms: Terms, given: str, found: str) -> Any:
        """By limits of the name that was `given`, or else found for them."""
        guard = self.guard_of()
        if not given:
            # Who shares the name that somebody else was given would share the count.
            taken = found in self._given or found == guard.terms.name
            given = _bill().name_of(f"{found}()" if taken else found)
        return self._refusal(guard.beside(terms, given))

    def _refusal(self, guard: Guard) -> Any:
        """The response to a request that may not pass; None to one that may."""
        rule = None if request.url_rule is None else request.url_rule.rule
        native = cast("Any", request)._get_current_object()  # noqa: SLF001 - werkzeug's name for it
        call = WsgiCall(request.environ, native, session, route=rule)
        bill = _bill()
        refusal = bill.refusal(guard, call)
        request.environ[CHARGE] = bill.charge
        if isinstance(refusal, Answer):
            return Response(refusal.body, refusal.status, refusal.headers)
        return refusal

    def _is_exempt(self) -> bool:
        if _view_is_exempt():
            return True
        registered = (current_app.blueprints[name] for name in request.blueprints)
        return any(each in self._exempt for each in registered)


def _name_of(view: Callable[..., Any], args: tuple[object, ...]) -> str:
    """What a view's count is kept under: its endpoint, and which of a class's methods it is."""
    endpoint = str(request.endpoint)
    method = getattr(view, "__name__", "")
    if not args or not isinstance(args[0], ClassView) or method == "dispatch_request":
        return endpoint
    return f"{method.upper()} {endpoint}"


def _view_is_exempt() -> bool:
    view = current_app.view_functions.get(request.endpoint or "")
    return bool(getattr(view, _EXEMPT, False))


def _bill() -> Bill:
    bill = request.environ.get(BILL)
    if isinstance(bill, Bill):
        return bill
    raise ConfigError(
        "this request did not come through the application's wsgi_app, which settles its limits; "
        "serve the application itself, or use app.test_client() in a test"
    )


def _configured(app: Flask) -> dict[str, Any]:
    found = app.config.get("TOLLKEEPER", {})
    known = [field.name for field in fields(Terms)]
    if not isinstance(found, dict) or not set(found) <= set(known):
        wrong = sorted(set(found) - set(known)) if isinstance(found, dict) else found
        raise ConfigError(
            f'app.config["TOLLKEEPER"] has {show(wrong)}; it is a dict of these: {", ".join(known)}'
        )
    return found
