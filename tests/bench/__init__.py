"""The relay's benchmark: the proxy and its peers side by side. `python -m tests.bench`; see docs/performance.md."""
