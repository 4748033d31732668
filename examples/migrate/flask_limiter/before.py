"""A shop on Flask with Flask-Limiter, before the migration.

Run it: flask --app examples/migrate/flask_limiter/before run
"""

from __future__ import annotations

from flask import Blueprint, Flask, Response, jsonify, request
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

app = Flask(__name__)
limiter = Limiter(
    get_remote_address,
    app=app,
    default_limits=["4/day"],
    storage_uri="memory://",
)


def plan() -> str:
    return "3/day" if request.headers.get("X-Plan") == "pro" else "1/day"


def api_key() -> str:
    return request.headers.get("X-API-Key", "none")


@app.get("/")
def home() -> str:
    return "home"


@app.get("/orders/<int:number>")
def order(number: int) -> str:
    return f"order {number}"


@app.get("/search")
@limiter.limit("6/day")
def search() -> str:
    return "found"


@app.get("/suggest")
@limiter.limit("6/day", override_defaults=False)
def suggest() -> str:
    return "suggested"


@app.route("/notes", methods=["GET", "POST"])
@limiter.limit("2/day", methods=["POST"])
def notes() -> str:
    return "notes"


@app.get("/report")
@limiter.limit(plan, key_func=api_key)
def report() -> str:
    return "report"


@app.post("/mail")
@limiter.shared_limit("3/day", scope="messages")
def mail() -> str:
    return "sent"


@app.post("/sms")
@limiter.shared_limit("3/day", scope="messages")
def sms() -> str:
    return "sent"


@app.get("/tools")
@limiter.limit("1/day", exempt_when=lambda: request.headers.get("X-Internal") == "yes")
def tools() -> str:
    return "tools"


@app.post("/login")
@limiter.limit("2/day", deduct_when=lambda response: response.status_code == 401)
def login() -> tuple[str, int]:
    return ("welcome", 200) if request.form["password"] == "horse" else ("wrong", 401)


@app.get("/export")
@limiter.limit("10/day", cost=4)
def export() -> str:
    return "rows"


@app.get("/health")
@limiter.exempt
def health() -> str:
    return "ok"


admin = Blueprint("admin", __name__, url_prefix="/admin")


@admin.get("/users")
def users() -> str:
    return "users"


limiter.limit("2/day")(admin)
app.register_blueprint(admin)


@app.errorhandler(429)
def too_many(error: Exception) -> tuple[Response, int]:
    return jsonify(error="slow down"), 429
