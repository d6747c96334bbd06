"""Manifests for a cluster, made from the proxy's own settings: plain YAML, to be applied or to be built upon.

Pure: values in, plain dictionaries and text out. What is written here is what the proxy's discovery looks for (labels,
names of ports) and what its rules need of engines (a fresh engine id, a lease, time to drain): both stay in step.
"""

from trio_pdproxy.render.cluster import Plan, RenderError, files, manifests, text

__all__ = ["Plan", "RenderError", "files", "manifests", "text"]
