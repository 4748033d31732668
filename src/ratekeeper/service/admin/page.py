"""The page at /docs: Swagger UI, which shows every operation and can try it.

Its files are vendored and served by this node: a node in a private network cannot reach public
servers and should not trust them. The policy permits files and requests of this origin only, and
neither inline scripts nor inline styles. Swagger UI needs no exception.
"""

from __future__ import annotations

from typing import Final

from ratekeeper.service.http.static_files import console_files

# The icons in the style sheet of Swagger UI are `data:` URLs.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE: Final = """<!doctype html>
<html lang="en" data-openapi="/openapi.json">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>API of Ratekeeper</title>
<link rel="icon" href="{icon}">
<link rel="stylesheet" href="{swagger_css}">
<link rel="stylesheet" href="{docs_css}">
<script src="{swagger_js}" defer></script>
<script src="{docs_js}" defer></script>
</head>
<body>
<div id="docs"></div>
<noscript>This page needs JavaScript. <a href="/openapi.json">/openapi.json</a> has the same
description for programs.</noscript>
</body>
</html>
"""


def page() -> str:
    """Return the page."""
    url = console_files().url
    return _PAGE.format(
        icon=url("icon.svg"),
        swagger_css=url("vendor/swagger-ui.css"),
        swagger_js=url("vendor/swagger-ui.js"),
        docs_css=url("docs.css"),
        docs_js=url("docs.js"),
    )
