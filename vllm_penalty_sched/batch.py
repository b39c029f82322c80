"""What one engine step computes: the shape that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_penalty_sched.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The composition of one step.

    Attributes:
        prefills: One ``(new, cached)`` pair for each prefill chunk: tokens computed in this
            step, new >= 1, and tokens of the same request computed before it, cached >= 0.
        decode_seqs: Requests that decode in this step.
        decode_tokens: Tokens that they compute; above ``decode_seqs`` with speculative decoding.
        decode_context: Sum of the decodes' context lengths, tokens.
        encoder_tokens: Prompt tokens of the images, sounds or videos that an encoder works on in
            this step, whole ones, ahead of the chunks that hold them.

    Raises:
        ConfigError: If a count is negative, or a chunk has no new token.
    """

    prefills: tuple[tuple[int, int], ...] = ()
    decode_seqs: int = 0
    decode_tokens: int = 0
    decode_context: int = 0
    encoder_tokens: int = 0

    def __post_init__(self) -> None:
        counts = (self.decode_seqs, self.decode_tokens, self.decode_context)
        if min(counts) < 0:
            raise ConfigError(f"decode counts must be >= 0, got {counts}")
        if self.encoder_tokens < 0:
            raise ConfigError(f"encoder_tokens must be >= 0, got {self.encoder_tokens}")
        for new, cached in self.prefills:
            if new < 1 or cached < 0:
                raise ConfigError(
                    f"a prefill chunk must have new >= 1 and cached >= 0, got ({new}, {cached})"
                )

    @property
    def prefill_tokens(self) -> int:
        """New prompt tokens of the step."""
        return sum(new for new, _ in self.prefills)

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return self.prefill_tokens + self.decode_tokens

    @property
    def prefill_ratio(self) -> float:
        """Prefill tokens over all tokens, 0 to 1; 0 for an empty step."""
        return self.prefill_tokens / self.tokens if self.tokens else 0.0

    def without_prefill(self) -> BatchShape:
        """Return the same step with its decodes only."""
        return replace(self, prefills=(), encoder_tokens=0)

    def with_prefill(self, new: int, cached: int, encoder_tokens: int = 0) -> BatchShape:
        """Return the same step with one more prefill chunk; unchanged if ``new`` is 0.

        Args:
            new: Tokens of the chunk.
            cached: Tokens of the same request computed before it.
            encoder_tokens: What the encoder works on for it.
        """
        if new == 0:
            return self
        return replace(
            self,
            prefills=(*self.prefills, (new, cached)),
            encoder_tokens=self.encoder_tokens + encoder_tokens,
        )
