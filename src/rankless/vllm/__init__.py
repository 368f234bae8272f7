"""vLLM's weights by exact byte ranges: ``vllm serve MODEL --load-format rankless``.

vLLM finds the load format by itself, because rankless registers it as a plugin when both are installed.
"""

from rankless.vllm.plugin import register

__all__ = ["register"]
