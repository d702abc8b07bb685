"""Query-adaptive patterns: queries are clustered, and each cluster has its own pattern."""

from sparsek_backend.patterns.adaptive.learn import AdaptiveLearner
from sparsek_backend.patterns.adaptive.routing import AdaptivePattern

__all__ = ["AdaptiveLearner", "AdaptivePattern"]
