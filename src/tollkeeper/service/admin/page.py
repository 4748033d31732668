"""The page at /docs: every operation of the service, made from the OpenAPI document.

It needs no script and no file from another server. The usual pages load theirs from public servers,
which a node in a private network cannot reach and should not trust.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from typing import Any, Final

_STYLE: Final = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.5rem;border-bottom:1px solid #8886}
details{margin:.4rem 0;padding:.4rem .7rem;border:1px solid #8886;border-radius:.4rem}
summary{cursor:pointer}summary small{opacity:.75}
b{display:inline-block;min-width:4.2rem}code{font-size:.95em}
pre{overflow-x:auto;padding:.6rem;background:#8882;border-radius:.3rem}
table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;
vertical-align:top}
"""
_HASH: Final = b64encode(sha256(_STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    f"frame-ancestors 'none'"
)
METHODS: Final = ("get", "put", "post", "delete", "patch", "head", "options")


def of(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    info = document["info"]
    sections = "".join(_section(document, tag) for tag in document["tags"])
    title = escape(f"{info['title']} {info['version']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"{_paragraphs(info.get('description', ''))}"
        f'<p>For programs: <a href="/openapi.json">/openapi.json</a></p>{sections}</body></html>'
    )


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the method, the path and the description of each operation."""
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield method.upper(), path, item[method]


def _section(document: Mapping[str, Any], tag: Mapping[str, Any]) -> str:
    found = [
        _operation(method, path, operation)
        for method, path, operation in operations(document)
        if tag["name"] in operation.get("tags", ())
    ]
    heading = f"<h2>{escape(tag['name'])}</h2>{_paragraphs(tag.get('description', ''))}"
    return heading + "".join(found) if found else ""


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    parts = [_paragraphs(operation.get("description", ""))]
    if role := operation.get("x-role"):
        parts.append(f"<p>Needs a token with the role <code>{escape(role)}</code>.</p>")
    parts.append(_parameters(operation.get("parameters", ())))
    if body := operation.get("requestBody"):
        parts.append(_body(body))
    parts.append(_responses(operation["responses"]))
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code> "
        f"<small>{escape(operation.get('summary', ''))}</small></summary>{''.join(parts)}</details>"
    )


def _parameters(parameters: Any) -> str:
    rows = [
        (
            f"<code>{escape(each['name'])}</code>",
            escape(each["in"]),
            escape(each.get("description", each.get("schema", {}).get("description", ""))),
        )
        for each in parameters
    ]
    return _table(("parameter", "in", ""), rows) if rows else ""


def _body(body: Mapping[str, Any]) -> str:
    kinds = ", ".join(escape(kind) for kind in body["content"])
    return f"<p>Body: <code>{kinds}</code></p>"


def _responses(responses: Mapping[str, Any]) -> str:
    rows = [
        (escape(str(status)), escape(each.get("description", "")))
        for status, each in responses.items()
    ]
    return _table(("status", ""), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{name}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{escape(part)}</p>" for part in text.split("\n\n") if part)
