"""A shop on Flask with Ratekeeper, after the migration from Flask-Limiter.

Run it: flask --app examples/migrate/flask_limiter/after run
"""

from __future__ import annotations

from flask import Blueprint, Flask, Response, jsonify, request

from ratekeeper.flask import RateLimit

app = Flask(__name__)
limit = RateLimit(app, "4/day fixed_window", per_route=True)


def plan() -> str:
    return "3/day" if request.headers.get("X-Plan") == "pro" else "1/day"


@app.get("/")
def home() -> str:
    return "home"


@app.get("/orders/<int:number>")
def order(number: int) -> str:
    return f"order {number}"


# limit.exempt: the default does not apply to this view, as in Flask-Limiter.
@app.get("/search")
@limit.exempt
@limit("6/day fixed_window")
def search() -> str:
    return "found"


@app.get("/suggest")
@limit("6/day")
def suggest() -> str:
    return "suggested"


@app.route("/notes", methods=["GET", "POST"])
@limit.exempt
@limit("2/day", methods=["POST"])
@limit("4/day fixed_window", methods=["GET"])
def notes() -> str:
    return "notes"


@app.get("/report")
@limit.exempt
@limit(plan, key="header:X-API-Key")
def report() -> str:
    return "report"


@app.post("/mail")
@limit.exempt
@limit("3/day", name="messages")
def mail() -> str:
    return "sent"


@app.post("/sms")
@limit.exempt
@limit("3/day", name="messages")
def sms() -> str:
    return "sent"


@app.get("/tools")
@limit.exempt
@limit("1/day", skip=lambda: request.headers.get("X-Internal") == "yes")
def tools() -> str:
    return "tools"


@app.post("/login")
@limit.exempt
@limit("2 in any day", count=lambda status: status == 401)
def login() -> tuple[str, int]:
    return ("welcome", 200) if request.form["password"] == "horse" else ("wrong", 401)


@app.get("/export")
@limit.exempt
@limit("10/day", cost=4)
def export() -> str:
    return "rows"


@app.get("/health")
@limit.exempt
def health() -> str:
    return "ok"


admin = Blueprint("admin", __name__, url_prefix="/admin")


@admin.get("/users")
def users() -> str:
    return "users"


limit.exempt(admin)
limit("2/day")(admin)
app.register_blueprint(admin)


@app.errorhandler(429)
def too_many(error: Exception) -> tuple[Response, int]:
    return jsonify(error="slow down"), 429
