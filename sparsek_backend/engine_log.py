"""What vLLM's log says of an engine that failed: the error, before pages of tracebacks."""

from __future__ import annotations

import re

ENGINE_ERROR = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) .*\b\w*(?:Error|Exception): ")
"""A line of an engine or its workers that names an exception."""
