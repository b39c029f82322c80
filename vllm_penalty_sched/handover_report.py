"""What came of choosing where to prefill, between two reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverReport:
    """What happened since the report before it.

    Attributes:
        choices: Prompts by the side that was to prefill them and why, as ``local:cheaper_here``.
        seconds: For each prompt prefilled elsewhere, from asking to its KV cache being here.
        fallbacks: Prompts that were prefilled here after all, by cause.
        is_up: Whether the prefill instance can be asked now.
    """

    choices: Mapping[str, int] = field(default_factory=dict)
    seconds: Sequence[float] = ()
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    is_up: bool = True
