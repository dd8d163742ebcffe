"""Requests as clients send them: OpenAI's fields, plus vLLM's that this engine has.

Fields of vLLM's that this engine does not have are accepted at the value that changes nothing, and refused otherwise:
a setting must never be ignored in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_rl.inference.embedded.sampling import SamplingParams

MAX_CHOICES = 256
MAX_PROMPTS = 1024
# vLLM's default limit.
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64

# Say nothing about what is generated.
_IGNORED = frozenset(
    {
        "cache_salt",
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_options",
        "user",
    }
)
# Field -> values at which it changes nothing (null never does).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "structured_outputs": (),
    "chat_template": (),
    "reasoning_effort": (),
}

TokenId = Annotated[int, Field(ge=0)]
Prompt = str | list[TokenId]


class _Generation(BaseModel):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    # The range of OpenAI and vLLM.
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    # -1, like 0: all.
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKENS)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _refuse_what_has_no_effect(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _IGNORED or value is None:
                continue
            if name not in _NEUTRAL:
                raise ValueError(f"{name!r} is not a field of this server")
            if value not in _NEUTRAL[name]:
                raise ValueError(f"{name!r} is not supported by the embedded engine: remove it or use vLLM")
        return self

    @model_validator(mode="after")
    def _stop_strings(self) -> Self:
        if len(self.stop_strings) > MAX_STOP_STRINGS or "" in self.stop_strings:
            raise ValueError(f"stop: at most {MAX_STOP_STRINGS} strings, none of them empty")
        return self

    @model_validator(mode="after")
    def _shortest_below_longest(self) -> Self:
        most = getattr(self, "max_completion_tokens", None) or self.max_tokens
        if most is not None and (self.min_tokens or 0) > most:
            raise ValueError(f"min_tokens: found {self.min_tokens}: must be at most max_tokens = {most}")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int, num_top_logprobs: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=self.stop_strings,
            num_top_logprobs=num_top_logprobs,
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(_Generation):
    """POST /v1/completions."""

    prompt: Prompt | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS)]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[Prompt]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or not given or isinstance(given[0], int) else given


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str = Field(pattern="^text$")
    text: str


class ChatMessage(BaseModel):
    """One message; pictures, sounds and tool calls are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str = Field(max_length=64)
    content: str | list[TextPart]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(_Generation):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self


class LoadAdapterRequest(BaseModel):
    """POST /v1/load_lora_adapter. The path was already checked by the guard."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_path: str


class UnloadAdapterRequest(BaseModel):
    """POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lora_name: str
    lora_int_id: int | None = None
