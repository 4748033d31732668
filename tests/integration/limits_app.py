"""A Flask application with Flask-Limiter; `STORAGE_URI` names the storage."""

from __future__ import annotations

import os

from flask import Flask, jsonify
from flask.typing import ResponseReturnValue
from flask_limiter import Limiter

import ratekeeper.limits  # noqa: F401 - registers the storages

app = Flask(__name__)
limiter = Limiter(lambda: "all clients", app=app, storage_uri=os.environ["STORAGE_URI"])


@app.get("/hello")
@limiter.exempt
def hello() -> ResponseReturnValue:
    """Answer that the application serves."""
    return jsonify(worker=os.getpid())


@app.get("/")
@limiter.limit("20/300 day")
def index() -> ResponseReturnValue:
    """Answer with the worker's number."""
    return jsonify(worker=os.getpid())


@app.errorhandler(429)
def denied(error: Exception) -> ResponseReturnValue:
    """Answer a denied request with the worker's number, too."""
    return jsonify(worker=os.getpid()), 429
