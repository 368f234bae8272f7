"""SGLang's weights by exact byte ranges: ``sglang serve --model-path MODEL --load-format rankless``.

SGLang finds the load format by itself, because rankless registers it as a plugin when both are installed.
"""

from rankless.sglang.plugin import register

__all__ = ["register"]
