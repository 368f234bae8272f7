"""The plugin that SGLang calls in its processes: the entry point ``sglang.srt.plugins``.

It must be quick and import no model: each process of SGLang calls it.
"""

from __future__ import annotations

from typing import Any

#: The name of the load format.
LOAD_FORMAT = "rankless"

#: The function that SGLang calls with the options of a load, before it looks for a loader. It has no other place for a
#: name of ours.
_HOOKED = "sglang.srt.configs.load_config.LoadConfig.__post_init__"


def register() -> None:
    """Register the load format ``rankless`` with SGLang. It may be called several times."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - inside of SGLang only
    from sglang.srt.server_args import LOAD_FORMAT_CHOICES, add_load_format_choices  # noqa: PLC0415

    if LOAD_FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([LOAD_FORMAT])
        HookRegistry.register(_HOOKED, select_loader, HookType.BEFORE)


def select_loader(load_config: Any, *args: Any, **kwargs: Any) -> None:
    """Put the class of the loader in place of its name: SGLang accepts a class as a load format.

    SGLang calls it in each process that makes the options of a load.
    """
    del args, kwargs
    if load_config.load_format == LOAD_FORMAT:
        from rankless.sglang.model_loader import RanklessSglangLoader  # noqa: PLC0415

        load_config.load_format = RanklessSglangLoader
