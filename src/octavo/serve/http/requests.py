"""Request bodies of the endpoints, as pydantic models in strict mode."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from octavo.serve.http.errors import field_error, format_number, wrong_type
from octavo.serve.http.limits import Limits


def _check_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can hold half of a surrogate pair, which no tokenizer takes.
        raise ValueError("holds half of a surrogate pair, which is no character") from None
    return value


def _unsupported_unless(*neutral: Any) -> Callable[[Any, Any], None]:
    """A validator of a field of OpenAI's that this server does not implement: only values without effect pass."""

    def check(value: Any, info: Any) -> None:
        # Compared with the type: in Python, 0 == False.
        if not any(type(value) is type(one) and value == one for one in neutral):
            raise field_error(str(info.field_name), "is not supported by this server: leave it out", code="unsupported")

    return check


def _drop_empty(value: Any) -> Any:
    """An object without the fields that are null or an empty list, which clients send for `tool_calls` and the like."""
    return {k: v for k, v in value.items() if v is not None and v != []} if isinstance(value, dict) else value


def _clean_message(value: Any) -> Any:
    found = _drop_empty(value)
    # A message that calls tools may have no content.
    return {"content": "", **found} if isinstance(found, dict) and "tool_calls" in found else found


def _check_arguments(value: str) -> str:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("is the text of a JSON object")
    return value


Text = Annotated[str, AfterValidator(_check_text)]
Penalty = Annotated[float, Field(ge=-2, le=2)] | None
Count = Annotated[int, Field(ge=1, le=1 << 30)]
Flag = bool | None


class _Model(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class TextPart(_Model):
    """A part of a message's content."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore")
    type: Literal["text"]
    text: Text


class CalledFunction(_Model):
    """The function that a message calls."""

    name: Text
    arguments: Annotated[Text, AfterValidator(_check_arguments)]


class ToolCall(_Model):
    """A call of a tool in a message of the model."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_dict(self) -> dict[str, Any]:
        """The call as a chat template takes it, with arguments as an object."""
        arguments = json.loads(self.function.arguments)
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Function(_Model):
    """A function that the model may call; its parameters are a JSON Schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None


class Tool(_Model):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Annotated[Function, BeforeValidator(_drop_empty)]

    def to_dict(self) -> dict[str, Any]:
        """The tool as a chat template takes it."""
        function = {name: getattr(self.function, name) for name in ("name", "description", "parameters")}
        return {"type": self.type, "function": {key: value for key, value in function.items() if value is not None}}


class JsonSchema(_Model):
    """The schema of an answer."""

    name: Text | None = None
    description: Text | None = None
    content: Any = Field(alias="schema")
    strict: Flag = None


class AnswerFormat(_Model):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Annotated[JsonSchema, BeforeValidator(_drop_empty)] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "AnswerFormat":
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise field_error("response_format", 'has json_schema with the type "json_schema", and only with it')
        return self


class Message(_Model):
    """One message of a conversation."""

    role: Text
    # Tags in angle brackets are left out of the names of fields in errors.
    content: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
        Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
    ]
    name: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Text | None = None

    def to_dict(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        found: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls is not None:
            found["tool_calls"] = [call.to_dict() for call in self.tool_calls]
        extra = {"name": self.name, "tool_call_id": self.tool_call_id}
        return found | {key: value for key, value in extra.items() if value is not None}


class StreamOptions(_Model):
    """Options of a stream."""

    include_usage: Flag = None
    include_obfuscation: Annotated[Any, AfterValidator(_unsupported_unless(False, None))] = None


class GenerationRequest(_Model):
    """The fields that both endpoints have. A null is the same as a field that is left out."""

    model: Text | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[Any, AfterValidator(_unsupported_unless({}))] = None
    user: Any = None

    @field_validator("n")
    @classmethod
    def _check_n(cls, value: int, info: Any) -> int:
        choices = _limits(info).choices
        if value > choices:
            raise field_error("n", f"is at most {choices}, got {format_number(value)}", code="out_of_range")
        return value

    @field_validator("stop", mode="plain")
    @classmethod
    def _check_stop(cls, value: Any, info: Any) -> tuple[str, ...]:
        if not isinstance(value, str | list):
            raise wrong_type("stop", "a string or a list of strings", value)
        found = tuple([value] if isinstance(value, str) else value)
        _check_texts("stop", found)
        if len(found) > _limits(info).stops:
            raise field_error(
                "stop", f"is at most {_limits(info).stops} strings, got {len(found)}", code="out_of_range"
            )
        if "" in found:
            raise field_error("stop", "has an empty string, which would stop every text at once")
        return found

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise field_error("stream_options", "needs stream to be true")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens used."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: tuple[str | tuple[int, ...], ...]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Annotated[Any, AfterValidator(_unsupported_unless(""))] = None
    best_of: Annotated[Any, AfterValidator(_unsupported_unless(1))] = None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: Any) -> tuple[str | tuple[int, ...], ...]:
        """A text, token ids, or a list of either: one prompt or several."""
        forms = "a string, a list of strings, token ids or a list of lists of token ids"
        if not isinstance(value, str | list):
            raise wrong_type("prompt", forms, value)
        if value == []:
            raise field_error("prompt", "is empty: give at least one prompt")
        if isinstance(value, str) or all(isinstance(one, str) for one in value):
            prompts = (value,) if isinstance(value, str) else tuple(value)
            _check_texts("prompt", prompts)
            return prompts
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(one, list) and one and _are_ids(one) for one in value):
            return tuple(map(tuple, value))
        raise field_error("prompt", f"is {forms}; these are mixed, empty or of another type", code="wrong_type")

    @model_validator(mode="after")
    def _check_together(self, info: Any) -> "CompletionRequest":
        count, choices = len(self.prompt), _limits(info).choices
        if count * self.n > choices:
            raise field_error(
                "prompt" if count > 1 else "n",
                f"asks for too much: {count} prompts times n={self.n} is more than {choices}",
                code="out_of_range",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to each token have their log probability in the answer; None for no logprobs."""
        return self.logprobs


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Annotated[Message, BeforeValidator(_clean_message)]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    response_format: Annotated[AnswerFormat, BeforeValidator(_drop_empty)] | None = None
    modalities: Annotated[Any, AfterValidator(_unsupported_unless(["text"]))] = None
    tools: list[Tool] = []
    tool_choice: str | tuple[str] = "auto"
    """"auto", "none", "required", or the name of a tool in a tuple."""
    functions: Annotated[Any, AfterValidator(_unsupported_unless([]))] = None
    function_call: Annotated[Any, AfterValidator(_unsupported_unless("none"))] = None
    parallel_tool_calls: bool = True
    store: Annotated[Any, AfterValidator(_unsupported_unless(False))] = None
    metadata: Any = None

    @field_validator("response_format")
    @classmethod
    def _check_format(cls, value: AnswerFormat) -> AnswerFormat | None:
        return None if value.type == "text" else value

    @field_validator("tool_choice", mode="plain")
    @classmethod
    def _check_tool_choice(cls, value: Any) -> str | tuple[str]:
        match value:
            case "auto" | "none" | "required":
                return value
            case {"type": "function", "function": {"name": str(name)}}:
                return (name,)
        raise field_error(
            "tool_choice",
            'is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
            code="wrong_type",
        )

    @model_validator(mode="after")
    def _check_tools(self) -> "ChatCompletionRequest":
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error("tools", "has two tools of one name")
        if self.required_tools and self.response_format is not None:
            raise field_error("response_format", "is not supported with a tool_choice that requires a call")
        chosen = self.tool_choice if isinstance(self.tool_choice, tuple) else ()
        for name in chosen:
            if name not in names:
                raise field_error("tool_choice", f"names {name[:60]!r}, which tools has not")
        if self.tool_choice == "required" and not names:
            raise field_error("tool_choice", "requires a call, but there are no tools")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs to be true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise field_error("max_tokens", "is the old name of max_completion_tokens: give one of them")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def used_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> dict[str, Any]:
        """The tools one of which the model has to call, with their parameters; empty if it may answer."""
        chosen = self.tool_choice
        return {
            tool.function.name: {"type": "object"} if tool.function.parameters is None else tool.function.parameters
            for tool in self.tools
            if chosen == "required" or chosen == (tool.function.name,)
        }

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to each token have their log probability in the answer; None for no logprobs."""
        return self.top_logprobs if self.logprobs else None


class EmbeddingRequest(_Model):
    """The body of POST /v1/embeddings."""

    model: Text | None = None
    input: tuple[str, ...]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Any, AfterValidator(_unsupported_unless(None))] = None
    user: Any = None

    @field_validator("input", mode="plain")
    @classmethod
    def _check_input(cls, value: Any, info: Any) -> tuple[str, ...]:
        if not isinstance(value, str | list):
            raise wrong_type("input", "a string or a list of strings", value)
        texts = (value,) if isinstance(value, str) else tuple(value)
        _check_texts("input", texts)
        if not texts or "" in texts:
            raise field_error("input", "is empty, or has an empty string")
        if len(texts) > _limits(info).inputs:
            raise field_error(
                "input", f"is at most {_limits(info).inputs} strings, got {len(texts)}", code="out_of_range"
            )
        return texts


def _check_texts(name: str, values: Sequence[Any]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise wrong_type(name, "a string", value)
        try:
            _check_text(value)
        except ValueError as error:
            raise field_error(name, str(error)) from None


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(one) is int for one in values)


def _limits(info: Any) -> Limits:
    assert isinstance(info.context, Limits)
    return info.context
