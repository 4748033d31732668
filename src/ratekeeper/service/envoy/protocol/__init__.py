"""The messages of Envoy's rate limit service, version 3, from .proto files of our own.

The .proto files have the packages, names and numbers of Envoy's, and only what the service needs.
tests/service/envoy/generate.py generates `files.py` and `messages.pyi` from them.
"""
