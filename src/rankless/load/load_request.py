"""The arguments of a load, and their checks.

Callers of :mod:`rankless.load.fallback` make one on each rank. Ranks compare :meth:`LoadRequest.describe_call` in the
first vote, and check their arguments there, so that all raise the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rankless.engine.comm.call_check import CallDescription
from rankless.formats.reader import Reader
from rankless.observe.events import OnEvent, ignore_event
from rankless.ondisk.validation import check_choice, check_tag
from rankless.run.tag_arguments import Best
from rankless.state.mismatches import COMPONENTS, RestorePolicy
from rankless.state.training import TrainingObjects

#: How ranks read bytes that several of them need.
SHARE_READS = ("auto", "always", "never")

#: The reaction if the newest checkpoint is corrupt and no tag was given.
ON_CORRUPTION = ("fall_back", "raise")


class LoadRequest(msgspec.Struct, frozen=True):
    """A request to load the checkpoint ``path/tag``, or without a tag the latest one, or ``path`` if that is one.

    ``edit`` changes the content: it returns the reader of the checkpoint after an edit, or the reader as it is, if this
    edit has made the checkpoint. ``reader_adapter`` wraps the result in another reader, which renames or joins its
    tensors; ``reader_adapter_text`` describes it. ``local``: the options of the local tier, as text. ``token``: the
    job's token, which rank 0 passes on. ``resume``: as the caller passed it. ``goes_back_once``: if the run went back
    to the checkpoint of the tag already, load the latest one. For example, ``runs/a`` with the tag ``step_10``, or
    ``runs/a/step_10`` without one.
    """

    path: Path
    tag: str | Best | None
    training: TrainingObjects
    policy: RestorePolicy
    verify: bool
    share_reads: str = "auto"
    on_corruption: str = "fall_back"
    keys: Mapping[str, str] = msgspec.field(default_factory=dict)
    reader_adapter: Callable[[Reader], Reader] = lambda reader: reader
    reader_adapter_text: str = "as it is"
    edit: Callable[[Reader], Reader] | None = None
    local: str = "none"
    token: str = ""
    resume: bool | None = None
    goes_back_once: bool = False
    on_event: OnEvent = ignore_event
    began: float = msgspec.field(default_factory=time.perf_counter)

    def describe_call(self) -> CallDescription:
        """Return the arguments that must be equal on all ranks."""
        arguments = {
            "the path": repr(str(self.path)),
            "the tag": repr(self.tag),
            "what is loaded": ", ".join(self.training.component_names()) or "nothing",
            "share_reads": self.share_reads,
            "on_corruption": self.on_corruption,
            "keys": repr(sorted(self.keys.items())),
            "allow_missing": ", ".join(sorted(self.policy.allow_missing)),
            "strict": f"{self.policy.strict}, but not for {', '.join(sorted(self.policy.lenient)) or 'nothing'}",
            "cast_dtype": str(self.policy.cast_dtype),
            "verify": str(self.verify),
            "resume": f"{self.resume}, {'once' if self.goes_back_once else 'again'}",
            "the local tier": self.local,
            "the adapter of the checkpoint's reader": self.reader_adapter_text,
            "edit": str(self.edit),
        }
        shared = {"the settings of the data loader": self.training.loader_settings()}
        return CallDescription("load", arguments, shared)

    def check_arguments(self) -> None:
        """Raise ``InvalidArgumentError`` if an argument is invalid."""
        if isinstance(self.tag, str):
            check_tag(self.tag)
        check_choice("share_reads", self.share_reads, SHARE_READS)
        check_choice("on_corruption", self.on_corruption, ON_CORRUPTION)
        named = {*self.training.component_names(), *self.training.stateful_names()}
        for argument, components in (
            ("each of allow_missing", self.policy.allow_missing),
            ("each key of strict", self.policy.lenient),
        ):
            for component in components:
                check_choice(argument, component, (*COMPONENTS, *(name for name in named if "/" in name)))
